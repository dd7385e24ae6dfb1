"""DALL-E 2 of a text: CLIP reads it, a prior makes the embedding of an image from it, and two U-Nets draw the image.

After Ramesh and others, "Hierarchical Text-Conditional Image Generation with CLIP Latents" (2022), with the sizes of
TorchBench, which samples with one step of diffusion in each part.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.clip import quick_gelu
from benchmarks.table.workloads.draws import Draws
from benchmarks.table.workloads.unet import Gain, Sinusoids, UNet

# ---- CLIP ------------------------------------------------------------------------------------------------------------


class ClipBlock(nn.Module):
    """A layer of OpenAI's CLIP. Its causal mask is no buffer, and is copied to where the activations are."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = nn.MultiheadAttention(width, heads), nn.LayerNorm(width)
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.mask = torch.full((length, length), float("-inf")).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        mask, read = self.mask.to(x.device, x.dtype), self.attention_norm(x)
        x = x + self.attention(read, read, read, need_weights=False, attn_mask=mask)[0]
        return x + self.down(quick_gelu(self.up(self.norm(x))))


class ClipText(nn.Module):
    """The text half of OpenAI's CLIP, which returns an embedding of the text and encodings of its tokens."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.length, self.end = length, vocabulary - 1
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.01)
        self.blocks = nn.ModuleList(ClipBlock(width, heads, length) for _ in range(layers))
        self.norm, self.project = nn.LayerNorm(width), nn.Parameter(torch.randn(width, width) * width**-0.5)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        text = text[:, : self.length]
        before_end = (text == self.end).cumsum(-1) == 0
        present = F.pad(before_end, (1, -1), value=True) & (text != 0)
        x = (self.words(text) + self.positions).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).transpose(0, 1)
        embedding = x[torch.arange(len(x)), text.argmax(-1)] @ self.project
        return F.normalize(embedding, dim=-1), x.masked_fill(~present.unsqueeze(-1), 0.0)


# ---- diffusion -------------------------------------------------------------------------------------------------------


def cosine_betas(steps: int) -> Tensor:
    """The schedule of Nichol and Dhariwal, "Improved Denoising Diffusion Probabilistic Models" (2021)."""
    remaining = torch.cos((torch.linspace(0, 1, steps + 1, dtype=torch.float64) + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - remaining[1:] / remaining[:-1]).clamp(0, 0.999)


def linear_betas(steps: int) -> Tensor:
    """The schedule of Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models" (2020)."""
    return torch.linspace(0.1 / steps, 20 / steps, steps, dtype=torch.float64).clamp(max=0.999)


