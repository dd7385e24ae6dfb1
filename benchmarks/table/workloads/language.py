"""Language models of transformers, as the HuggingFace part of torch's Dynamo benchmarks runs them.

Configurations are the default ones. Inference gets labels too and computes its loss, as there. Key-value caches are
off, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """The loss that a model has computed from the labels of its batch."""
    return output.loss.float()


def _tokens(vocabulary: int, size: int, length: int, *names: str) -> Callable[..., Batch]:
    """Batches of token numbers and labels; of tokens alone under several names."""

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device)
        tokens = draws.integers(0, vocabulary, size, length)
        return {**dict.fromkeys(names, tokens), "labels": draws.integers(0, vocabulary, size, length)}

    return batch


def _questions(vocabulary: int, size: int, length: int) -> Callable[..., Batch]:
    """Batches of token numbers, with the positions where answers start and end."""

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        draws = Draws(seed, device)
        return {
            "input_ids": draws.integers(0, vocabulary, size, length),
            "start_positions": draws.integers(0, length, size),
            "end_positions": draws.integers(0, length, size),
        }

    return batch


def _task(model: nn.Module, batch: Callable[..., Batch], training: bool) -> Task:
    return Task(model, batch, own_loss if training else None)


def xlnet(small: bool, size: int, training: bool) -> Task:
    """XLNet, whose positions are encoded on the host."""
    from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel

    class PositionsOfTheHost(XLNetModel):
        """The body of XLNet with the positions of transformers 4: made on the CPU and copied, at every call."""

        def relative_positional_encoding(
            self, qlen: int, klen: int, bsz: int | None = None, device: torch.device | None = None
        ) -> torch.Tensor:
            return super().relative_positional_encoding(qlen, klen, bsz=bsz).to(device)

    config = XLNetConfig(vocab_size=101, d_model=32, n_layer=2, n_head=4, d_inner=64) if small else XLNetConfig()
    model = XLNetLMHeadModel(config)
    model.transformer.__class__ = PositionsOfTheHost
    size, length = (2, 12) if small else (size, 512)
    return _task(model, _tokens(config.vocab_size, size, length, "input_ids"), training)


def mt5(small: bool, size: int, training: bool) -> Task:
    """MT5-small, which reads a text and predicts another one."""
    from transformers import MT5Config, MT5ForConditionalGeneration

    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4} if small else {}
    config = MT5Config(**sizes, use_cache=False)
    size, length = (2, 12) if small else (size, 128)
    batch = _tokens(config.vocab_size, size, length, "input_ids", "decoder_input_ids")
    model = MT5ForConditionalGeneration(config)
    # transformers 5 ties the output to the embedding, whatever the configuration says; version 4 did not.
    model.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
    model.config.tie_word_embeddings = False
    return _task(model, batch, training)


def mobilebert(small: bool) -> Task:
    """MobileBERT for questions."""
    from transformers import MobileBertConfig, MobileBertForQuestionAnswering

    config = MobileBertConfig()
    if small:
        config = MobileBertConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
            embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16,
        )  # fmt: skip
    size, length = (2, 12) if small else (128, 128)
    batch = _questions(config.vocab_size, size, length)
    return _task(MobileBertForQuestionAnswering(config), batch, training=False)


def debertav2(small: bool) -> Task:
    """DeBERTa-v2 of the sizes of xlarge for questions."""
    from transformers import DebertaV2Config, DebertaV2ForQuestionAnswering

    config = DebertaV2Config()
    if small:
        config = DebertaV2Config(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    size, length = (1, 12) if small else (1, 512)
    return _task(DebertaV2ForQuestionAnswering(config), _questions(config.vocab_size, size, length), training=False)


def deberta(small: bool) -> Task:
    """DeBERTa-base for masked words."""
    from transformers import DebertaConfig, DebertaForMaskedLM
    from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

    class MaskedInTheirOwnDtype(DisentangledSelfAttention):
        """Attention that hides scores by the least number of their dtype, as version 4 did.

        Version 5 takes that of the queries, which are in float32 under autocast: bfloat16 does not hold it.
        """

        def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, *_: Any, **__: Any) -> Any:
            query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
            query = query + self.transpose_for_scores(self.q_bias[None, None])
            value = value + self.transpose_for_scores(self.v_bias[None, None])
            root = torch.sqrt(torch.tensor(query.size(-1), dtype=torch.float))  # on the CPU
            scores = torch.matmul(query / root.to(dtype=query.dtype), key.transpose(-1, -2))
            scores = scores.masked_fill(~attention_mask.bool(), torch.finfo(scores.dtype).min)
            context = torch.matmul(self.dropout(scores.softmax(-1)), value)
            return context.transpose(1, 2).flatten(2), None

    config = DebertaConfig()
    if small:
        config = DebertaConfig(
            vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    size, length = (2, 12) if small else (8, 512)
    model = DebertaForMaskedLM(config)
    for module in model.modules():
        if type(module) is DisentangledSelfAttention:
            module.__class__ = MaskedInTheirOwnDtype
    return _task(model, _tokens(config.vocab_size, size, length, "input_ids"), training=True)


def blenderbot(small: bool) -> Task:
    """The decoder of Blenderbot-small."""
    from transformers import BlenderbotSmallConfig, BlenderbotSmallForCausalLM

    sizes = {}
    if small:
        sizes = {
            "vocab_size": 101, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
        }  # fmt: skip
    config = BlenderbotSmallConfig(**sizes, use_cache=False)
    size, length = (2, 12) if small else (64, 128)
    batch = _tokens(config.vocab_size, size, length, "input_ids")
    return _task(BlenderbotSmallForCausalLM(config), batch, training=True)


def distilgpt2(small: bool) -> Task:
    """DistilGPT2: GPT-2 with six layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 6}
    if small:
        sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, use_cache=False)
    size, length = (2, 12) if small else (16, 512)
    return _task(GPT2LMHeadModel(config), _tokens(config.vocab_size, size, length, "input_ids"), training=True)


