"""The programs in benchmarks/: what they conclude from what they see."""

from __future__ import annotations

import doctest
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import conformance
import conformance_cases
import conformance_report
import pointers
import reporting
import workers


@pytest.mark.parametrize("module", [conformance, conformance_cases, conformance_report, pointers, reporting])
def test_examples(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


@pytest.mark.slow
def test_operators_leave_hypothesis_as_it_is() -> None:
    """In a process of its own: torch's helpers load another profile where they are imported for the first time."""
    script = """if True:
        import hypothesis
        hypothesis.settings.register_profile("dev", deadline=None, max_examples=77)
        hypothesis.settings.load_profile("dev")
        import conformance_cases
        assert len(conformance_cases.load_operators()) > 500
        print(hypothesis.settings.get_current_profile_name(), hypothesis.settings().max_examples)
    """
    folder = Path(__file__).parents[2] / "benchmarks"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=False)
    assert done.stdout.split() == ["dev", "77"], done.stderr


# -- conformance: one case ----------------------------------------------------------------------------------------


def make_case(device: torch.device, call: Callable[..., Any]) -> conformance_cases.Case:
    generator = torch.Generator().manual_seed(0)
    sets = tuple([torch.randn(4, 6, generator=generator).to(device) for _ in range(2)] for _ in range(3))
    return conformance_cases.Case(call, sets)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


@pytest.mark.parametrize("mechanism", ["auto", "copy"])
def test_a_case_of_pygraph_itself(device: torch.device, mechanism: str) -> None:
    record = conformance_cases.run_case("add", make_case(device, add), mechanism)
    assert record["class"] == ("copied" if mechanism == "copy" else "zero-copy"), record
    assert record["exact"]
    assert record["kernels_in_graphs"] == record["kernels"] == 1


def test_a_sample_that_fails_in_eager_is_skipped(device: torch.device) -> None:
    record = conformance_cases.run_case("add", make_case(device, lambda x, y: x @ y))
    assert record["class"] == "skipped"
    assert record["reasons"]


def test_only_the_layout_of_uninitialised_memory_counts(device: torch.device) -> None:
    values = iter(range(1000))
    case = make_case(device, lambda x, y: torch.full_like(x, next(values)))
    assert conformance_cases.run_case("empty_like", case)["class"] != "wrong"


