"""Models to train, small and middle-sized, eight and eight others: each with batches, and a loss of what it returns."""

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


def efficientnet() -> Task:
    import timm

    model = timm.create_model("efficientnet_b0")
    return model, lambda: (torch.randn(16, 3, 160, 160), torch.randint(0, 1000, (16,))), _classes


def swin() -> Task:
    import timm

    model = timm.create_model("swin_tiny_patch4_window7_224", drop_path_rate=0.0)
    return model, lambda: (torch.randn(4, 3, 224, 224), torch.randint(0, 1000, (4,))), _classes


def convnext() -> Task:
    import timm

    model = timm.create_model("convnext_atto")
    return model, lambda: (torch.randn(16, 3, 160, 160), torch.randint(0, 1000, (16,))), _classes


class _Translation(nn.Module):
    """T5, told to go on with what it has read."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=4000, d_model=256, d_kv=64, d_ff=512, num_layers=3, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, decoder_input_ids=tokens).logits


def t5() -> Task:
    return _Translation(), lambda: _tokens(4000, 8, 64), _classes


class _Recurrent(nn.Module):
    """A language model of two layers of LSTM."""

    def __init__(self, vocabulary: int = 4000, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.tokens(tokens))[0])


def lstm() -> Task:
    return _Recurrent(), lambda: _tokens(4000, 16, 32), _classes


class _Clicks(nn.Module):
    """Deep learning recommendation: 13 numbers and 26 categories, and all products of two of their vectors."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, width) for _ in range(26))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 27 * 26 // 2, 256), nn.ReLU(), nn.Linear(256, 2))
        self.register_buffer("pairs", torch.triu_indices(27, 27, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense, categories = self.bottom(x[:, :13]), x[:, 13:].long()
        vectors = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1))


def dlrm() -> Task:
    def batch() -> Batch:
        numbers = torch.cat([torch.rand(512, 13), torch.randint(0, 1000, (512, 26)).float()], 1)
        return numbers, torch.randint(0, 2, (512,))

    return _Clicks(), batch, _classes


class _Autoencoder(nn.Module):
    """Convolutions down to a code, which is normalised, and up again."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def down(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.LeakyReLU(0.2))

        def up(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.ConvTranspose2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.ReLU())

        self.encode = nn.Sequential(down(3, width), down(width, 2 * width), down(2 * width, 4 * width))
        self.decode = nn.Sequential(up(4 * width, 2 * width), up(2 * width, width), up(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(F.normalize(self.encode(x), dim=1))


def autoencoder() -> Task:
    def batch() -> Batch:
        images = torch.rand(32, 3, 64, 64)
        return images, images

    return _Autoencoder(), batch, lambda y, t: F.mse_loss(y.float(), t)


class _Attention(nn.Module):
    """Two layers of attention over the neighbours in a graph of 3000 nodes."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("source", torch.randint(0, 3000, (12000,)))
        self.register_buffer("target", torch.randint(0, 3000, (12000,)))
        self.project = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.score = nn.ParameterList(torch.randn(2, heads, width // heads) * 0.1 for _ in range(2))
        self.out = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for project, score in zip(self.project, self.score, strict=True):
            h = project(x).view(len(x), self.heads, -1)
            from_source, from_target = (h * score[0]).sum(-1), (h * score[1]).sum(-1)
            weight = F.leaky_relu(from_source[self.source] + from_target[self.target], 0.2).float().exp()
            total = torch.zeros(len(x), self.heads, device=x.device).index_add(0, self.target, weight)
            message = h[self.source].float() * (weight / (total[self.target] + 1e-6)).unsqueeze(-1)
            x = torch.zeros_like(h, dtype=torch.float32).index_add(0, self.target, message).flatten(1).relu()
        return self.out(x)


def attention() -> Task:
    return _Attention(), lambda: (torch.randn(3000, 64), torch.randint(0, 8, (3000,))), _classes


MODELS: dict[str, Callable[[], Task]] = {
    "resnet18 b32": resnet18, "vit-small b16": vit_small, "bert 4x256 b8 s64": bert, "gpt2 4x256 b4 s128": gpt2,
    "llama 4x256 b4 s128": llama, "unet b8 64": unet, "deep recommender b256": recommender,
    "gin 2000 nodes": isomorphism,
}  # fmt: skip

OTHERS: dict[str, Callable[[], Task]] = {
    "efficientnet-b0 b16": efficientnet, "swin-tiny b4": swin, "convnext-atto b16": convnext, "t5 3x256 b8 s64": t5,
    "lstm 2x256 b16 s32": lstm, "dlrm b512": dlrm, "autoencoder b32": autoencoder, "gat 3000 nodes": attention,
}  # fmt: skip
