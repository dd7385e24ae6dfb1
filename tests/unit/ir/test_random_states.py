"""Readings and settings of random states in a graph: those that change no draw are deleted."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pygraph.ir.random_states import drop_idle_states, random_state, set_random_state

CPU, META = torch.device("cpu"), torch.device("meta")


def graph_of(words: str) -> fx.Graph:
    """A graph: ``draw``, ``a=`` reads a state, ``<a`` sets it, ``<<a`` sets that of another device."""
    graph, states = fx.Graph(), dict[str, fx.Node]()
    for word in words.split():
        if word == "draw":
            graph.call_function(torch.ops.aten.rand.default, ([2],))
        elif word.endswith("="):
            states[word[0]] = graph.call_function(random_state(), (CPU, 8))
        else:
            device = META if word.startswith("<<") else CPU
            graph.call_function(set_random_state(), (states[word[-1]], device))
    graph.output(())
    return graph


def words_of(graph: fx.Graph) -> str:
    names: dict[fx.Node, str] = {}
    words: list[str] = []
    for node in graph.nodes:
        if node.target is random_state():
            names[node] = "abcdef"[len(names)]
            words.append(f"{names[node]}=")
        elif node.target is set_random_state():
            words.append(("<<" if node.args[1] == META else "<") + names[node.args[0]])
        elif node.op == "call_function":
            words.append("draw")
    return " ".join(words)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a=", ""),
        ("a= <a", ""),
        ("draw a= <a draw", "draw draw"),
        ("a= draw <a draw", "a= draw <a draw"),
        ("a= draw <a", "a= draw <a"),
        ("a= draw b= <a <b draw", "draw draw"),
        ("a= draw b= <a draw <b", "a= draw b= <a draw <b"),
        ("a= draw b= <a draw <b <b draw", "a= draw b= <a draw <b draw"),
        ("a= draw b= <a c= <b <c draw", "a= draw <a draw"),
        ("a= b= draw <b <a draw", "a= draw <a draw"),
        ("a= <<a draw", "a= <<a draw"),
        ("a= draw <<a <a draw", "a= draw <<a <a draw"),
    ],
)
def test_idle_states_are_dropped(before: str, after: str) -> None:
    graph = graph_of(before)
    drop_idle_states(graph)
    assert words_of(graph) == after
