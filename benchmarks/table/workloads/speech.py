"""Speech: the decoder Speech2Text2, and the transformer that reads sound and writes characters.

Speech2Text2 after Wang and others, "Large-Scale Self- and Semi-Supervised Learning for Speech Translation" (2021), with
the sizes of transformers 4. The speech transformer after Dong, Xu and Xu, "Speech-Transformer" (ICASSP 2018), with the
sizes of TorchBench.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws

IGNORED, PADDING = -1, 1


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of positions, of shape (length, width), alternating."""
    rates = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angles = torch.arange(length).float()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


# ---- Speech2Text2 ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention by several heads, with the scores and the mask added as tensors of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        def split(tensor: Tensor) -> Tensor:
            return tensor.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

        query, key, value = split(self.query(x) * self.scale), split(self.key(x)), split(self.value(x))
        weights = (query @ key.transpose(-1, -2) + mask).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class SpeechDecoderLayer(nn.Module):
    """Attention and a feed-forward part, each with dropout, a sum and a norm after it."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width)
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.norm(x + self.dropout(self.down(F.relu(self.up(x)))))


class Speech2Text2(nn.Module):
    """A decoder with positions that leave padding out, tied to the embedding of its words."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, inner: int, longest: int = 1024) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.register_buffer("positions", sinusoids(longest + PADDING + 1, width), persistent=False)
        self.layers = nn.ModuleList(SpeechDecoderLayer(width, heads, inner, dropout=0.1) for _ in range(layers))
        self.scale, self.dropout = math.sqrt(width), nn.Dropout(0.1)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        size, length = input_ids.shape
        present = input_ids.ne(PADDING).int()
        numbers = (torch.cumsum(present, 1) * present).long() + PADDING
        positions = self.positions.index_select(0, numbers.flatten()).view(size, length, -1).detach()
        x = self.words(input_ids) * self.scale
        x = self.dropout(x + positions)
        mask = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = F.linear(x, self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def speech2text2(small: bool) -> Task:
    """The decoder, with batches of 256 texts."""
    vocabulary, width, layers, heads, inner = (101, 32, 2, 4, 64) if small else (10000, 256, 6, 4, 2048)
    size, length = (2, 12) if small else (256, 128)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device)
        return {"input_ids": draws.integers(0, vocabulary, size, length),
                "labels": draws.integers(0, vocabulary, size, length)}  # fmt: skip

    return Task(Speech2Text2(vocabulary, width, layers, heads, inner), batch, lambda output, batch: output[0].float())


# ---- speech transformer ----------------------------------------------------------------------------------------------


class ScaledAttention(nn.Module):
    """Attention whose scores are divided by a temperature, a number of NumPy."""

    def __init__(self, temperature: np.float64, dropout: float) -> None:
        super().__init__()
        self.temperature, self.dropout = temperature, nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2)) / self.temperature
        if mask is not None:
            scores = scores.masked_fill(mask, -np.inf)
        return torch.bmm(self.dropout(scores.softmax(2)), value)


