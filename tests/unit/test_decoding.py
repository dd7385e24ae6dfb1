"""Decoding with transformers' Llama and a static cache, up to the last position that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

transformers = pytest.importorskip("transformers")

LENGTH = 32
VOCABULARY = 64


@pytest.fixture(scope="module")
def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * LENGTH,
    )  # fmt: skip


class Decoder:
    """A model and a cache; a step is one more token."""

    def __init__(self, config: Any, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = transformers.LlamaForCausalLM(config).eval()
        self.model.to(device)
        self.device = device
        self.cache = transformers.StaticCache(config=config, max_cache_len=LENGTH)

    def step(self, token: torch.Tensor) -> torch.Tensor:
        return self.model(token, past_key_values=self.cache, use_cache=True).logits

    def decode(self, step: Any, prompt: int, steps: int) -> list[torch.Tensor]:
        """The logits of each step, and the cache at the end."""
        tokens = (torch.arange(prompt, device=self.device) * 7 % VOCABULARY)[None]
        found: list[torch.Tensor] = []
        with torch.no_grad():
            logits = self.step(tokens)
            for _ in range(steps):
                logits = step(logits[:, -1:].argmax(-1))
                found.append(logits)
        return [*found, *(layer.keys.clone() for layer in self.cache.layers)]


WRAPS = {"jit": pygraph.jit, "torch.compile": lambda fn: torch.compile(fn, backend=pygraph.backend)}


@pytest.mark.pairwise(strength=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prompt", [LENGTH - 5, LENGTH - 2, LENGTH - 1])
@pytest.mark.parametrize("wrap", WRAPS)
def test_up_to_the_last_position(device: torch.device, config: Any, wrap: str, prompt: int) -> None:
    torch._dynamo.reset()
    eager, mine = Decoder(config, device), Decoder(config, device)
    expected = eager.decode(eager.step, prompt, LENGTH - prompt)
    step = WRAPS[wrap](mine.step)
    for _ in range(2):
        torch.testing.assert_close(mine.decode(step, prompt, LENGTH - prompt), expected)
        mine.cache.reset()
    if wrap == "jit":
        report = step.explain().to_dict()
        assert report["kernels_in_graphs"] == report["kernels"] > 0
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", WRAPS)
def test_past_the_last_position(config: Any, wrap: str) -> None:
    from pygraph.runtime.emulated import driver as emulated

    torch._dynamo.reset()
    decoder = Decoder(config, emulated.driver().device)
    step = WRAPS[wrap](decoder.step)
    with pytest.raises(IndexError, match="out of bounds"):
        decoder.decode(decoder.step, LENGTH - 2, 3)
    decoder.cache.reset()
    with pytest.raises(IndexError, match="out of bounds"):
        decoder.decode(step, LENGTH - 2, 3)
    torch._dynamo.reset()
