"""Table of the rules that rewrite an operation when one of its operands is a number from the host, by operation.

Eager torch computes ``x * 0.1`` for half and bfloat16 in float32 and rounds once; a 0-d tensor of x's dtype would
be rounded first. A rule therefore says in which dtype its operands meet (`families`):

``wide``
    float32 for half and bfloat16, otherwise the result's dtype; the result is rounded at the end.
``common``
    the dtype that type promotion gives; the number is rounded to it first, as eager does.

Where CUDA's kernel and the CPU's differ, the device decides, as the emulated device runs the CPU's: `Emitter.cuda`.

A rule is ``rule(emit, args) -> node``: ``args`` are the operation's arguments by name, in which a `HostNumber` stands
for each number from the host. It returns None where it does not apply; then the number stays by value.
"""

from __future__ import annotations

from typing import Any

from pygraph.transforms.rules.activations import elu, leaky_relu, softplus, threshold
from pygraph.transforms.rules.arithmetic import add, addcdiv, addcmul, divide, floor_divide, lerp
from pygraph.transforms.rules.choice import clamp, fill, index_fill, masked_fill, scatter_value, where
from pygraph.transforms.rules.emitter import Rule, aten
from pygraph.transforms.rules.families import common, compare, wide
from pygraph.transforms.rules.matrices import matmul, outer

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
