"""Eight models to train, small and middle-sized: each with batches, and a loss of what it returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
Task = tuple[nn.Module, Callable[[], Batch], Callable[[Any, torch.Tensor], torch.Tensor]]


def _classes(output: Any, wanted: torch.Tensor) -> torch.Tensor:
    scores = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(scores.flatten(0, -2).float(), wanted.flatten())


def _tokens(vocabulary: int, batch: int, length: int) -> Batch:
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, vocabulary, (batch, length))


def resnet18() -> Task:
    from torchvision.models import resnet18 as model

    return model(), lambda: (torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))), _classes


def vit_small() -> Task:
    import timm

    model = timm.create_model("vit_small_patch16_224")
    return model, lambda: (torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))), _classes


def bert() -> Task:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), lambda: _tokens(8000, 8, 64), _classes


def gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8000,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), lambda: _tokens(8000, 4, 128), _classes


def llama() -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config), lambda: _tokens(8000, 4, 128), _classes


class _UNet(nn.Module):
    """Two levels down and up, with norms by groups and skips between."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
                nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
            )  # fmt: skip

        self.first, self.second, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up, self.last_up = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.third, self.fourth, self.out = block(4 * width, 2 * width), block(2 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        middle = self.middle(F.max_pool2d(second, 2))
        third = self.third(torch.cat([self.up(middle), second], 1))
        return self.out(self.fourth(torch.cat([self.last_up(third), first], 1)))


def unet() -> Task:
    return (
        _UNet(),
        lambda: (torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64)),
        lambda y, t: F.mse_loss(y.float(), t),
    )


def recommender() -> Task:
    sizes = (17768, 512, 512, 1024, 512, 512, 17768)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.SELU()]
    rating = lambda: torch.randint(0, 6, (256, sizes[0])).float()  # noqa: E731
    return nn.Sequential(*layers), lambda: (rating(), rating()), lambda y, t: F.mse_loss(y.float(), t)


class _Isomorphism(nn.Module):
    """Three layers of a graph isomorphism network on a graph of 2000 nodes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("source", torch.randint(0, 2000, (8000,)))
        self.register_buffer("target", torch.randint(0, 2000, (8000,)))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.out = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).index_add(0, self.target, x[self.source])).relu()
        return self.out(x)


def isomorphism() -> Task:
    return _Isomorphism(), lambda: (torch.randn(2000, 64), torch.randint(0, 8, (2000,))), _classes


MODELS: dict[str, Callable[[], Task]] = {
    "resnet18 b32": resnet18, "vit-small b16": vit_small, "bert 4x256 b8 s64": bert, "gpt2 4x256 b4 s128": gpt2,
    "llama 4x256 b4 s128": llama, "unet b8 64": unet, "deep recommender b256": recommender,
    "gin 2000 nodes": isomorphism,
}  # fmt: skip
