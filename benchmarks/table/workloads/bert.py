"""BERT as a short PyTorch program trains it (codertimo's BERT-pytorch), with the sizes and texts of TorchBench.

After Devlin and others, "BERT" (NAACL 2019): masked words and whether a sentence follows another one, with a norm
before each part of a layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws
from benchmarks.table.workloads.speech import sinusoids

PADDING, SPECIAL = 0, 5


class Norm(nn.Module):
    """A norm by mean and standard deviation, in single operations."""

    def __init__(self, width: int, least: float = 1e-6) -> None:
        super().__init__()
        self.factor, self.shift, self.least = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), least

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.factor * (x - mean) / (deviation + self.least) + self.shift


class Attention(nn.Module):
    """Attention by several heads, written out: scores, mask, softmax, dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        def split(tensor: Tensor) -> Tensor:
            return tensor.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        least = torch.finfo(scores.dtype).min if scores.dtype == torch.float16 else -1e9
        weights = self.dropout(scores.masked_fill(mask == 0, least).softmax(-1))
        return self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and with dropout before its sum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads, dropout), Norm(width)
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), Norm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        x = x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm(x))))))
        return self.dropout(x)


class Bert(nn.Module):
    """BERT with its two tasks: log-probabilities of the next sentence and of every word."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, longest: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.segments = nn.Embedding(3, width, padding_idx=PADDING)
        self.register_buffer("positions", sinusoids(longest, width)[None])
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads, dropout=0.1) for _ in range(layers))
        self.follows, self.word = nn.Linear(width, 2), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, segments: Tensor, **labels: Tensor) -> tuple[Tensor, Tensor]:
        del labels  # the loss reads them
        mask = (tokens > 0).unsqueeze(1).repeat(1, tokens.shape[1], 1).unsqueeze(1)
        x = self.dropout(self.words(tokens) + self.positions[:, : tokens.shape[1]] + self.segments(segments))
        for block in self.blocks:
            x = block(x, mask)
        return self.follows(x[:, 0]).log_softmax(-1), self.word(x).log_softmax(-1)


def loss(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """The sum of the losses of both tasks; label 0 is of words that are not asked for."""
    follows, words = output
    follows_loss = F.nll_loss(follows.float(), batch["follows"], ignore_index=PADDING)
    return follows_loss + F.nll_loss(words.float().transpose(1, 2), batch["labels"], ignore_index=PADDING)


def bert(small: bool) -> Task:
    """Two sentences of up to three words, padded to 128, of which a sixth is asked for."""
    vocabulary, width, layers, heads = (101, 32, 2, 4) if small else (20005, 768, 12, 12)
    size, length = (4, 16) if small else (16, 128)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws, numbers = Draws(seed, device), torch.arange(length, device=device)
        first, second = draws.integers(3, 6, size, 1), draws.integers(2, 5, size, 1)  # with their marks
        written = numbers < first + second
        words = draws.integers(SPECIAL, vocabulary, size, length)
        asked = (draws.uniform(0, 1, size, length) < 0.15) & written
        asked[:, 1] = True
        follows = draws.integers(0, 2, size)
        follows[0] = 1  # a label of 0 is left out of the loss
        return {
            "tokens": words * written,
            "segments": (1 + (numbers >= first).long()) * written,
            "follows": follows,
            "labels": draws.integers(SPECIAL, vocabulary, size, length) * asked,
        }

    return Task(Bert(vocabulary, width, layers, heads), batch, loss)


BERT = Workload(
    name="bert-pytorch-t", title="BERT_pytorch", training=True, batch_size=16, source="written here",
    hard="No construct of the host, but norms, GELU, masks and dropout in single operations: thousands of short "
    "kernels, random numbers, and 164 MB of log-probabilities (float32 under autocast) that pass between graphs.",
    differs="Trains both tasks as TorchBench's own step does; torch's runner trains the body alone, on the mean of "
    "its output. The original leaves out of the loss, by ignoring label 0, sentences that do not follow; so does this "
    "one.",
    make=bert,
)  # fmt: skip
