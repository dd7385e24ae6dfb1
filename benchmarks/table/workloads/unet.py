"""The U-Net of DALL-E 2: residual blocks that read a time and tokens, and attention at its bottom."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gain(nn.Module):
    """A layer norm with a factor and without a shift, in single operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var(x, -1, unbiased=False, keepdim=True), x.mean(-1, keepdim=True)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.factor


class Sinusoids(nn.Module):
    """Sines and cosines of a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, time: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=time.device, dtype=time.dtype) * -(math.log(10000) / (half - 1)))
        angles = time[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


class Attention(nn.Module):
    """Attention of a sequence to itself, with one key for all heads, or to tokens; a learned key is always there."""

    def __init__(self, width: int, heads: int, size: int, tokens: int | None = None) -> None:
        super().__init__()
        self.heads, self.shared, inner = heads, tokens is None, heads * size
        self.norm, self.null, self.scale = Gain(width), nn.Parameter(torch.randn(2, size)), size**-0.25
        self.query = nn.Linear(width, inner, bias=False)
        self.key_value = nn.Linear(tokens or width, 2 * (size if self.shared else inner), bias=False)
        self.out = nn.Sequential(nn.Linear(inner, width, bias=False), Gain(width))

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        read = self.norm(x)
        heads = 1 if self.shared else self.heads

        def split(tensor: Tensor, count: int) -> Tensor:
            return tensor.view(len(x), tensor.shape[1], count, -1).transpose(1, 2)

        key, value = (split(part, heads) for part in self.key_value(read if tokens is None else tokens).chunk(2, -1))
        null_key, null_value = (part.expand(len(x), heads, 1, -1) for part in self.null.unbind(0))
        key, value = torch.cat([null_key, key], 2) * self.scale, torch.cat([null_value, value], 2)
        scores = split(self.query(read), self.heads) * self.scale @ key.transpose(-1, -2)
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Half(nn.Module):
    """A convolution, a norm by groups and SiLU, with a scale and a shift between."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after)

    def forward(self, x: Tensor, scale_shift: tuple[Tensor, ...] | None = None) -> Tensor:
        x = self.norm(self.convolution(x))
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return F.silu(x)


class Residual(nn.Module):
    """Two halves: the first is scaled by the time, and attends to tokens if it is told of any."""

    def __init__(self, before: int, after: int, time: int, tokens: int | None = None) -> None:
        super().__init__()
        self.time, self.first, self.second = nn.Linear(time, 2 * after), Half(before, after), Half(after, after)
        self.attention = None if tokens is None else Attention(after, heads=8, size=64, tokens=tokens)
        self.past = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.first(x, self.time(F.silu(time))[..., None, None].chunk(2, 1))
        if self.attention is not None:
            sequence = hidden.flatten(2).transpose(1, 2)
            sequence = self.attention(sequence, tokens) + sequence
            hidden = sequence.transpose(1, 2).reshape(hidden.shape)
        return self.second(hidden) + self.past(x)


