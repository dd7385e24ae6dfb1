"""How each operation is rewritten when one of its operands is a host number: a table keyed by the operation.

Eager torch computes ``x * 0.1`` for half and bfloat16 in float32 and rounds once; a 0-d tensor of x's dtype would
be rounded first. A rule therefore says in which dtype its operands meet:

``wide``
    float32 for half and bfloat16, otherwise the result's dtype; the result is rounded at the end.
``common``
    the dtype that type promotion gives; the number is rounded to it first, as eager does.

Where CUDA's kernel and the CPU's differ, the device decides, as the emulated device runs the CPU's: `Emitter.cuda`.

A rule is ``rule(emit, args) -> node``: ``args`` are the operation's arguments by name, in which a `Host` stands
for each number from the host. It returns None where it does not apply; then the number stays by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

import pygraph.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::scalar
from pygraph.ir.descriptors import Spec, TensorSpec

aten: Any = torch.ops.aten
SCALAR: Any = torch.ops.pygraph.scalar.default
ITEM: Any = aten._local_scalar_dense.default

Args: TypeAlias = "dict[str, Any]"
Rule: TypeAlias = "Callable[[Emitter, Args], fx.Node | None]"


@dataclasses.dataclass(frozen=True)
class Host:
    """A number from the host as an operand: the node or constant it is, and what it is in type promotion."""

    value: fx.Node | int | float | bool
    promotes_as: Any  # a Python number, or a 0-d meta tensor for a 0-d CPU tensor


class Emitter:
    """Puts new nodes before ``node``, each with its spec and the user's source line.

    Args:
        graph: The graph that is edited.
        node: The operation that is being rewritten.
        device: The device it runs on.
        spec: What the new nodes are to give.
        scalar: Called as ``scalar(number, dtype)``; returns a node of a 0-d device tensor of that number, which
            is a node or known now.
    """

    def __init__(
        self,
        graph: fx.Graph,
        node: fx.Node,
        device: torch.device,
        spec: TensorSpec,
        scalar: Callable[[Any, torch.dtype], fx.Node],
    ) -> None:
        self.graph, self.node, self.device, self.spec, self._scalar = graph, node, device, spec, scalar

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which eager torch computes a result of this node's dtype."""
        return torch.float32 if self.spec.dtype in (torch.float16, torch.bfloat16) else self.spec.dtype

    @property
    def cuda(self) -> bool:
        """Whether eager torch runs CUDA's kernels; otherwise the CPU's."""
        return self.device.type == "cuda"

    def call(self, op: Any, *args: Any, spec: Spec = None, **kwargs: Any) -> fx.Node:
        """A new node; its spec is worked out on the meta device unless given."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(op, args, kwargs)
        if spec is None:
            values = fx.map_arg((args, kwargs), lambda arg: _meta_tensor(arg.meta["spec"]))
            result = op(*values[0], **values[1])
            spec = dataclasses.replace(TensorSpec.of(result), device=self.device)
        old = self.node.meta
        new.meta = {"spec": spec, "source": old.get("source"), "from": "devicify", "order": old.get("order")}
        return new

    def common(self, *operands: Any) -> torch.dtype:
        """The dtype that type promotion gives for these operands."""
        values = [_promotion_value(operand) for operand in operands]
        dtype = torch.result_type(values[0], values[-1])
        for value in values[1:-1]:
            dtype = torch.result_type(value, torch.empty((1,), dtype=dtype, device="meta"))
        return dtype

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in another dtype."""
        return node if node.meta["spec"].dtype == dtype else self.call(aten._to_copy.default, node, dtype=dtype)

    def operand(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor or host number in ``dtype``; a number known now stays a number."""
        return (
            self.tensor(value, dtype) if isinstance(value, (fx.Node, Host)) and not _is_known(value) else _known(value)
        )

    def tensor(self, value: Any, dtype: torch.dtype) -> fx.Node:
        """A tensor in ``dtype``: the given one, or a 0-d one of the number."""
        if isinstance(value, fx.Node):
            return self.cast(value, dtype)
        number = _known(value)
        if isinstance(number, fx.Node) and number.target is ITEM and self._is_on_device(number.args[0]):
            return self._without_reading(number.args[0], dtype)
        return self._scalar(number, dtype)

    def finish(self, node: fx.Node) -> fx.Node:
        """``node`` in the dtype and with the strides of the operation that is replaced."""
        node = self.cast(node, self.spec.dtype)
        if _same_strides(node.meta["spec"], self.spec):
            return node
        order = _dims_by_stride(self.spec)
        node = self.call(aten.permute.default, node, order)
        node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, node, _inverse(order))

    def full(self, value: Any) -> fx.Node:
        """A new tensor of this node's spec, every element the number."""
        scalar, order = self.tensor(value, self.spec.dtype), _dims_by_stride(self.spec)
        if not order and not reaches_output(self.node):
            return scalar  # nobody can keep the memory that a replay refreshes
        node = self.call(aten.expand.default, scalar, [self.spec.shape[dim] for dim in order])
        node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.finish(node if order == sorted(order) else self.call(aten.permute.default, node, _inverse(order)))

    def _is_on_device(self, node: Any) -> bool:
        spec = node.meta.get("spec")
        return isinstance(spec, TensorSpec) and spec.device == self.device and spec.device.type != "cpu"

    def _without_reading(self, tensor: Any, dtype: torch.dtype) -> fx.Node:
        """The device tensor that the host would read, and send back: it never leaves."""
        if tensor.meta["spec"].shape != ():
            tensor = self.call(aten.view.default, tensor, [])
        return self.cast(tensor, dtype)


def _is_known(value: Any) -> bool:
    return isinstance(value, Host) and not isinstance(value.value, fx.Node)


def _known(value: Any) -> Any:
    return value.value if isinstance(value, Host) else value


def _meta_tensor(spec: Any) -> Any:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def _promotion_value(operand: Any) -> Any:
    if isinstance(operand, fx.Node):
        return _meta_tensor(operand.meta["spec"])
    return operand.promotes_as if isinstance(operand, Host) else operand


def _same_strides(a: TensorSpec, b: TensorSpec) -> bool:
    if 0 in b.shape:
        return True
    return all(x == y for x, y, size in zip(a.stride, b.stride, b.shape, strict=True) if size != 1)


def _dims_by_stride(spec: TensorSpec) -> list[int]:
    return sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def reaches_output(node: fx.Node) -> bool:
    """Whether a node, or a view of it, is returned."""
    for user in node.users:
        if user.op == "output":
            return True
        schema = getattr(user.target, "_schema", None)
        if schema is not None and any(result.alias_info for result in schema.returns) and reaches_output(user):
            return True
    return False


# ---- families of rules -----------------------------------------------------------------------------------------


def wide(op: Any, *operands: str, keep: tuple[str, ...] = ()) -> Rule:
    """``op`` on tensors in the dtype that eager computes in; ``keep`` are arguments passed by name as they are."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        values = [emit.tensor(args[name], emit.wide) for name in operands]
        return emit.finish(emit.call(op, *values, **{name: args[name] for name in keep}))

    return rule


def common(op: Any, *operands: str) -> Rule:
    """``op`` on tensors in the result's dtype."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        return emit.finish(emit.call(op, *(emit.tensor(args[name], emit.spec.dtype) for name in operands)))

    return rule


def compare(op: Any) -> Rule:
    """A comparison, made in the dtype that both sides promote to."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        left, right = args["self"], args["other"]
        dtype = emit.common(left, right)
        return emit.finish(emit.call(op, emit.tensor(left, dtype), emit.tensor(right, dtype)))

    return rule


def add(left: str, right: str, sign: int) -> Rule:
    """``left + sign * alpha * right``; with ``alpha`` from the host one fused multiply-add, as CUDA's kernel."""
    op = aten.add.Tensor if sign > 0 else aten.sub.Tensor

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        a, b = _addend(emit, args[left]), _addend(emit, args[right])
        alpha = emit.operand(args["alpha"], emit.wide)
        if not isinstance(alpha, fx.Node):
            named: Args = {} if alpha == 1 else {"alpha": alpha}
            return emit.finish(emit.call(op, a, b, **named))
        if emit.wide is torch.bool:
            return None
        named = {} if sign > 0 else {"value": -1}
        return emit.finish(emit.call(aten.addcmul.default, a, b, alpha, **named))

    return rule


def _addend(emit: Emitter, value: Any) -> fx.Node:
    """CUDA adds a number in the wide dtype; the CPU rounds it to the result's dtype first."""
    if isinstance(value, Host) and not emit.cuda:
        value = emit.tensor(value, emit.spec.dtype)
    return emit.tensor(value, emit.wide)


def divide(emit: Emitter, args: Args) -> fx.Node | None:
    """Division, rounded or not. CUDA multiplies by the reciprocal of a host number, and so does this."""
    mode = args.get("rounding_mode")
    a, other = emit.tensor(args["self"], emit.wide), args["other"]
    if not (isinstance(other, Host) and emit.cuda and emit.wide.is_floating_point):
        return emit.finish(emit.call(aten.div.Tensor_mode, a, emit.tensor(other, emit.wide), rounding_mode=mode))
    # CUDA rounds the reciprocal once from float64 without a rounding mode, and the number first with one.
    b = emit.tensor(other, torch.float64 if mode is None else emit.wide)
    inverse = emit.cast(emit.call(aten.reciprocal.default, b), emit.wide)
    quotient = emit.call(aten.mul.Tensor, a, inverse)
    if mode == "trunc":
        quotient = emit.call(aten.trunc.default, quotient)
    elif mode == "floor":
        quotient = _floor(emit, a, b, inverse, quotient)
    return emit.finish(quotient)


def floor_divide(emit: Emitter, args: Args) -> fx.Node | None:
    """``self // other``."""
    return divide(emit, {**args, "rounding_mode": "floor"})


def _floor(emit: Emitter, a: fx.Node, b: fx.Node, inverse: fx.Node, quotient: fx.Node) -> fx.Node:
    """The floor of ``a / b``, step by step as CUDA's kernel for a host number ``b`` finds it from the remainder."""
    rest = emit.call(aten.fmod.Tensor, a, b)
    exact = emit.call(aten.mul.Tensor, emit.call(aten.sub.Tensor, a, rest), inverse)
    signs = emit.call(aten.mul.Tensor, emit.call(aten.sign.default, rest), b)
    exact = emit.call(aten.add.Tensor, exact, emit.call(aten.lt.Scalar, signs, 0), alpha=-1)
    below = emit.cast(emit.call(aten.floor.default, exact), emit.spec.dtype)
    by = emit.call(aten.sub.Tensor, exact, emit.cast(below, emit.wide))
    nearest = emit.call(aten.add.Tensor, below, emit.call(aten.gt.Scalar, by, 0.5))
    zero = emit.cast(emit.call(aten.copysign.Tensor, exact, quotient), emit.spec.dtype)
    floor = emit.call(aten.where.self, emit.call(aten.ne.Scalar, exact, 0), nearest, zero)
    infinite = emit.cast(quotient, emit.spec.dtype)
    return emit.call(aten.where.self, emit.call(aten.eq.Scalar, b, 0), infinite, floor)


def power(emit: Emitter, args: Args) -> fx.Node | None:
    """``self ** exponent``. Not for integers: eager raises on a negative exponent, which takes its value."""
    if not emit.spec.dtype.is_floating_point:
        return None
    base, exponent = emit.tensor(args["self"], emit.wide), emit.tensor(args["exponent"], emit.spec.dtype)
    return emit.finish(emit.call(aten.pow.Tensor_Tensor, base, emit.cast(exponent, emit.wide)))


def clamp(emit: Emitter, args: Args) -> fx.Node | None:
    """``clamp``, ``clamp_min``, ``clamp_max``, ``hardtanh``: bounds in the result's dtype."""
    low, high = args.get("min", args.get("min_val")), args.get("max", args.get("max_val"))
    bounds = [None if bound is None else emit.tensor(bound, emit.spec.dtype) for bound in (low, high)]
    return emit.finish(emit.call(aten.clamp.Tensor, emit.cast(args["self"], emit.spec.dtype), *bounds))


def where(emit: Emitter, args: Args) -> fx.Node | None:
    """``where`` with a number on either side, or as the condition."""
    sides = [emit.tensor(args[name], emit.spec.dtype) for name in ("self", "other")]
    return emit.finish(emit.call(aten.where.self, emit.tensor(args["condition"], torch.bool), *sides))


def masked_fill(emit: Emitter, args: Args) -> fx.Node | None:
    """As ``where``: CUDA's ``masked_fill`` with a tensor reads the value on the host."""
    value = emit.tensor(args["value"], emit.spec.dtype)
    return emit.finish(emit.call(aten.where.self, args["mask"], value, args["self"]))


def index_fill(emit: Emitter, args: Args) -> fx.Node | None:
    """As ``index_put``: CUDA's ``index_fill`` with a tensor reads the value on the host."""
    if not emit.spec.shape:
        return None
    indices = [None] * (args["dim"] % len(emit.spec.shape)) + [args["index"]]
    value = emit.tensor(args["value"], emit.spec.dtype)
    return emit.finish(emit.call(aten.index_put.default, args["self"], indices, value))


def fill(name: str) -> Rule:
    """A new tensor full of the number."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        return emit.full(args[name])

    return rule


def scatter_value(emit: Emitter, args: Args) -> fx.Node | None:
    """``scatter`` of one number."""
    shape = list(args["index"].meta["spec"].shape)
    source = emit.call(aten.expand.default, emit.tensor(args["value"], emit.spec.dtype), shape)
    return emit.finish(emit.call(aten.scatter.src, args["self"], args["dim"], args["index"], source))


def lerp(emit: Emitter, args: Args) -> fx.Node | None:
    """``lerp`` with a host weight."""
    values = [emit.tensor(args[name], emit.wide) for name in ("self", "end", "weight")]
    return emit.finish(emit.call(aten.lerp.Tensor, *values))


def addcmul(emit: Emitter, args: Args) -> fx.Node | None:
    """``self + (value * tensor1) * tensor2``, the order and the fused multiply-add of CUDA's kernel."""
    a, b, c, value = (emit.tensor(args[name], emit.wide) for name in ("self", "tensor1", "tensor2", "value"))
    return emit.finish(emit.call(aten.addcmul.default, a, emit.call(aten.mul.Tensor, b, value), c))


def addcdiv(emit: Emitter, args: Args) -> fx.Node | None:
    """``self + value * (tensor1 / tensor2)``, the order of CUDA's kernel; the CPU's multiplies first."""
    a, b, c, value = (emit.tensor(args[name], emit.wide) for name in ("self", "tensor1", "tensor2", "value"))
    if not emit.cuda:
        scaled = emit.call(aten.mul.Tensor, b, value)
        return emit.finish(emit.call(aten.add.Tensor, a, emit.call(aten.div.Tensor, scaled, c)))
    return emit.finish(emit.call(aten.addcmul.default, a, emit.call(aten.div.Tensor, b, c), value))


def matmul(op: Any, left: str, right: str) -> Rule:
    """``beta * self + alpha * op(left, right)``; with ``beta`` 0, ``self`` is not looked at, NaN or not.

    Half types: the product and the sum are float32, rounded at the end, as cuBLAS does.
    """

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        return _accumulate(emit, args, _product(emit, op, args[left], args[right]))

    return rule


def outer(emit: Emitter, args: Args) -> fx.Node | None:
    """``addr``: ``beta * self + alpha * outer(vec1, vec2)``."""
    column = emit.call(aten.unsqueeze.default, emit.cast(args["vec1"], emit.wide), 1)
    return _accumulate(emit, args, emit.call(aten.mul.Tensor, column, emit.cast(args["vec2"], emit.wide)))


def _product(emit: Emitter, op: Any, left: fx.Node, right: fx.Node) -> fx.Node:
    packet = op.overloadpacket
    if emit.wide != emit.spec.dtype and emit.cuda and "dtype" in packet.overloads():
        return emit.call(packet.dtype, left, right, emit.wide)
    return emit.call(op, emit.cast(left, emit.wide), emit.cast(right, emit.wide))


def _accumulate(emit: Emitter, args: Args, product: fx.Node) -> fx.Node | None:
    alpha, beta = emit.operand(args["alpha"], emit.wide), emit.operand(args["beta"], emit.wide)
    scaled = product if not isinstance(alpha, fx.Node) and alpha == 1 else emit.call(aten.mul.Tensor, product, alpha)
    if not isinstance(beta, fx.Node) and beta == 0:
        return emit.finish(scaled)
    added = emit.cast(args["self"], emit.wide)
    if isinstance(beta, fx.Node) or beta != 1:
        added = emit.call(aten.mul.Tensor, added, beta)
    if isinstance(beta, fx.Node):
        zero = emit.tensor(0, emit.wide)
        added = emit.call(aten.where.self, emit.call(aten.eq.Tensor, beta, zero), zero, added)
    return emit.finish(emit.call(aten.add.Tensor, added, scaled))


def leaky_relu(emit: Emitter, args: Args) -> fx.Node | None:
    """``self`` where positive, else ``negative_slope * self``."""
    x = emit.cast(args["self"], emit.wide)
    below = emit.call(aten.mul.Tensor, x, emit.operand(args["negative_slope"], emit.wide))
    return emit.finish(emit.call(aten.where.self, emit.call(aten.gt.Scalar, x, 0), x, below))


def threshold(emit: Emitter, args: Args) -> fx.Node | None:
    """``value`` where ``self <= threshold``, else ``self``."""
    x, dtype = args["self"], emit.spec.dtype if emit.cuda else emit.wide
    below = emit.call(aten.le.Tensor, emit.cast(x, dtype), emit.tensor(args["threshold"], dtype))
    return emit.finish(emit.call(aten.where.self, below, emit.tensor(args["value"], emit.spec.dtype), x))


def softplus(emit: Emitter, args: Args) -> fx.Node | None:
    """``log1p(exp(beta * self)) / beta``, and ``self`` where ``beta * self > threshold``."""
    x, beta = emit.cast(args["self"], emit.wide), emit.tensor(args["beta"], emit.wide)
    scaled = emit.call(aten.mul.Tensor, x, beta)
    soft = emit.call(aten.div.Tensor, emit.call(aten.log1p.default, emit.call(aten.exp.default, scaled)), beta)
    above = emit.call(aten.gt.Tensor, scaled, emit.tensor(args["threshold"], emit.wide))
    return emit.finish(emit.call(aten.where.self, above, x, soft))


def elu(emit: Emitter, args: Args) -> fx.Node | None:
    """``scale * self`` where positive, else ``scale * alpha * expm1(input_scale * self)``."""
    x = emit.cast(args["self"], emit.wide)
    alpha, scale, inner = (emit.tensor(args[name], emit.wide) for name in ("alpha", "scale", "input_scale"))
    grown = emit.call(aten.expm1.default, emit.call(aten.mul.Tensor, x, inner))
    below = emit.call(aten.mul.Tensor, grown, emit.call(aten.mul.Tensor, alpha, scale))
    above = emit.call(aten.mul.Tensor, x, scale)
    return emit.finish(emit.call(aten.where.self, emit.call(aten.gt.Scalar, x, 0), above, below))


# ---- the table -------------------------------------------------------------------------------------------------

RULES: dict[Any, Rule] = {
    # arithmetic
    aten.add.Tensor: add("self", "other", +1),
    aten.add.Scalar: add("self", "other", +1),
    aten.sub.Tensor: add("self", "other", -1),
    aten.sub.Scalar: add("self", "other", -1),
    aten.rsub.Tensor: add("other", "self", -1),
    aten.rsub.Scalar: add("other", "self", -1),
    aten.mul.Tensor: wide(aten.mul.Tensor, "self", "other"),
    aten.mul.Scalar: wide(aten.mul.Tensor, "self", "other"),
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.floor_divide.default: floor_divide,
    aten.floor_divide.Scalar: floor_divide,
    aten.remainder.Tensor: common(aten.remainder.Tensor, "self", "other"),
    aten.remainder.Scalar: common(aten.remainder.Tensor, "self", "other"),
    aten.remainder.Scalar_Tensor: common(aten.remainder.Tensor, "self", "other"),
    aten.fmod.Tensor: common(aten.fmod.Tensor, "self", "other"),
    aten.fmod.Scalar: common(aten.fmod.Tensor, "self", "other"),
    aten.pow.Tensor_Scalar: power,
    aten.pow.Scalar: common(aten.pow.Tensor_Tensor, "self", "exponent"),
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lerp,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.xlogy.Scalar_Other: common(aten.xlogy.Tensor, "self", "other"),
    aten.xlogy.Scalar_Self: common(aten.xlogy.Tensor, "self", "other"),
    aten.special_xlog1py.other_scalar: common(aten.special_xlog1py.default, "self", "other"),
    aten.special_xlog1py.self_scalar: common(aten.special_xlog1py.default, "self", "other"),
    aten.copysign.Scalar: common(aten.copysign.Tensor, "self", "other"),
    # matrices
    aten.addmm.default: matmul(aten.mm.default, "mat1", "mat2"),
    aten.baddbmm.default: matmul(aten.bmm.default, "batch1", "batch2"),
    aten.addmv.default: matmul(aten.mv.default, "mat", "vec"),
    aten.addr.default: outer,
    # comparison and choice
    **{
        getattr(aten, name).Scalar: compare(getattr(aten, name).Tensor) for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        getattr(aten, name).Tensor: compare(getattr(aten, name).Tensor) for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: clamp,
    aten.clamp_max.Tensor: clamp,
    aten.hardtanh.default: clamp,
    aten.where.self: where,
    aten.where.Scalar: where,
    aten.where.ScalarSelf: where,
    aten.where.ScalarOther: where,
    # filling
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.scatter.value: scatter_value,
    aten.fill.Scalar: fill("value"),
    aten.fill.Tensor: fill("value"),
    aten.full.default: fill("fill_value"),
    aten.full_like.default: fill("fill_value"),
    aten.new_full.default: fill("fill_value"),
    aten.scalar_tensor.default: fill("s"),
    # bits
    **{
        overload: common(packet.Tensor, "self", "other")
        for packet in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)
        for overload in (packet.Tensor, packet.Scalar, packet.Scalar_Tensor)
    },
    **{
        overload: common(packet.Tensor, "self", "other")
        for packet in (aten.bitwise_left_shift, aten.bitwise_right_shift)
        for overload in (packet.Tensor, packet.Tensor_Scalar, packet.Scalar_Tensor)
    },
    aten.__lshift__.Scalar: common(aten.__lshift__.Tensor, "self", "other"),
    aten.__rshift__.Scalar: common(aten.__rshift__.Tensor, "self", "other"),
    # activations
    aten.leaky_relu.default: leaky_relu,
    aten.threshold.default: threshold,
    aten.softplus.default: softplus,
    aten.elu.default: elu,
}
