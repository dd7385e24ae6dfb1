"""`devicify`: each rule of the table against eager torch, and what holds of whole Programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import pygraph
from pygraph.api.trace import trace
from pygraph.errors import UndecidedError
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import Argument, Captured, Mutation, ScalarArgument, TensorSpec
from pygraph.ir.evaluate import evaluate
from pygraph.ir.program import Program
from pygraph.transforms.devicify import devicify_program, undevicified_scalars
from pygraph.transforms.rules.emitter import SCALAR, Emitter, HostNumber, aten
from pygraph.transforms.rules.scalar_rules import RULES
from tests import extent

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.int64, torch.int32, torch.bool)
INTS = (torch.int64, torch.int32)
K = object()  # where the host number goes


# ---- the rules, one by one -------------------------------------------------------------------------------------


def rewritten(
    device: torch.device, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: Any
) -> torch.Tensor | None:
    """Apply the rule of ``op`` with host number ``number`` at each ``K``, and run what it wrote; None if no rule."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}

    def placeholder(value: Any, spec: Any) -> fx.Node:
        with graph.inserting_before(next(iter(n for n in graph.nodes if n.op != "placeholder"), None)):
            node = graph.placeholder(f"p{len(values)}")
        node.meta = {"spec": spec, "source": None}
        values[node] = value
        return node

    def lift(value: Any) -> Any:
        if value is K:
            return HostNumber(placeholder(number, type(number)), type(number)(1))
        return placeholder(value, TensorSpec.of(value)) if isinstance(value, torch.Tensor) else value

    bound = {a.name: a.default_value for a in op._schema.arguments}
    bound.update(zip(bound, args, strict=False), **kwargs)
    bound = {name: lift(value) for name, value in bound.items()}
    want = op(*fill_in(args, number), **fill_in(kwargs, number))
    node = graph.call_function(op)
    node.meta = {"spec": TensorSpec.of(want), "source": None}

    def scalar(value: Any, dtype: torch.dtype) -> fx.Node:
        spec = TensorSpec((), (), dtype, device)
        if not isinstance(value, fx.Node):
            return placeholder(SCALAR(value, dtype=dtype, device=device), spec)
        with graph.inserting_before(node):
            new = graph.call_function(SCALAR, (value,), {"dtype": dtype, "device": device})
        new.meta = {"spec": spec, "source": None}
        return new

    out = RULES[op](Emitter(graph, node, device, TensorSpec.of(want), scalar), bound)
    if out is None:
        return None
    graph.erase_node(node)
    graph.output(out)
    graph.lint()
    assert out.meta["spec"].dtype == want.dtype
    result = fx.GraphModule({}, graph)(*(values[n] for n in graph.nodes if n.op == "placeholder"))
    for other in graph.nodes:  # no host number reaches anything but pygraph::scalar
        assert other.target is SCALAR or not any(isinstance(s.meta["spec"], type) for s in other.all_input_nodes)
    return result


def fill_in(tree: Any, number: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: number if leaf is K else leaf, tree)