class Noise(nn.Module):
    """A schedule of noise: buffers with a number for every step, from which a batch gathers those of its steps."""

    def __init__(self, betas: Tensor) -> None:
        super().__init__()
        self.steps, left = len(betas), torch.cumprod(1 - betas, 0)
        before = F.pad(left[:-1], (1, 0), value=1.0)
        numbers = {
            "log_beta": betas.log(),
            "log_variance": (betas * (1 - before) / (1 - left)).clamp(min=1e-20).log(),
            "of_start": betas * before.sqrt() / (1 - left),
            "of_noisy": (1 - before) * (1 - betas).sqrt() / (1 - left),
            "unscaled": left.rsqrt(),
            "noise_unscaled": (1 / left - 1).sqrt(),
        }
        for name, values in numbers.items():
            self.register_buffer(name, values.float())

    def at(self, name: str, steps: Tensor, like: Tensor) -> Tensor:
        """The numbers of a batch's steps, to multiply with a tensor."""
        return getattr(self, name).gather(-1, steps).view(-1, *(1,) * (like.ndim - 1))

    def start(self, noisy: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        """The start, from what is noisy and the noise in it."""
        return self.at("unscaled", steps, noisy) * noisy - self.at("noise_unscaled", steps, noisy) * noise

    def step(self, start: Tensor, noisy: Tensor, steps: Tensor, log_variance: Tensor | None = None) -> Tensor:
        """One step back, with fresh noise unless it is the last one."""
        mean = self.at("of_start", steps, noisy) * start + self.at("of_noisy", steps, noisy) * noisy
        if log_variance is None:
            log_variance = self.at("log_variance", steps, noisy)
        goes_on = (1 - (steps == 0).to(noisy.dtype)).view(-1, *(1,) * (noisy.ndim - 1))
        return mean + goes_on * (0.5 * log_variance).exp() * torch.randn_like(noisy)


# ---- prior -----------------------------------------------------------------------------------------------------------


class RelativeBias(nn.Module):
    """A bias by distance, as in T5: of each of 32 buckets, half of them for one distance and half growing with it."""

    def __init__(self, heads: int, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.buckets, self.farthest, self.bias = buckets, farthest, nn.Embedding(buckets, heads)

    def forward(self, rows: int, columns: int) -> Tensor:
        device = self.bias.weight.device
        distance = (torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)).clamp(min=0)
        exact = self.buckets // 2
        growth = torch.log(distance.float() / exact) / math.log(self.farthest / exact) * (self.buckets - exact)
        far = (exact + growth.clamp(min=0).long()).clamp(max=self.buckets - 1)
        return self.bias(torch.where(distance < exact, distance, far)).permute(2, 0, 1)


def turned(x: Tensor, rates: Tensor) -> Tensor:
    """The first features of vectors, turned by angles that grow with their positions."""
    angles = torch.arange(x.shape[-2], device=x.device, dtype=rates.dtype)[:, None] * rates
    angles = angles.repeat_interleave(2, -1)
    part, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    quarter = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    return torch.cat([part * angles.cos() + quarter * angles.sin(), rest], -1).to(x.dtype)


class PriorBlock(nn.Module):
    """Causal attention of many queries to one key by their cosines, and a gated feed-forward part."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * size
        self.attention_norm, self.null = Gain(width), nn.Parameter(torch.randn(2, size))
        self.query, self.key_value = nn.Linear(width, inner, bias=False), nn.Linear(width, 2 * size, bias=False)
        self.out, self.out_norm = nn.Linear(inner, width, bias=False), Gain(width)
        self.norm, self.up = Gain(width), nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        rates = 10000 ** (-torch.arange(0, min(32, size), 2).float() / min(32, size))
        self.register_buffer("rates", rates)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        size, length, _ = x.shape
        read = self.attention_norm(x)
        key, value = self.key_value(read).chunk(2, -1)
        query = turned(self.query(read).view(size, length, self.heads, -1).transpose(1, 2) * 16, self.rates)
        null_key, null_value = self.null.unbind(0)
        key = torch.cat([null_key.expand(size, 1, -1), turned(key, self.rates)], 1)
        value = torch.cat([null_value.expand(size, 1, -1), value], 1)
        query, key = F.normalize(query, dim=-1) * 4, F.normalize(key, dim=-1) * 4
        scores = query @ key.unsqueeze(1).transpose(-1, -2) + bias
        later = torch.ones(length, length + 1, dtype=torch.bool, device=x.device).triu(2)
        weights = scores.masked_fill(later, -torch.finfo(scores.dtype).max).softmax(-1, dtype=torch.float32)
        found = weights.to(scores.dtype) @ value.unsqueeze(1)
        x = x + self.out_norm(self.out(found.transpose(1, 2).reshape(size, length, -1)))
        values, gates = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(values * F.silu(gates))


class Prior(nn.Module):
    """A causal transformer that reads a text, a time and a noisy embedding of an image, and returns a clean one."""

    def __init__(self, width: int, depth: int, heads: int, size: int, longest: int, steps: int = 1) -> None:
        super().__init__()
        self.longest, self.noise = longest, Noise(cosine_betas(steps))
        self.time = nn.Sequential(
            Sinusoids(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width), nn.SiLU(),
            nn.Linear(2 * width, width),
        )  # fmt: skip
        self.query = nn.Parameter(torch.randn(width))
        self.null_encodings = nn.Parameter(torch.randn(1, longest, width))
        self.bias = RelativeBias(heads)
        self.blocks = nn.ModuleList(PriorBlock(width, heads, size) for _ in range(depth))
        self.norm, self.project = Gain(width), nn.Linear(width, width, bias=False)

    def denoise(self, image: Tensor, steps: Tensor, embedding: Tensor, encodings: Tensor) -> Tensor:
        present = (encodings != 0).any(-1)
        missing = self.longest - encodings.shape[1]
        encodings, present = F.pad(encodings, (0, 0, 0, missing)), F.pad(present, (0, missing), value=False)
        encodings = torch.where(present.unsqueeze(-1), encodings, self.null_encodings)
        time, query = self.time(steps.to(image.dtype)), self.query.expand(len(image), -1)
        x = torch.cat([encodings, torch.stack([embedding, time, image, query], 1)], 1)
        bias = self.bias(x.shape[1], x.shape[1] + 1)
        for block in self.blocks:
            x = block(x, bias)
        return self.project(self.norm(x))[:, -1]

    def forward(self, clip: ClipText, text: Tensor, tries: int) -> Tensor:
        """The best of several embeddings of images, by CLIP's similarity to the text."""
        embedding, encodings = clip(text.repeat_interleave(tries, 0))
        image = torch.randn(embedding.shape, device=embedding.device, dtype=embedding.dtype)
        for step in reversed(range(self.noise.steps)):
            steps = torch.full((len(image),), step, device=image.device, dtype=torch.long)
            image = self.noise.step(self.denoise(image, steps, embedding, encodings), image, steps)
        images, texts = image.view(len(text), tries, -1), embedding.view(len(text), tries, -1)
        best = (F.normalize(texts, dim=-1) * F.normalize(images, dim=-1)).sum(-1).topk(1).indices
        return images.gather(1, best.unsqueeze(-1).expand(-1, -1, images.shape[-1])).squeeze(1)


# ---- all together ----------------------------------------------------------------------------------------------------


class Dalle2(nn.Module):
    """Text in, an image out: CLIP, the prior, and a U-Net for each size, the second of which enlarges."""

    def __init__(self, clip: ClipText, prior: Prior, first: UNet, second: UNet, sides: tuple[int, int]) -> None:
        super().__init__()
        self.clip, self.prior, self.sides = clip, prior, sides
        self.unets = nn.ModuleList([first, second])
        self.noises = nn.ModuleList([Noise(cosine_betas(1)), Noise(linear_betas(1))])

    def forward(self, text: Tensor) -> Tensor:
        embedding = self.prior(self.clip, text, tries=2)
        _, encodings = self.clip(text)
        image: Tensor | None = None
        for unet, noise, side in zip(self.unets, self.noises, self.sides, strict=True):
            low = None if image is None else F.interpolate(image, side, mode="nearest").clamp(0, 1) * 2 - 1
            noisy = torch.randn((len(text), 3, side, side), device=embedding.device, dtype=embedding.dtype)
            for step in reversed(range(noise.steps)):
                steps = torch.full((len(text),), step, device=noisy.device, dtype=torch.long)
                predicted, fraction = unet(noisy, steps, embedding, encodings, low).chunk(2, 1)
                start = noise.start(noisy, steps, predicted).clamp(-1, 1)
                least, most = noise.at("log_variance", steps, noisy), noise.at("log_beta", steps, noisy)
                fraction = (fraction + 1) * 0.5
                noisy = noise.step(start, noisy, steps, fraction * most + (1 - fraction) * least)
            image = (noisy + 1) * 0.5
        assert image is not None
        return image[0] if len(text) == 1 else image


def dalle2(small: bool) -> Task:
    """An image of 256 × 256 of a text of 256 tokens."""
    vocabulary, given = 49408, 256
    clip: tuple[int, ...] = (77, 512, 8, 12)  # length, width, heads, layers
    prior: tuple[int, ...] = (512, 6, 8, 64, 256)
    sides, width, first, second, heads, size = (128, 256), 128, (128, 1, 2, 4, 8), (16, 1, 2, 4, 8, 16), 16, 32
    if small:
        vocabulary, given, clip, prior = 101, 20, (12, 16, 2, 1), (16, 1, 2, 8, 16)
        sides, width, first, second, heads, size = (8, 16), 16, (8, 1, 2), (8, 1, 2), 2, 4
    longest = prior[-1]
    draws_image = UNet(first[0], first[1:], clip[1], width, heads, size, text=(clip[1], longest))
    enlarges = UNet(second[0], second[1:], clip[1], width, heads, size, enlarges=True)
    model = Dalle2(ClipText(vocabulary, *clip), Prior(*prior), draws_image, enlarges, sides)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        return {"text": Draws(seed, device).integers(0, vocabulary, 1, given)}

    return Task(model, batch)


DALLE2 = Workload(
    name="dalle2-i", title="DALLE2_pytorch", training=False, batch_size=1, source="written here",
    hard="CLIP copies its causal mask from the CPU in every layer, and chooses the end of a text with an index tensor "
    "made on the CPU, in the middle of the call: 314 kernels were kept out. Noise is random, and copies took 24 % of "
    "the time.",
    differs="Random weights instead of OpenAI's CLIP; its image half, which sampling never runs, is not there. Runs "
    "in bfloat16, where torch's runner gives this model autocast. Guidance, inpainting and latent diffusion, which "
    "TorchBench leaves off, are not there either. The result depends on random numbers.",
    make=dalle2,
)  # fmt: skip
