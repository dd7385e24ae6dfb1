"""Recommendation: NVIDIA's autoencoder of ratings, and DLRM, with the sizes of TorchBench.

The autoencoder after Kuchaiev and Ginsburg, "Training Deep AutoEncoders for Collaborative Filtering" (2017); DLRM after
Naumov and others, "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws

# ---- DeepRecommender -------------------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Linear maps with SELU down to a code, dropout on the code, and the way back."""

    def __init__(self, sizes: tuple[int, ...], dropout: float = 0.8) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(sizes[::-1]))
        self.dropout = nn.Dropout(dropout)
        for layer in (*self.down, *self.up):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, ratings: Tensor) -> Tensor:
        x = ratings
        for layer in self.down:
            x = F.selu(layer(x))
        x = self.dropout(x)
        for layer in self.up:
            x = F.selu(layer(x))
        return x


def rating_loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean square error of the ratings that were given, those that are not zero."""
    ratings = batch["ratings"].float()
    given = (ratings != 0).float()
    return F.mse_loss(output.float() * given, ratings, reduction="sum") / given.sum()


def deep_recommender(small: bool, size: int, training: bool) -> Task:
    """Ratings of 197951 films."""
    sizes = (61, 16, 16, 24) if small else (197951, 512, 512, 1024)
    size = 4 if small else size

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        return {"ratings": Draws(seed, device, torch.float32 if training else dtype).normal(size, sizes[0])}

    return Task(Autoencoder(sizes), batch, rating_loss if training else None)


# ---- DLRM ------------------------------------------------------------------------------------------------------------


def _perceptron(sizes: tuple[int, ...]) -> nn.Sequential:
    layers = [(nn.Linear(before, after), nn.ReLU()) for before, after in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


class Dlrm(nn.Module):
    """Bags of embeddings and a perceptron of numbers, and a perceptron of the products of each two of their vectors."""

    def __init__(self, tables: int, entries: int, bottom: tuple[int, ...], top: tuple[int, ...]) -> None:
        super().__init__()
        vectors = tables + 1
        self.tables = nn.ModuleList(nn.EmbeddingBag(entries, bottom[-1], mode="sum") for _ in range(tables))
        self.bottom = _perceptron(bottom)
        self.top = _perceptron((vectors * (vectors - 1) // 2 + bottom[-1], *top))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(entries**-0.5), entries**-0.5)
        nn.init.ones_(self.top[-2].bias)  # else its ReLU may make every output zero

    def forward(self, numbers: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(numbers)
        bags = [table(indices[number], offsets[number]) for number, table in enumerate(self.tables)]
        vectors = torch.cat([x, *bags], 1).view(len(x), -1, x.shape[1])
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = list(itertools.combinations(range(vectors.shape[1]), 2))
        rows, columns = torch.tensor([b for _, b in pairs]), torch.tensor([a for a, _ in pairs])
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


def dlrm(small: bool) -> Task:
    """512 numbers, and 100 entries of each of 8 tables with a million."""
    tables, entries, lookups, bottom, top = 8, 1_000_000, 100, (512, 512, 64), (1024, 1024, 1024, 1)
    size = 2048
    if small:
        tables, entries, lookups, bottom, top, size = 3, 50, 4, (13, 16, 8), (16, 16, 1), 6

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device, dtype)
        return {
            "numbers": draws.uniform(0, 1, size, bottom[0]),
            "offsets": (torch.arange(size, device=device) * lookups).repeat(tables, 1),
            "indices": draws.integers(0, entries, tables, size * lookups),
        }

    return Task(Dlrm(tables, entries, bottom, top), batch)


RECOMMENDERS = [
    Workload(
        name="deeprecommender-i", title="nvidia_deeprecommender", training=False, batch_size=8192,
        source="written here",
        hard="Six matrix products whose input has 3.2 GB in bfloat16: to copy it took 17 % of the time in the paper, "
        "and made PyTorch's graphs slower than none.",
        differs="", make=lambda small: deep_recommender(small, 8192, training=False),
    ),
    Workload(
        name="deeprecommender-t", title="nvidia_deeprecommender", training=True, batch_size=256, source="written here",
        hard="A short step whose input has 203 MB in float32, which graphs copy, as they do what passes from one of "
        "them to the next.",
        differs="Trains on the error of the ratings, as TorchBench's own step does; torch's runner trains on the mean "
        "of the output.",
        make=lambda small: deep_recommender(small, 256, training=True),
    ),
]  # fmt: skip

DLRM = Workload(
    name="dlrm-i", title="dlrm", training=False, batch_size=2048, source="written here",
    hard="The pairs of vectors are chosen by two index tensors that every call makes on the CPU from lists; 13 MB of "
    "indices and offsets would be copied.",
    differs="The last bias is one, lest the ReLU at the end make all outputs of random weights zero. Indices are "
    "drawn for every bag with repetitions, where the original leaves double ones out.",
    make=dlrm,
)  # fmt: skip
