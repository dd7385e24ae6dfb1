"""Aliases and placeholders of saved tensors: the history is there, the memory is shared or absent."""

from __future__ import annotations

import gc
import weakref

import torch

from pygraph.autograd.placeholders import alias_with_history, placeholder


def test_an_alias_has_memory_and_history_but_not_the_tensor() -> None:
    leaf = torch.ones(3, requires_grad=True)
    tensor = leaf * 2
    alias = alias_with_history(tensor)
    assert alias.data_ptr() == tensor.data_ptr()
    reference = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert reference() is None
    alias.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full((3,), 2.0))


def test_a_leaf_is_its_own_alias_and_a_constant_has_another() -> None:
    leaf, constant = torch.ones(3, requires_grad=True), torch.ones(3)
    assert alias_with_history(leaf) is leaf
    alias = alias_with_history(constant)
    assert alias is not constant
    assert alias.data_ptr() == constant.data_ptr()


def test_a_placeholder_has_memory_for_one_element() -> None:
    tensor = placeholder(torch.Size((3, 4)), torch.float64, torch.device("cpu"))
    assert (tensor.shape, tensor.dtype, tensor.untyped_storage().nbytes()) == ((3, 4), torch.float64, 8)