@pytest.mark.gpu
def test_results_that_nothing_was_written_to_do_not_count() -> None:
    device = torch.device("cuda", 0)

    def call(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, torch.empty(2, dtype=torch.int64, device=device)

    for _ in range(5):
        record = conformance_cases.run_case("add", make_case(device, call))
        assert record["class"] != "wrong", record


def test_beside_results_that_do_not_repeat_themselves_the_others_count(device: torch.device) -> None:
    values = iter(range(1000))

    def call(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, torch.full_like(x, next(values))

    check = conformance_cases.Check(values=True)
    case = make_case(device, call)
    eager = conformance_cases.eager_call(case, case.sets[0])
    twice, arguments = conformance_cases.eager_call(case, case.sets[0])
    check("call", case, 0, eager, twice, arguments)
    assert "arbitrary" in check.note
    with pytest.raises(conformance_cases.Mismatch, match=r"result \[0\]"):
        check("call", case, 0, eager, (twice[0] + 1, twice[1]), arguments)


def test_a_result_that_seldom_differs_does_not_count(device: torch.device) -> None:
    numbers = itertools.count()

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-5 * (next(numbers) % 20 == 19))

    case = make_case(device, call)
    check = conformance_cases.Check(values=True)
    eager = conformance_cases.eager_call(case, case.sets[0])
    check("call", case, 0, eager, eager[0] * (1 + 1e-5), eager[1])
    assert "rounding" in check.note
    with pytest.raises(conformance_cases.Mismatch):
        check("call", case, 0, eager, eager[0] * 1.01, eager[1])


def test_an_operator_that_does_not_repeat_itself_is_not_wrong(device: torch.device, monkeypatch: Any) -> None:
    values = iter(range(1000))
    monkeypatch.setattr(pygraph, "graphify", lambda fn: Faulty(fn.fn, ""))
    record = conformance_cases.run_case("add", make_case(device, lambda x, y: torch.full_like(x, next(values))))
    assert record["class"] == "zero-copy"
    assert "arbitrary" in record["note"]


class Faulty:
    """Stands for a transformed function with one fault; it claims to be zero-copy."""

    def __init__(self, fn: Callable[..., Any], fault: str) -> None:
        self.fn, self.fault = fn, fault
        self.first: list[torch.Tensor] = []
        self.result: Any = None

    def __call__(self, *arguments: torch.Tensor) -> Any:
        self.first = self.first or list(arguments)
        actual = [*arguments]
        match self.fault:
            case "reads what was captured":
                actual[1] = self.first[1]
            case "does not update":
                actual = [argument.clone() for argument in arguments]
            case "updates what it should not":
                arguments[1].add_(1)
            case "raises":
                raise ValueError("mine")
        result = self.fn(*actual)
        match self.fault:
            case "overwrites an earlier result":
                self.result = result if self.result is None else self.result.copy_(result)
                return self.result
            case "other strides":
                return result.t().contiguous().t()
            case "other dtype":
                return result.double()
            case "a copy where eager returns an argument":
                return result.clone()
            case "one value is off":
                result[1, 2] += 1e-3
        return result

    def explain(self) -> Any:
        return self

    def to_dict(self) -> dict[str, Any]:
        counts = {"kernels": 1, "kernels_in_graphs": 1, "nodes": 1, "patched_nodes": 1}
        return {**counts, "bytes_copied_per_replay": 0, "fallbacks": []}

    def cache_info(self) -> Any:
        return pygraph.jit(add).cache_info()._replace(hits=3)

    def cache_clear(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "call", "ended"),
    [
        ("", add, "zero-copy"), ("", update, "zero-copy"), ("raises", add, "error"),
        ("reads what was captured", add, "wrong"), ("reads what was captured", update, "wrong"),
        ("overwrites an earlier result", add, "wrong"), ("other strides", add, "wrong"),
        ("other dtype", add, "wrong"), ("one value is off", add, "wrong"), ("does not update", update, "wrong"),
        ("updates what it should not", add, "wrong"), ("a copy where eager returns an argument", update, "wrong"),
    ],
)  # fmt: skip
def test_faults_are_seen(device: torch.device, monkeypatch: Any, fault: str, call: Any, ended: str) -> None:
    monkeypatch.setattr(pygraph, "graphify", lambda fn: Faulty(fn.fn, fault))
    record = conformance_cases.run_case("add", make_case(device, call))
    assert record["class"] == ended, record
    assert bool(record["reasons"]) == (ended != "zero-copy")


def test_clones_keep_layout_alignment_and_sharing(device: torch.device) -> None:
    base = torch.arange(60.0).to(device)
    tensors = [base[1:13].view(3, 4).t(), base[20:40:3], base[13:20], torch.zeros(0, 3).to(device)]
    tensors.append(tensors[0])
    copies = conformance_cases.clones(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        assert (copy.data_ptr() - tensor.data_ptr()) % 256 == 0
        assert not copy.numel() or copy.data_ptr() != tensor.data_ptr()
    assert copies[4] is copies[0]
    assert copies[2].data_ptr() - copies[0].data_ptr() == tensors[2].data_ptr() - tensors[0].data_ptr()
    conformance_cases.poison(copies[:1])
    assert copies[0].isnan().all()
    assert not copies[1].isnan().any()
    assert not tensors[0].isnan().any()


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({}, "zero-copy"),
        ({"bytes_copied_per_replay": 8}, "copied"),
        ({"bytes_copied_per_replay": 8, "kernels_in_graphs": 1}, "copied"),
        ({"kernels_in_graphs": 1}, "partly"),
        ({"kernels_in_graphs": 0}, "not capturable"),
        ({"kernels_in_graphs": 0, "kernels": 0}, "no device work"),
        ({"kernels_in_graphs": 0, "kernels": 0, "fallbacks": [{"what": "the call", "reason": "no"}]}, "not capturable"),
        ({"nodes": 0}, "no device work"),
        ({"replays": 2}, "not capturable"),
    ],
)
def test_classes(changes: dict[str, Any], ended: str) -> None:
    report = {"kernels": 2, "kernels_in_graphs": 2, "nodes": 2, "bytes_copied_per_replay": 0, "fallbacks": []}
    found, reasons = conformance_cases.classify({**report, "replays": 3, **changes})
    assert found == ended
    assert bool(reasons) == (ended not in ("zero-copy", "no device work"))


