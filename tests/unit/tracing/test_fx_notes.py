"""What FX notes of nodes: what the copy for traces of ours rests on, and that it is apart."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.fx.traceback as shared
from torch.fx import Graph

from pygraph.tracing import fx_notes
from pygraph.tracing.fake_tracing import fake_tracing
from pygraph.tracing.proxy_trace import proxy_trace


def test_torch_has_what_is_replaced() -> None:
    missing = {name for name in fx_notes.NAMES if not hasattr(shared, name)}
    if torch.__version__ >= "2.13":
        assert missing == set()
    assert missing <= {name for name in fx_notes.NAMES if "seq_nr" in name or "autograd_backward" in name}
    assert isinstance(vars(shared)["current_meta"], dict)
    from torch._dynamo import eval_frame

    assert eval_frame.fx_traceback is shared


def test_the_copy_is_one_module_with_torchs_classes() -> None:
    assert fx_notes.own() is fx_notes.own() is not shared
    assert vars(fx_notes.own())["NodeSource"] is shared.NodeSource
    assert fx_notes.own().get_current_meta() is not shared.get_current_meta()


def _seen() -> tuple[bool, dict[str, Any], dict[str, Any]]:
    return shared.has_preserved_node_meta(), dict(shared.current_meta), dict(shared.get_current_meta())


def test_notes_are_a_traces_own() -> None:
    node = Graph().placeholder("x")
    node.meta["seen"] = True
    inside: list[Any] = []
    outside: list[Any] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.append(_seen())
        with shared.preserve_node_meta(), shared.set_current_meta(node):
            shared.current_meta["more"] = 1
            inside.append(_seen())
            thread = threading.Thread(target=lambda: outside.append(_seen()))
            thread.start()
            thread.join()
        inside.append(_seen())
        return x + 1

    with shared.preserve_node_meta():
        shared.current_meta["in_grad_fn"] = 1
        expected = _seen()
        with fake_tracing(torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)):
            proxy_trace(traced, [torch.ones(2)])
        assert _seen() == expected
    assert outside == [expected]
    first, noted, last = inside
    assert first == last == (False, {}, {})
    assert noted[0]
    assert noted[1] == noted[2]
    assert noted[1].keys() >= {"seen", "more"}
