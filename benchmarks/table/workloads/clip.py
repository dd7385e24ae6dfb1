"""CLIP as TorchMultimodal has it, with ViT-B/32 for images.

After Radford and others, "Learning Transferable Visual Models From Natural Language Supervision" (2021), with the sizes
of TorchBench.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws


def quick_gelu(x: Tensor) -> Tensor:
    """GELU by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


class PreciseNorm(nn.LayerNorm):
    """A layer norm in float32, whatever it is given."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).type_as(input)


def _encoder(width: int, heads: int, layers: int, images_first: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation=quick_gelu, batch_first=images_first, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class ImageEncoder(nn.Module):
    """A vision transformer, which reads an image from its first token."""

    def __init__(self, side: int, patch: int, width: int, heads: int, layers: int, out: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.first = nn.Parameter(torch.randn(width) * width**-0.5)
        self.positions = nn.Parameter(torch.randn((side // patch) ** 2 + 1, width) * width**-0.5)
        self.before, self.after = PreciseNorm(width), PreciseNorm(width)
        self.encoder = _encoder(width, heads, layers, images_first=True)
        self.project = nn.Parameter(torch.randn(width, out) * width**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(images), 1, -1), patches], 1) + self.positions
        return self.after(self.encoder(self.before(x))[:, 0]) @ self.project


class TextEncoder(nn.Module):
    """A causal transformer, which reads a text from the token of its end, the one with the highest number."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, out: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.01)
        self.encoder, self.norm = _encoder(width, heads, layers, images_first=False), PreciseNorm(width)
        self.project = nn.Linear(width, out, bias=False)
        self.mask = torch.full((length, length), float("-inf")).triu(1)  # no buffer: it stays on the CPU

    def forward(self, text: Tensor) -> Tensor:
        x = (self.words(text) + self.positions).transpose(0, 1)
        x = self.norm(self.encoder(x, mask=self.mask, is_causal=True).transpose(0, 1))
        return self.project(x[torch.arange(len(x)), text.argmax(-1)])


class Clip(nn.Module):
    """Both encoders, which put images and texts on one sphere."""

    def __init__(self, images: ImageEncoder, text: TextEncoder) -> None:
        super().__init__()
        self.images, self.text = images, text

    def forward(self, images: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.images(images)), F.normalize(self.text(text))


def clip(small: bool) -> Task:
    """One image of 224 × 224, and 32 texts of 77 tokens."""
    side, vocabulary, length, texts = (32, 101, 12, 3) if small else (224, 49408, 77, 32)
    images = ImageEncoder(side, 16, 32, 4, 2, 16) if small else ImageEncoder(side, 32, 768, 12, 12, 512)
    sizes = (32, 4, 2, 16) if small else (512, 8, 12, 512)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device, dtype)
        text, numbers = draws.integers(1, vocabulary - 2, texts, length), torch.arange(length, device=device)
        ends = draws.integers(2, length, texts, 1)
        text = torch.where(numbers < ends, text, 0)
        text = torch.where(numbers == ends, vocabulary - 1, text)
        text[:, 0] = vocabulary - 2
        return {"images": draws.normal(1, 3, side, side), "text": text}

    return Task(Clip(images, TextEncoder(vocabulary, length, *sizes)), batch)


CLIP = Workload(
    name="multimodal-clip-i", title="torch_multimodal_clip", training=False, batch_size=1, source="written here",
    hard="The causal mask is a CPU tensor, since it is no buffer, and the ends of texts are chosen with an index "
    "tensor made on the CPU: PyTorch captured none of the kernels.",
    differs="Random images and tokens instead of a photograph and two words, of the same shapes. Layers are those of "
    "torch.nn, as in the original.",
    make=clip,
)  # fmt: skip