class Enlarging(nn.Module):
    """A doubling of height and width by a shuffle of channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, 4 * after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(F.silu(self.convolution(x)), 2)


class UNet(nn.Module):
    """A U-Net that predicts noise and its variance from a noisy image and a time.

    Args:
        width: The number of channels at the top.
        factors: The channels of each level, as multiples.
        image: The width of an image's embedding.
        tokens: The width of the tokens it attends to.
        heads: The heads of the attention at the bottom.
        size: The width of a head.
        text: The width of encodings of a text, and how many there are at most; None for a net that reads none.
        enlarges: Whether it is given a smaller image instead of an embedding.
    """

    def __init__(self, width: int, factors: tuple[int, ...], image: int, tokens: int, heads: int, size: int,
                 text: tuple[int, int] | None = None, enlarges: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.enlarges, time, levels = enlarges, 4 * width, [width, *(width * factor for factor in factors)]
        channels = 6 if enlarges else 3
        parts = (width // 2, width // 4, width - width // 2 - width // 4)
        self.first = nn.ModuleList(
            nn.Conv2d(channels, part, side, padding=side // 2) for part, side in zip(parts, (3, 7, 15), strict=True)
        )
        self.time = nn.Sequential(Sinusoids(width), nn.Linear(width, time), nn.GELU())
        self.time_tokens, self.time_condition = nn.Linear(time, 2 * tokens), nn.Linear(time, time)
        self.image_tokens = None if enlarges else nn.Linear(image, 4 * tokens)
        self.image_hidden = None if enlarges else nn.Sequential(nn.Linear(image, time), nn.GELU())
        self.text = None if text is None else nn.Linear(text[0], tokens)
        self.null_text = None if text is None else nn.Parameter(torch.randn(1, text[1], tokens))
        self.norm, self.middle_norm = nn.LayerNorm(tokens), nn.LayerNorm(tokens)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, (before, after) in enumerate(itertools.pairwise(levels)):
            reads, last = tokens if level else None, level == len(factors) - 1
            blocks = [Residual(before, before, time)] + [Residual(before, before, time, reads) for _ in range(2)]
            smaller = nn.Conv2d(before, after, 1) if last else nn.Conv2d(before, after, 4, 2, 1)
            self.downs.append(nn.ModuleList([*blocks, smaller]))
        bottom = levels[-1]
        self.middle_first, self.middle_last = (Residual(bottom, bottom, time, tokens) for _ in range(2))
        self.middle = Attention(bottom, heads, size)
        for level, (before, after) in reversed(list(enumerate(itertools.pairwise(levels)))):
            reads = tokens if level else None
            blocks = [Residual(after + before, after, time, reads) for _ in range(3)]
            larger = Enlarging(after, before) if level else nn.Identity()
            self.ups.append(nn.ModuleList([*blocks, larger]))
        self.last = Residual(levels[1] + width, width, time)
        self.out = nn.Conv2d(width + 3 if enlarges else width, 6, 1)

    def _conditions(self, time: Tensor, embedding: Tensor, encodings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The condition of every block, the tokens of most, and those of the bottom."""
        hidden = self.time(time)
        condition, tokens = self.time_condition(hidden), self.time_tokens(hidden).view(len(time), 2, -1)
        if self.image_hidden is not None and self.image_tokens is not None:
            condition = condition + self.image_hidden(embedding)
            tokens = torch.cat([tokens, self.image_tokens(embedding).view(len(time), 4, -1)], 1)
        bottom = tokens
        if self.text is not None and self.null_text is not None:
            missing = self.null_text.shape[1] - encodings.shape[1]
            present = F.pad((encodings != 0).any(-1), (0, missing), value=False).unsqueeze(-1)
            text = torch.where(present, F.pad(self.text(encodings), (0, 0, 0, missing)), self.null_text)
            bottom = torch.cat([tokens, text], 1)
        return condition, self.norm(tokens), self.middle_norm(bottom)

    def forward(self, x: Tensor, steps: Tensor, embedding: Tensor, encodings: Tensor, low: Tensor | None) -> Tensor:
        if low is not None:
            x = torch.cat([x, low], 1)
        x = torch.cat([convolution(x) for convolution in self.first], 1)
        top, skipped = x.clone(), []
        condition, tokens, bottom = self._conditions(steps.to(x.dtype), embedding, encodings)
        for first, second, third, smaller in self.downs:
            x = second(first(x, condition, tokens), condition, tokens)
            skipped.append(x)
            x = third(x, condition, tokens)
            skipped += [x, x]  # the last one stands for the attention that this level does not have
            x = smaller(x)
        x = self.middle_first(x, condition, bottom)
        sequence = x.flatten(2).transpose(1, 2)
        x = (self.middle(sequence) + sequence).transpose(1, 2).reshape(x.shape)
        x = self.middle_last(x, condition, bottom)
        for *blocks, larger in self.ups:
            for block in blocks:
                x = block(torch.cat([x, skipped.pop()], 1), condition, tokens)
            x = larger(x)
        x = self.last(torch.cat([x, top], 1), condition, tokens)
        return self.out(x if low is None else torch.cat([x, low], 1))