class Heads(nn.Module):
    """Attention by several heads, which stand beside each other in the batch, with a norm after its sum."""

    def __init__(self, width: int, heads: int, size: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.query, self.key, self.value = (nn.Linear(width, heads * size) for _ in range(3))
        self.attention = ScaledAttention(np.power(size, 0.5), dropout)
        self.out, self.dropout, self.norm = nn.Linear(heads * size, width), nn.Dropout(dropout), nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        def split(tensor: Tensor) -> Tensor:
            size, length, _ = tensor.shape
            parts = tensor.view(size, length, self.heads, self.size).permute(2, 0, 1, 3)
            return parts.reshape(self.heads * size, length, self.size)

        if mask is not None:
            mask = mask.repeat(self.heads, 1, 1)
        found = self.attention(split(self.query(x)), split(self.key(source)), split(self.value(source)), mask)
        size, length, _ = x.shape
        found = found.view(self.heads, size, length, self.size).permute(1, 2, 0, 3).reshape(size, length, -1)
        return self.norm(self.dropout(self.out(found)) + x)


class FeedForward(nn.Module):
    """Two linear maps with dropout, a sum and a norm."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.down(F.relu(self.up(x)))) + x)


class Layer(nn.Module):
    """A layer of the encoder; of the decoder if it also attends to what was heard. Padding is set to zero in place."""

    def __init__(self, width: int, heads: int, size: int, inner: int, dropout: float, attends: bool) -> None:
        super().__init__()
        self.own = Heads(width, heads, size, dropout)
        self.heard = Heads(width, heads, size, dropout) if attends else None
        self.feed_forward = FeedForward(width, inner, dropout)

    def forward(self, x: Tensor, present: Tensor, mask: Tensor, heard: Tensor | None = None,
                heard_mask: Tensor | None = None) -> Tensor:  # fmt: skip
        x = self.own(x, x, mask)
        x *= present
        if self.heard is not None and heard is not None:
            x = self.heard(x, heard, heard_mask)
            x *= present
        x = self.feed_forward(x)
        x *= present
        return x


def _within(x: Tensor, lengths: Tensor) -> Tensor:
    """Ones for what is no padding, of shape (batch, time): each row is cut where a number on the device says."""
    ones = x.new_ones(x.shape[:2])
    for row in range(len(x)):
        ones[row, lengths[row] :] = 0
    return ones


def _stacked(rows: list[Tensor], filling: int) -> Tensor:
    """Rows of different lengths as one tensor."""
    out = rows[0].new_full((len(rows), max(len(row) for row in rows)), filling)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return out


class SpeechTransformer(nn.Module):
    """An encoder of sound and a decoder of characters, of which the last is the end and the one before it the start."""

    def __init__(self, features: int, characters: int, width: int, layers: int, heads: int, size: int, inner: int,
                 dropout: float = 0.1, longest: int = 5000) -> None:  # fmt: skip
        super().__init__()
        self.start, self.end = characters - 2, characters - 1
        self.sound, self.sound_norm = nn.Linear(features, width), nn.LayerNorm(width)
        self.register_buffer("positions", sinusoids(longest, width)[None], persistent=False)
        self.dropout, self.scale = nn.Dropout(dropout), width**0.5
        self.encoder = nn.ModuleList(Layer(width, heads, size, inner, dropout, False) for _ in range(layers))
        self.characters = nn.Embedding(characters, width)
        self.decoder = nn.ModuleList(Layer(width, heads, size, inner, dropout, True) for _ in range(layers))

    def encode(self, sound: Tensor, lengths: Tensor) -> Tensor:
        present, mask = _within(sound, lengths).unsqueeze(-1), self._outside(sound, lengths, sound.shape[1])
        x = self.dropout(self.sound_norm(self.sound(sound)) + self.positions[:, : sound.shape[1]])
        for layer in self.encoder:
            x = layer(x, present, mask)
        return x

    def _outside(self, x: Tensor, lengths: Tensor, rows: int) -> Tensor:
        return _within(x, lengths).lt(1).unsqueeze(1).expand(-1, rows, -1)

    def _shifted(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The characters with a start before them, and those with an end behind them."""
        texts = [row[row != IGNORED] for row in targets]
        start, end = targets.new_tensor([self.start]), targets.new_tensor([self.end])
        read = _stacked([torch.cat([start, text]) for text in texts], self.end)
        return read, _stacked([torch.cat([text, end]) for text in texts], IGNORED)

    def forward(self, sound: Tensor, lengths: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        heard = self.encode(sound, lengths)
        read, wanted = self._shifted(targets)
        length = read.shape[1]
        present = read.ne(self.end).to(heard.dtype).unsqueeze(-1)
        later = torch.ones(length, length, device=read.device, dtype=torch.uint8).triu(1)
        mask = (read.eq(self.end).unsqueeze(1) + later).gt(0)
        heard_mask = self._outside(heard, lengths, length)
        x = self.dropout(self.characters(read) * self.scale + self.positions[:, :length])
        for layer in self.decoder:
            x = layer(x, present, mask, heard, heard_mask)
        return F.linear(x, self.characters.weight), wanted


def speech_transformer(small: bool) -> Task:
    """One utterance of 204 frames of 320 features, and its 21 characters."""
    features, characters, width, layers, heads, size, inner = (320, 1014, 512, 6, 8, 64, 2048)
    frames, letters = 204, 21
    if small:
        features, characters, width, layers, heads, size, inner = (12, 31, 32, 2, 4, 8, 64)
        frames, letters = 17, 6

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device, dtype)
        return {
            "sound": draws.normal(1, frames, features),
            "lengths": torch.tensor([frames], dtype=torch.int32).to(device),
            "targets": draws.integers(0, characters - 2, 1, letters),
        }

    return Task(SpeechTransformer(features, characters, width, layers, heads, size, inner), batch)


SPEECH2TEXT2 = Workload(
    name="speech2text2-t", title="Speech2Text2ForCausalLM", training=True, batch_size=256, source="written here",
    hard="What passes from one graph to the next is copied; the largest is 655 MB of logits (256 × 128 × 10000 in "
    "bfloat16).",
    differs="transformers 5 has dropped the model, so the decoder is written here: scores are added to the mask and "
    "normalised as separate operations, as in version 4, in one mask for the batch instead of one per text.",
    make=speech2text2,
)  # fmt: skip

SPEECH_TRANSFORMER = Workload(
    name="speech-transformer-i", title="speech_transformer", training=False, batch_size=1, source="written here",
    hard="Every attention divides by a NumPy number, a temperature, with which PyTorch captured 5 % of the kernels; "
    "masks are cut at lengths that are on the GPU, and padding is taken from texts by a mask: sizes the host waits "
    "for.",
    differs="Random features instead of a recording of AISHELL, of the same shapes (204 × 320, 21 characters of "
    "1014). Attentions do not return their weights; the start and the end are the last two characters.",
    make=speech_transformer,
)  # fmt: skip