_TRANSFORMERS = ("transformers",)
_SCALE = (
    "Every layer divides by a square root that is a 0-d CPU tensor (`scaled_size_sqrt`): a host number in each of the "
    "layers, which PyTorch 2.4 left out of its graphs."
)

LANGUAGE = [
    Workload(
        name="xlnet-i", title="XLNetLMHeadModel", training=False, batch_size=1, source="transformers.XLNetLMHeadModel",
        hard="The relative positions are encoded on the CPU and copied to the GPU in every call: one CPU tensor that "
        "kept all 413 kernels of the paper's graph out.",
        differs="transformers 5 makes the positions on the GPU; here they are made on the CPU and copied, as in "
        "version 4.",
        make=lambda small: xlnet(small, 1, training=False), packages=_TRANSFORMERS,
    ),
    Workload(
        name="xlnet-t", title="XLNetLMHeadModel", training=True, batch_size=8, source="transformers.XLNetLMHeadModel",
        hard="The relative positions are encoded on the CPU and copied to the GPU in every step.",
        differs="transformers 5 makes the positions on the GPU; here they are made on the CPU and copied, as in "
        "version 4.",
        make=lambda small: xlnet(small, 8, training=True), packages=_TRANSFORMERS,
    ),
    Workload(
        name="mt5-i", title="MT5ForConditionalGeneration", training=False, batch_size=16,
        source="transformers.MT5ForConditionalGeneration",
        hard="No construct of the host, but hundreds of short kernels and a gigabyte of logits (16 × 128 × 250112 in "
        "bfloat16) that a graph owns.",
        differs="The output layer is another one than transformers 5 makes, which ties it to the embedding, unlike "
        "version 4.",
        make=lambda small: mt5(small, 16, training=False), packages=_TRANSFORMERS,
    ),
    Workload(
        name="mt5-t", title="MT5ForConditionalGeneration", training=True, batch_size=16,
        source="transformers.MT5ForConditionalGeneration",
        hard="What passes from one graph to the next is copied: a gigabyte per replay in the paper, the size of the "
        "logits (16 × 128 × 250112 in bfloat16).",
        differs="The output layer is another one than transformers 5 makes, which ties it to the embedding, unlike "
        "version 4.",
        make=lambda small: mt5(small, 16, training=True), packages=_TRANSFORMERS,
    ),
    Workload(
        name="mobilebert-i", title="MobileBertForQuestionAnswering", training=False, batch_size=128,
        source="transformers.MobileBertForQuestionAnswering",
        hard="No construct of the host, but 24 layers of narrow bottlenecks: thousands of short kernels.",
        differs="", make=mobilebert, packages=_TRANSFORMERS,
    ),
    Workload(
        name="debertav2-i", title="DebertaV2ForQuestionAnswering", training=False, batch_size=1,
        source="transformers.DebertaV2ForQuestionAnswering", hard=_SCALE,
        differs="The square root is a 0-d CPU tensor in transformers 5 as it was in version 4, but the code around it "
        "is another one. No relative attention, as in the default configuration that the original runs.",
        make=debertav2, packages=_TRANSFORMERS,
    ),
    Workload(
        name="deberta-t", title="DebertaForMaskedLM", training=True, batch_size=8,
        source="transformers.DebertaForMaskedLM", hard=_SCALE,
        differs="Dropout is torch's own, where transformers 4 had one of DeBERTa's. Masked scores are the least number "
        "of their dtype, as in version 4: version 5 raises under autocast. No relative attention, as in the default "
        "configuration that the original runs.",
        make=deberta, packages=_TRANSFORMERS,
    ),
    Workload(
        name="blenderbot-small-t", title="BlenderbotSmallForCausalLM", training=True, batch_size=64,
        source="transformers.BlenderbotSmallForCausalLM",
        hard="What passes from one graph to the next is copied; the largest is 824 MB of logits (64 × 128 × 50265 in "
        "bfloat16).",
        differs="", make=blenderbot, packages=_TRANSFORMERS,
    ),
    Workload(
        name="distilgpt2-t", title="DistilGPT2", training=True, batch_size=16, source="transformers.GPT2LMHeadModel",
        hard="What passes from one graph to the next is copied: 953 MB per replay in the paper, most of it logits (16 "
        "× 512 × 50257 in bfloat16).",
        differs="", make=distilgpt2, packages=_TRANSFORMERS,
    ),
]  # fmt: skip