def sample(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A transposed [3, 5] tensor with special values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 3, generator=generator, dtype=torch.float64) * 4
    if dtype.is_floating_point:
        values[0] = torch.tensor([0.0, -0.0, math.inf])
        values[1] = torch.tensor([-math.inf, math.nan, 1.0])
    elif dtype is not torch.bool:
        values[values.abs() < 1] = 1
    return values.to(dtype).t()


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance in units in the last place of ``want``; inf for the wrong sign of a zero, or if one alone is NaN."""
    got, want = got.cpu(), want.cpu()
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want) else math.inf
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    finfo = torch.finfo(want.dtype)
    unit = want.double().abs().clamp(min=finfo.tiny) * finfo.eps
    off = torch.where(same, 0.0, (got.double() - want.double()).abs() / unit)
    off[(got == want) & ~same] = math.inf
    return float(off.nan_to_num(math.inf, math.inf).max()) if off.numel() else 0.0


def check(
    device: torch.device, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: Any, within: float = 0.0
) -> None:
    kwargs_cpu = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
    try:
        op(*fill_in(args, number), **fill_in(kwargs_cpu, number))
    except (RuntimeError, ZeroDivisionError, NotImplementedError):
        return  # eager refuses this dtype or value
    args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), args)
    try:
        want = op(*fill_in(args, number), **fill_in(kwargs, number))
    except (RuntimeError, NotImplementedError):
        return  # eager on the device refuses it
    got = rewritten(device, op, args, kwargs, number)
    assert got is not None, "no rule"
    assert got.dtype == want.dtype
    assert got.stride() == want.stride()
    assert ulps(got, want) <= within, (number, got, want)


floats = st.one_of(
    st.sampled_from([0.1, -0.0, 1.0, 2.0, -1.5, math.inf, -math.inf, math.nan, 1e5, 70000.0, 3.4e38, 1e-8]),
    st.floats(-1e3, 1e3),
    st.floats(),
)
ints = st.one_of(st.sampled_from([0, 1, 2, 3, -1, 7, 300, 2**31 - 1, -(2**40)]), st.integers(-(2**62), 2**62))
numbers = st.one_of(floats, ints)

# name: (op, args after x, kwargs). Bits are those of eager for every one of them.
SAME_BITS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "add": (aten.add.Tensor, (K,), {}),
    "add.Scalar": (aten.add.Scalar, (K,), {}),
    "sub": (aten.sub.Tensor, (K,), {}),
    "sub.Scalar": (aten.sub.Scalar, (K,), {}),
    "rsub": (aten.rsub.Scalar, (K,), {}),
    "mul": (aten.mul.Tensor, (K,), {}),
    "mul.Scalar": (aten.mul.Scalar, (K,), {}),
    "div": (aten.div.Tensor, (K,), {}),
    "div.Scalar": (aten.div.Scalar, (K,), {}),
    "div floor": (aten.div.Tensor_mode, (K,), {"rounding_mode": "floor"}),
    "div trunc": (aten.div.Tensor_mode, (K,), {"rounding_mode": "trunc"}),
    "floor_divide": (aten.floor_divide.default, (K,), {}),
    "remainder": (aten.remainder.Scalar, (K,), {}),
    "fmod": (aten.fmod.Scalar, (K,), {}),
    "copysign": (aten.copysign.Scalar, (K,), {}),
    "xlogy": (aten.xlogy.Scalar_Other, (K,), {}),
    "bitwise_and": (aten.bitwise_and.Scalar, (K,), {}),
    "bitwise_or": (aten.bitwise_or.Scalar, (K,), {}),
    "bitwise_xor": (aten.bitwise_xor.Scalar, (K,), {}),
    "lshift": (aten.bitwise_left_shift.Tensor_Scalar, (K,), {}),
    "rshift": (aten.__rshift__.Scalar, (K,), {}),
    **{name: (getattr(aten, name).Scalar, (K,), {}) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "clamp": (aten.clamp.default, (K, 2.5), {}),
    "clamp max": (aten.clamp.default, (None, K), {}),
    "clamp both": (aten.clamp.default, (-1, K), {}),
    "clamp_min": (aten.clamp_min.default, (K,), {}),
    "clamp_max": (aten.clamp_max.default, (K,), {}),
    "hardtanh": (aten.hardtanh.default, (-1, K), {}),
    "fill": (aten.fill.Scalar, (K,), {}),
    "full_like": (aten.full_like.default, (K,), {}),
    "new_full": (aten.new_full.default, ([2, 3], K), {}),
    "leaky_relu": (aten.leaky_relu.default, (K,), {}),
    "threshold": (aten.threshold.default, (0.5, K), {}),
    "threshold at": (aten.threshold.default, (K, 0.25), {}),
}
CLOSE: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "elu": (aten.elu.default, (K,), {}),
    "elu scale": (aten.elu.default, (1.5, K, 0.5), {}),
    "softplus": (aten.softplus.default, (K,), {}),
}


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("name", SAME_BITS)
@settings(max_examples=extent.examples(8, 40))
@given(number=numbers)
def test_rule_has_the_bits_of_eager(device: torch.device, name: str, dtype: torch.dtype, number: float) -> None:
    op, args, kwargs = SAME_BITS[name]
    if device.type == "cuda" and not math.isfinite(number):
        return  # a number that is not finite is baked in by the trace
    if name == "clamp max" and math.isnan(number):
        return  # baked in as well, and torch 2.11 ignores it on the CPU where 2.13 gives NaN
    if name.startswith("clamp") and device.type != "cuda" and number == 0:
        return  # which of 0.0 and -0.0 the CPU takes depends on the element's place in a vector
    check(device, op, (sample(dtype), *args), kwargs, number)
    check(device, op, (sample(dtype)[0, 2], *args), kwargs, number)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["div", "div floor", "div trunc", "floor_divide"])
@pytest.mark.parametrize("number", [0.001, -0.3, 5.048673539853209e-42, 1e-310, 3e38, 0.0, 3, -7])
def test_division_has_the_bits_of_eager(device: torch.device, name: str, dtype: torch.dtype, number: float) -> None:
    op, args, kwargs = SAME_BITS[name]
    values = torch.cat([torch.arange(-200, 200) / 8, sample(dtype).flatten()]).to(dtype)
    check(device, op, (values, *args), kwargs, number)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CLOSE)
@settings(max_examples=extent.examples(8, 40))
@given(number=st.floats(0.125, 4))
def test_activations_are_within_two_ulps(device: torch.device, name: str, dtype: torch.dtype, number: float) -> None:
    op, args, kwargs = CLOSE[name]
    check(device, op, (sample(dtype), *args), kwargs, number, within=2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=extent.examples(8, 40))
@given(number=st.one_of(st.sampled_from([3, 0.1, -2.0, 1.0, 0, 0.0, math.inf]), st.floats(-4, 4)))
def test_powers_of_a_number(device: torch.device, dtype: torch.dtype, number: float) -> None:
    check(device, aten.pow.Scalar, (K, torch.linspace(0.1, 5, 15).to(dtype)), {}, number)


def test_exponents_keep_their_number_for_which_eager_has_kernels_of_their_own(device: torch.device) -> None:
    x = torch.ones(3, device=device)

    def power(x: torch.Tensor, k: float) -> torch.Tensor:
        return x ** torch.tensor(k).to(x.device).item()

    if torch.__version__ < "2.12":  # which asks for the exponent's value during the trace
        with pytest.raises(UndecidedError, match="data-dependent number"):
            devicified(power, x, 0.5)
        return
    program = devicified(power, x, 0.5)
    assert "aten.pow.Tensor_Scalar" in [fallback.what for fallback in program.fallbacks]


@pytest.mark.parametrize("dtype", ALL, ids=str)
@settings(max_examples=extent.examples(8, 40))
@given(number=numbers)
def test_choosing_and_filling_have_the_bits_of_eager(device: torch.device, dtype: torch.dtype, number: float) -> None:
    x, mask = sample(dtype), sample(torch.float32) > 0
    check(device, aten.where.ScalarOther, (mask, x, K), {}, number)
    check(device, aten.where.ScalarSelf, (mask, K, x), {}, number)
    check(device, aten.where.Scalar, (mask, K, 2.0), {}, number)
    check(device, aten.masked_fill.Scalar, (x, mask, K), {}, number)
    check(device, aten.masked_fill.Scalar, (x, mask[0], K), {}, number)
    check(device, aten.index_fill.int_Scalar, (x, -1, torch.tensor([1, -1]), K), {}, number)
    check(device, aten.scatter.value, (x, 0, torch.tensor([[0, 2, 1]]), K), {}, number)
    check(device, aten.full.default, ([2, 2], K), {"dtype": dtype, "device": device}, number)
    check(device, aten.scalar_tensor.default, (K,), {"dtype": dtype, "device": device}, number)


def finite(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values if dtype.is_floating_point else values * 4).to(dtype)


factors = st.floats(-4, 4).filter(lambda k: k == 0 or abs(k) > 1e-3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=extent.examples(8, 40))
@given(number=factors)
def test_sums_with_a_factor_are_within_tolerance(device: torch.device, dtype: torch.dtype, number: float) -> None:
    a, b, c = (finite(dtype, 4, 4, seed=seed).to(device) for seed in range(3))
    c = c.abs() + 0.5
    cases = [
        (aten.add.Tensor, (a, b), {"alpha": K}),
        (aten.add.Tensor, (a, K), {"alpha": 2}),
        (aten.sub.Tensor, (a, b), {"alpha": K}),
        (aten.rsub.Tensor, (a, b), {"alpha": K}),
        (aten.lerp.Scalar, (a, b, K), {}),
        (aten.addcmul.default, (a, b, c), {"value": K}),
        (aten.addcdiv.default, (a, b, c), {"value": K}),
        (aten.addmm.default, (a, b, c), {"alpha": K}),
        (aten.addmm.default, (a[0], b, c), {"beta": K, "alpha": 0.5}),
        (aten.addmm.default, (a, b, c), {"beta": K, "alpha": K}),
        (aten.addmv.default, (a[0], b, c[0]), {"beta": K}),
        (aten.addr.default, (a, b[0], c[0]), {"beta": K, "alpha": K}),
        (aten.baddbmm.default, (a[None], b[None], c[None]), {"alpha": K, "beta": 0}),
    ]
    for op, args, kwargs in cases:
        want = op(*fill_in(args, number), **fill_in(kwargs, number))
        got = rewritten(device, op, args, kwargs, number)
        assert got is not None
        assert got.stride() == want.stride(), op
        scale = max(1.0, float(want.abs().max())) * 4
        torch.testing.assert_close(
            got, want, rtol=0, atol=scale * torch.finfo(dtype).eps, msg=lambda m, op=op: f"{op}: {m}"
        )


def test_beta_zero_ignores_nan(device: torch.device) -> None:
    nan, a = torch.full((2, 2), math.nan, device=device), torch.ones(2, 2, device=device)
    got = rewritten(device, aten.addmm.default, (nan, a, a), {"beta": K}, 0.0)
    assert torch.equal(got, a @ a)


@pytest.mark.parametrize("dtype", INTS, ids=str)
@settings(max_examples=extent.examples(8, 40))
@given(number=st.integers(-5, 5))
def test_integer_sums_with_a_factor_are_exact(device: torch.device, dtype: torch.dtype, number: int) -> None:
    a, b = finite(dtype, 3, 3), finite(dtype, 3, 3, seed=1)
    check(device, aten.add.Tensor, (a, b), {"alpha": K}, number)
    check(device, aten.sub.Tensor, (a, b), {"alpha": K}, number)
    check(device, aten.addcmul.default, (a, b, b), {"value": K}, number)
    check(device, aten.addmm.default, (a, b, b), {"alpha": K, "beta": K}, number)


def test_every_rule_is_keyed_by_an_operation() -> None:
    assert all(isinstance(op, torch._ops.OpOverload) for op in RULES)


# ---- whole Programs --------------------------------------------------------------------------------------------


def devicified(fn: Callable[..., Any], *args: Any) -> Program:
    """Trace and devicify; the pass leaves its argument alone and has nothing to do the second time."""
    program = check_program(trace(fn)(*args))
    text = str(program)
    result = check_program(devicify_program(program))
    assert str(program) == text
    again = check_program(devicify_program(result))
    assert body(again) == body(result)
    assert again.fallbacks == result.fallbacks
    return result


def body(program: Program) -> str:
    return "\n".join(line for line in str(program).splitlines() if not line.startswith("#"))


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.nodes if node.op == "call_function"]


def check_same(program: Program, fn: Callable[..., Any], *args: Any) -> None:
    """`evaluate` gives what eager torch gives, bit for bit, updates of the arguments included."""
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    torch.manual_seed(0)
    want = fn(*args)
    torch.manual_seed(0)
    got = evaluate(program, *copies)
    leaves = torch.utils._pytree.tree_leaves
    for g, w in zip([*leaves(got), *copies], [*leaves(want), *args], strict=True):
        if isinstance(w, torch.Tensor):
            assert (g.dtype, g.device, g.stride()) == (w.dtype, w.device, w.stride())
            assert ulps(g, w) == 0, (g, w)
        else:
            assert g == w


LIVE = torch.tensor(2.5)  # closed over by functions below; its owner may change it

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    # name: (function of a device tensor and what follows, what follows)
    "number": (lambda x, k: (x * k + k) / k - (k * 2 + 1), (2.5,)),
    "int number": (lambda x, k: (x * k // 2) % k, (3,)),
    "number on the left": (lambda x, k: k - k / (x + 10) + torch.rsub(x, k), (3.5,)),
    "clamp": (lambda x, k: x.clamp(0, k).clamp_min(-k), (1.5,)),
    "where": (lambda x, k: torch.where(x > k, x, k), (0.5,)),
    "alpha": (lambda x, k: torch.where(x > 0, x, torch.tensor(0.0)), (0.5,)),
    "fill": (
        lambda x, k: (torch.full_like(x.t(), k), x.new_full((2, 3), k), torch.full((), k, device=x.device)),
        (2.0,),
    ),
    "setitem": (lambda x, k: x[1:].fill_(k), (3,)),
    "masked_fill": (lambda x, k: x.t().masked_fill(x.t() > k, k), (0.25,)),
    "tensor of a number": (lambda x, k: x * torch.tensor(k) + torch.tensor(k, device="cpu").to(x.device), (2.0,)),
    "0-d float64": (
        lambda x, c: (x * c, x > c, c + x, torch.maximum(x, c.float())),
        (torch.tensor(0.1, dtype=torch.float64),),
    ),
    "0-d int": (lambda x, c: (x + c, x.index_select(0, c.to(x.device)[None])), (torch.tensor(1),)),
    "0-d computed": (lambda x, c: x * (c * 2).exp(), (torch.tensor(0.1),)),
    "0-d closed over": (lambda x: x * LIVE + LIVE, ()),
    "0-d constant": (lambda x: x * torch.tensor(3.0) + torch.tensor([0, 1])[1], ()),
    "constant": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device), ()),
    "changed constant": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]).mul_(2).to(x.device), ()),
    "returned constant": (lambda x: torch.tensor([1.0, 2.0]).to(x.device).view(2, 1), ()),
    "arange": (lambda x: x + torch.arange(4).to(x.device), ()),
    "returned arange": (lambda x: (torch.arange(4).to(x.device), torch.arange(4).to(x.device, torch.float32)), ()),
    "mask": (lambda x: x * torch.ones(4, 4, dtype=torch.bool).tril().to(x.device), ()),
    "linspace": (lambda x: x + torch.linspace(0, 1, 4).exp().to(x.device), ()),
    "index": (lambda x: x[torch.tensor([2, 0])], ()),
    "live index": (lambda x, i: x[i] + x[:, i].sum(), (torch.tensor([2, 0]),)),
    "live copy": (lambda x, h: x + (h * 2).to(x.device), (torch.arange(4.0),)),
    "copy_": (lambda x, h: x.copy_(h).mul_(2), (torch.arange(4.0),)),
    "index_put": (
        lambda x, c: x.index_put_((torch.tensor([0]), torch.tensor([1])), c.to(x.dtype)).mul_(2),
        (torch.tensor(7.0),),
    ),
    "host random": (lambda x: x + torch.rand(4).to(x.device) + torch.randn(4).to(x.device), ()),
    "download": (lambda x, k: ((x * k).cpu() + 1, x.sum().cpu() * k), (2.0,)),
    "item": (lambda x: x * x.amax().item(), ()),
    "there and back": (lambda x: x + x.sum().cpu(), ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_eager(device: torch.device, name: str, dtype: torch.dtype) -> None:
    fn, args = PROGRAMS[name]
    x = (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 4).to(dtype).to(device)
    program = devicified(fn, x, *args)
    check_same(program, fn, x, *args)
    assert program.fallbacks == ()
    assert undevicified_scalars(program) == set()
    assert all("source" in node.meta and "spec" in node.meta for node in program.nodes if node.op == "call_function")


def test_numbers_are_live(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    program = devicified(lambda x, k: x * (k + 1), x, 2.0)
    for k in (2.0, 0.1, -3.0):
        assert torch.equal(evaluate(program, x, k).cpu(), (x * (k + 1)).cpu())
    assert targets(program) == ["<built-in function add>", "pygraph.scalar.default", "aten.mul.Tensor"]


def test_closed_over_host_tensors_are_live(device: torch.device) -> None:
    scale, shift, x = torch.tensor(2.0), torch.ones(3), torch.ones(3, device=device)
    program = devicified(lambda x: x * scale + shift.to(x.device), x)
    scale.fill_(5)
    shift.fill_(7)
    assert evaluate(program, x).tolist() == [12.0] * 3


def test_bfloat16_is_rounded_once(device: torch.device) -> None:
    x = torch.randn(64, device=device).to(torch.bfloat16)
    program = devicified(lambda x, k: x * k, x, 0.1)
    assert targets(program) == [
        "pygraph.scalar.default",
        "aten._to_copy.default",
        "aten.mul.Tensor",
        "aten._to_copy.default",
    ]
    assert torch.equal(evaluate(program, x, 0.1).cpu(), (x * 0.1).cpu())


def test_constants_become_inputs_and_old_inputs_stay(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    before = trace(lambda x, unused: x + torch.tensor([1.0, 2.0]).to(x.device))(x, x.clone())
    after = devicify_program(before)
    assert after.inputs[: len(before.inputs)] == before.inputs
    (added,) = after.inputs[len(before.inputs) :]
    assert isinstance(added, Captured)
    assert (added.kind, added.value.device.type) == ("constant", device.type)
    assert targets(after) == ["aten.add.Tensor"]


def test_exact_factories_run_on_the_device(device: torch.device) -> None:
    program = devicified(lambda x: x + torch.arange(4)[None].to(x.device), torch.ones(1, 4, device=device))
    assert targets(program) == ["aten.arange.default", "aten.unsqueeze.default", "aten.add.Tensor"]
    assert all(spec.device.type == device.type for node in program.nodes for spec in [node.meta.get("spec")] if spec)


def test_host_work_comes_first_and_downloads_last(device: torch.device) -> None:
    def fn(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.cos()
        down = y.cpu()
        z = y + h.sin().to(x.device)
        return z, down + 1

    program = devicified(fn, torch.ones(3, device=device), torch.ones(3))
    assert targets(program) == [
        "aten.sin.default",
        "aten._to_copy.default",
        "aten.cos.default",
        "aten.add.Tensor",
        "aten._to_copy.default",
        "aten.add.Tensor",
    ]


def test_a_number_that_was_on_the_device_does_not_leave_it(device: torch.device) -> None:
    program = devicified(lambda x: x * x.amax().item(), torch.ones(3, device=device))
    assert targets(program) == ["aten.amax.default", "aten.mul.Tensor"]


def test_random_draws_keep_their_order(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        first = torch.rand(3)
        y = torch.nn.functional.dropout(x, 0.5)
        return y + torch.rand(3).to(x.device), first + y.cpu() * torch.rand(3)

    x = torch.ones(3, device=device)
    check_same(devicified(fn, x), fn, x)


def test_operations_without_a_rule_are_named(device: torch.device) -> None:
    x = torch.full((3,), 5.0, device=device)
    program = devicified(lambda x, a, b: torch.nn.functional.hardshrink(x, a) * b, x, 2, 3)
    (fallback,) = program.fallbacks
    assert fallback.what == "aten.hardshrink.default"
    assert "by value" in fallback.reason
    assert fallback.source is not None
    assert "test_devicify.py" in fallback.source
    index = undevicified_scalars(program)
    assert [program.inputs[i].path for i in index] == ["args[1]"]
    assert evaluate(program, x, 3, 4).tolist() == [20, 20, 20]


def test_undevicified_numbers_are_followed_through_arithmetic(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    program = devicified(lambda x, a, b, c: torch.nn.functional.hardshrink(x, a * 2 + b) + c, x, 1, 1, 1)
    assert [program.inputs[i].path for i in sorted(undevicified_scalars(program))] == ["args[1]", "args[2]"]


def test_a_program_without_a_device_only_gets_history() -> None:
    program = trace(lambda x, k: x * k)(torch.ones(3), 2.0)
    result = devicify_program(program)
    assert result.history == ("trace", "devicify")
    assert result.module is program.module


def test_updates_keep_pointing_at_their_inputs(device: torch.device) -> None:
    program = devicified(lambda x, k: x.add_(torch.tensor(3.0)).mul_(k), torch.ones(3, device=device), 2.0)
    (mutation,) = [output for output in program.outputs if isinstance(output, Mutation)]
    assert isinstance(program.inputs[mutation.input], Argument)
    assert any(isinstance(descriptor, ScalarArgument) for descriptor in program.inputs)


def test_a_number_beside_a_tensor_at_a_place_that_data_decides(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, k: x.flatten()[x.argmax()] + k)
    for k in (0.5, 1.5, 2.5):
        x = torch.tensor([[1.0, 5.0 - k], [k + 3.0, 0.0]], device=device)
        assert fast(x, k).item() == max(5.0 - k, k + 3.0) + k