def test_samples_come_with_values_of_other_seeds() -> None:
    operators = conformance_cases.load_operators()
    assert conformance_cases.supports(operators["add"], "cuda", "bfloat16")
    found = list(conformance_cases.cases(operators["add_"], torch.device("cpu"), torch.float32, 2))
    assert len(found) == 2
    first, second, _ = found[1].sets
    assert [x.shape for x in first] == [x.shape for x in second]
    assert not torch.equal(first[0], second[0])


# -- workers ------------------------------------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
say = lambda answer: print(json.dumps(answer), flush=True)
say({"ready": True})
for line in sys.stdin:
    request = json.loads(line)
    for case in range(request["start"], 4):
        say({"begin": case})
        if case == 1 and request["unit"] == "dies":
            os._exit(3)
        if case == 2 and request["unit"] == "hangs":
            time.sleep(60)
        if case == 3 and request["unit"] == "loses the device":
            say({"lost": "an illegal access"})
        say({"case": case, "record": {"unit": request["unit"]}})
    say({"end": True})
"""


def test_a_worker_that_dies_is_replaced_and_its_case_recorded() -> None:
    found: dict[str, list[Any]] = {}

    def keep(unit: str, record: Any, case: int, reason: str) -> None:
        assert record is None or record["unit"] == unit
        found.setdefault(unit, []).append((case, reason))

    units = ["works", "dies", "hangs", "loses the device"]
    run = workers.Run(units, [sys.executable, "-c", WORKER], {}, keep, str)
    assert run(jobs=2, timeout=1.0, minutes=1.0) == 0
    assert found["works"] == [(case, "") for case in range(4)]
    assert found["dies"] == [(0, ""), (1, "the process died with code 3: no message"), (2, ""), (3, "")]
    assert found["hangs"] == [(0, ""), (1, ""), (2, "no answer within 1 s"), (3, "")]
    assert found["loses the device"] == [
        *((case, "") for case in range(3)),
        (3, "the device was lost: an illegal access"),
    ]


# -- conformance: all cases ---------------------------------------------------------------------------------------


def record(operator: str, dtype: str, sample: int, ended: str, *reasons: str, **more: Any) -> dict[str, Any]:
    case = {"operator": operator, "dtype": dtype, "sample": sample}
    return {**case, "class": ended, "reasons": list(reasons), "exact": True, "kernels": 1, **more}


RECORDS = [
    record("sum", "int64", 0, "zero-copy"),
    record("sum", "float32", 1, "copied", "input load_3 is copied: no pointer in aten.sum.default"),
    record("sum", "float32", 0, "zero-copy"),
    record("add", "float32", 0, "zero-copy", exact=False),
    record("nonzero", "float32", 0, "not capturable", "aten.nonzero.default: it | synchronises"),
    record("view", "float32", 0, "no device work"),
    record("svd", "float32", 0, "skipped", "eager: no"),
]


def test_rows_and_summary() -> None:
    records = conformance_report.in_order(RECORDS)
    assert [r["operator"] for r in records] == ["add", "nonzero", "sum", "sum", "sum", "svd", "view"]
    rows = {row["operator"]: row for row in conformance_report.by_operator(records)}
    assert rows["sum"]["class"] == "copied"
    assert rows["sum"]["dtypes"] == {"float32": {"copied": 1, "zero-copy": 1}, "int64": {"zero-copy": 1}}
    summary = conformance_report.summarise(records)
    assert summary["zero_copy_cases_percent"] == 75.0  # of three and one that is copied
    assert summary["zero_copy_operators_percent"] == 50.0
    assert summary["bit_exact_cases"] == 2
    assert summary["copied"] == {"an input is copied: no pointer in …": 1}
    assert sum(counts["cases"] for counts in summary["classes"].values()) == len(RECORDS)


def test_a_later_record_of_the_same_case_counts() -> None:
    again = record("add", "float32", 0, "wrong", "it differs")
    records = conformance_report.in_order([*RECORDS, again])
    assert len(records) == len(RECORDS)
    assert conformance_report.summarise(records)["classes"]["wrong"] == {"cases": 1, "operators": 1}


def test_the_share_never_rounds_up_to_all() -> None:
    records = [record(f"op{i}", "float32", 0, "zero-copy") for i in range(2999)] + [record("x", "float32", 0, "error")]
    assert conformance_report.summarise(records)["zero_copy_cases_percent"] == 99.9


def test_the_page_has_a_row_for_every_operator() -> None:
    records = conformance_report.in_order(RECORDS)
    result = {
        "command": "python x", "versions": {"torch": "2"}, "summary": conformance_report.summarise(records),
        "rows": conformance_report.by_operator(records),
    }  # fmt: skip
    page = conformance_report.markdown(result)
    for operator in ("add", "nonzero", "sum", "svd", "view"):
        assert page.count(f"`{operator}`") == 1
    assert "it \\| synchronises" in page
    for line in page.splitlines():
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") == 7


# -- pointers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_combinations(quick: bool) -> None:
    found = list(pointers.configs(quick))
    assert found[0] == pointers.JUDGED
    assert len(set(found)) == len(found)
    assert all(2 * count * nbytes <= 16 << 30 for _, count, nbytes in found)
    assert any(pointers.is_compiled(config) for config in found)
    assert quick or ("one kernel", 128, 64 << 20) in found


def test_the_page_of_pointers() -> None:
    row = {"function": "one kernel", "inputs": 32, "bytes": 4 << 20, "calls": 4, "ways": {}}
    for index, way in enumerate(("replay alone", "pygraph host")):
        row["ways"][way] = {name: [1.0, 2.0 + index, 4.0] for name in pointers.MEASURES}
    page = pointers.markdown({"command": "python x", "versions": {"torch": "2"}, "rows": [row]})
    assert "| pygraph host | 3.0 (1.0–4.0) | 3.0 (1.0–4.0) | 3.0 (1.0–4.0) | 1.50 | 1.50 |" in page
    assert "| 32 | 4 MB | 2.0 / 2.0 / 2.0 | 3.0 / 3.0 / 3.0 |" in page


def test_where_auto_is_slower_than_the_best_mechanism() -> None:
    def row(
        auto: float, host: float, device: float, copy: float, spread: float = 0.01, chosen: int = 8
    ) -> dict[str, Any]:
        times = {"auto": (auto, chosen), "host": (host, 8), "device": (device, 0), "copy": (copy, 0)}
        ways = {
            f"pygraph {m}": {"wall": [t * (1 - spread), t, t * (1 + spread)], "graph": {"mechanisms": {"host": nodes}}}
            for m, (t, nodes) in times.items()
        }
        return {"function": "chain", "inputs": 8, "bytes": 4096, "ways": ways}

    assert pointers.slower_than_the_best(row(10.2, 10.0, 12.0, 5.0), 1.03) is None
    assert pointers.slower_than_the_best(row(11.0, 10.0, 12.0, 5.0, spread=0.1), 1.03) is None
    found = pointers.slower_than_the_best(row(12.0, 12.0, 10.0, 5.0), 1.03)
    assert found == "chain, 8 × 4 KB: auto takes 12.0 µs, device 10.0 (1.20)"
    same = row(11.0, 12.0, 10.0, 5.0, chosen=0)
    assert pointers.slower_than_the_best(same, 1.03) is None, "two graphs that do the same are no choice"


def test_a_combination_is_measured(device: torch.device) -> None:
    found = pointers.benchmark(("chain", 3, 4 << 10), pointers.chain, device, rounds=2)
    assert set(found["ways"]) >= {"eager", "pygraph auto", "pygraph host", "pygraph copy"}
    for times in found["ways"].values():
        assert all(low <= middle <= high for low, middle, high in (times[name] for name in pointers.MEASURES))
    assert found["ways"]["pygraph auto"]["graph"]["bytes_copied_per_replay"] == 0
    assert found["ways"]["pygraph copy"]["graph"]["bytes_copied_per_replay"] == 3 * (4 << 10)
