"""Real models with random weights, small enough for a test, and what is asked of each in every way of running it.

Nothing is downloaded: models are made from configurations. Each example names the package that it needs.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph

Inputs = Callable[[torch.Generator], dict[str, Any]]
VOCABULARY, CLASSES = 101, 5


@dataclasses.dataclass(frozen=True)
class Example:
    """A model and how it is used.

    Attributes:
        make: Makes it on the host, from torch's current seed.
        inputs: Keyword arguments of a call, on the host; every call has the same shapes.
        loss: Of what a call in training returns.
        package: What must be installed for it.
        tie: Ties its weights again after a move to another device.
        why_not: Part of the reason why its inference is not all in graphs, on CUDA; None where it must be.
        why_not_trained: The same of training.
        training_inputs: Of a call in training, where that takes others.
        rate: The learning rate; small where a model of random weights would not learn but go astray.
        trained_in: The dtype of training; float64 where in float32 what is rounded otherwise, as in fused kernels, is
            on the other side of a decision now and then (a ReLU at zero, a box at a threshold).
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    loss: Callable[[Any], Tensor]
    package: str | None = None
    tie: Callable[[Any], object] = lambda model: None
    why_not: str | None = None
    why_not_trained: str | None = None
    training_inputs: Inputs | None = None
    rate: float = 0.05
    trained_in: torch.dtype = torch.float32

    def model(self, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model on a device; every time with the same weights."""
        if self.package is not None:
            pytest.importorskip(self.package)
        torch.manual_seed(0)
        model = self.make().to(device, dtype)
        self.tie(model)
        return model

    def call(self, device: torch.device, seed: int, dtype: torch.dtype = torch.float32, train: bool = False) -> Any:
        """The arguments of a call on a device."""
        inputs = self.training_inputs if train and self.training_inputs is not None else self.inputs
        made = inputs(torch.Generator().manual_seed(seed))

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

        return pytree.tree_map_only(Tensor, place, made)


def numbers(generator: torch.Generator, *shape: int, below: int = VOCABULARY) -> Tensor:
    return torch.randint(0, below, shape, generator=generator)


def pixels(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator)


def logits_loss(out: Any) -> Tensor:
    """A loss of any classifier: against labels that follow from the shape."""
    logits = out if isinstance(out, Tensor) else out.logits
    labels = torch.arange(logits[..., 0].numel(), device=logits.device) % logits.shape[-1]
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise.reshape(-1, logits.shape[-1]), labels)


# ---- transformers --------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=32, num_labels=CLASSES)  # fmt: skip
    return BertForSequenceClassification(config)


def padded_tokens(generator: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, 9:] = mask[2, 5:] = 0
    return {"input_ids": numbers(generator, 3, 12), "attention_mask": mask}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False,
                      decoder_start_token_id=0)  # fmt: skip
    return T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
                         bos_token_id=1, eos_token_id=2)  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
                           bos_token_id=1, eos_token_id=2)  # fmt: skip
    return MixtralForCausalLM(config)


def qwen_of_experts() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
                            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                            num_experts=4, num_experts_per_tok=2, use_cache=False)  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def tie_weights(model: Any) -> None:
    model.tie_weights()


# ---- written down here ---------------------------------------------------------------------------------------------


class DecoderLayer(nn.Module):
    """Grouped attention with rotary positions over a static cache, and a gated feed-forward part."""

    def __init__(self, width: int, heads: int, groups: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        shape = (batch, groups, length, self.size)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        batch, count, _ = x.shape
        hidden = self.norms[0](x)
        query = self.query(hidden).view(batch, count, self.heads, self.size).transpose(1, 2)
        key_value = self.key_value(hidden).view(batch, count, 2, self.groups, self.size)
        key, value = key_value.permute(2, 0, 3, 1, 4)
        query, key = rotated(query, angles), rotated(key, angles)
        # In training, what is attended to is this call's own.
        keys: Any = key if self.training else self.keys.index_copy_(2, positions, key)  # pyright: ignore
        values: Any = value if self.training else self.values.index_copy_(2, positions, value)  # pyright: ignore
        repeats = self.heads // self.groups
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Decoder(nn.Module):
    """A language model in the manner of Llama, with a static cache of keys and values in its buffers."""

    def __init__(self, batch: int = 2, length: int = 24, width: int = 32) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([DecoderLayer(width, 4, 2, batch, length) for _ in range(2)])
        self.norm = nn.RMSNorm(width)
        self.register_buffer("rates", 10000.0 ** -torch.linspace(0, 1, width // 8))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of the next token after each; positions are those of the tokens in the text."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        seen = positions if self.training else torch.arange(self.length, device=tokens.device)
        mask = seen <= positions[:, None]
        angles: Tensor = positions[:, None] * self.rates  # pyright: ignore
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, angles, mask)
        return F.linear(self.norm(x), self.embedding.weight)


class Recurrent(nn.Module):
    """`nn.LSTM`, which is cuDNN's on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


# ---- images and graphs ---------------------------------------------------------------------------------------------


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return make


def mask_rcnn() -> nn.Module:
    from torchvision.models.detection import maskrcnn_resnet50_fpn
    from torchvision.ops import FrozenBatchNorm2d

    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64,
                                  rpn_pre_nms_top_n_train=50, rpn_pre_nms_top_n_test=50, rpn_post_nms_top_n_train=20,
                                  rpn_post_nms_top_n_test=20, box_detections_per_img=5)  # fmt: skip
    # Of batches as small as these, norms tell nothing but noise. They are frozen, as where detectors are tuned; the
    # last of each block makes it small, or values would double from block to block.
    for part in list(model.backbone.modules()):
        for name, norm in list(part.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                frozen = FrozenBatchNorm2d(norm.num_features)
                frozen.weight.fill_(0.1 if name == "bn3" else 1.0)
                setattr(part, name, frozen)
    return model


def annotated(generator: torch.Generator) -> dict[str, Any]:
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 60.0, 50.0]])
    masks = torch.zeros(2, 64, 64)
    masks[0, 4:40, 4:40] = masks[1, 20:50, 10:60] = 1
    target = {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks}
    return {"images": [pixels(generator, 3, 64, 64) for _ in range(2)],
            "targets": [{k: v.clone() for k, v in target.items()} for _ in range(2)]}  # fmt: skip


def gcn(**options: Any) -> nn.Module:
    from torch_geometric.nn import GCNConv

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(8, 16, **options), GCNConv(16, CLASSES, **options)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.second(F.dropout(torch.relu(self.first(x, edges)), 0.5, self.training), edges)

    return GCN()


def ring(generator: torch.Generator) -> dict[str, Any]:
    nodes = torch.arange(20)
    edges = torch.stack([torch.cat([nodes, (nodes + 3) % 20]), torch.cat([(nodes + 1) % 20, nodes])])
    return {"x": pixels(generator, 20, 8), "edges": edges}


EXAMPLES: dict[str, Example] = {
    "bert": Example(bert, padded_tokens, logits_loss, "transformers"),
    "gpt2": Example(gpt2, lambda g: {"input_ids": numbers(g, 2, 10)}, logits_loss, "transformers", tie_weights),
    "t5": Example(
        t5, lambda g: {"input_ids": numbers(g, 2, 9), "decoder_input_ids": numbers(g, 2, 6)}, logits_loss,
        "transformers", tie_weights,
    ),
    "llama": Example(llama, lambda g: {"input_ids": numbers(g, 2, 10)}, logits_loss, "transformers"),
    "decoder": Example(Decoder, lambda g: {"tokens": numbers(g, 2, 10)}, logits_loss),
    "resnet": Example(timm_model("resnet18"), lambda g: {"x": pixels(g, 4, 3, 64, 64)}, logits_loss, "timm"),
    "vit": Example(
        timm_model("vit_tiny_patch16_224", img_size=64), lambda g: {"x": pixels(g, 4, 3, 64, 64)}, logits_loss, "timm"
    ),
    "efficientnet": Example(
        timm_model("efficientnet_b0"), lambda g: {"x": pixels(g, 4, 3, 64, 64)}, logits_loss, "timm",
        rate=1e-4,
    ),
    "mask r-cnn": Example(
        mask_rcnn, lambda g: {"images": [pixels(g, 3, 64, 64) for _ in range(2)]},
        lambda losses: torch.stack(list(losses.values())).sum(), "torchvision",
        why_not="depends on data", why_not_trained="data-dependent",
        training_inputs=annotated, rate=1e-4, trained_in=torch.float64,
    ),
    # Which edges lead from a node to itself is data, and they are taken out before loops are added to all.
    "gcn": Example(
        gcn, ring, logits_loss, "torch_geometric", why_not="depends on data", why_not_trained="depends on data"
    ),
    "gcn without loops": Example(lambda: gcn(add_self_loops=False), ring, logits_loss, "torch_geometric"),
    "lstm": Example(Recurrent, lambda g: {"x": pixels(g, 3, 7, 8)}, logits_loss),
}  # fmt: skip

# How many tokens an expert gets is asked by the host, but for bfloat16 on CUDA.
OF_EXPERTS: dict[str, Example] = {
    name: Example(
        make, lambda g: {"input_ids": numbers(g, 2, 10)}, logits_loss, "transformers",
        why_not="it reads its offsets on the host", why_not_trained="it reads its offsets on the host",
    )
    for name, make in (("mixtral", mixtral), ("qwen3 moe", qwen_of_experts))
}  # fmt: skip


# ---- ways of running a model ----------------------------------------------------------------------------------------

# Dynamo and Inductor warn of much, in words that differ between versions.
WAYS = ("jit", pytest.param("compile", marks=pytest.mark.filterwarnings("ignore")))

# Fused kernels keep intermediate values in float32 and add in another order, so that results of many layers differ
# from eager's by more than those of one operation, for which the defaults of torch.testing are made. So do on a GPU, by
# a few last bits, models with atomic additions (scatter, ROI alignment), which do not repeat either, and those in which
# torch or transformers choose other operations while they are traced (cuDNN's batch norm, masks for attention).
WITHIN = {
    torch.float64: {"rtol": 1e-7, "atol": 1e-7},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 5e-2},
}


# What atomic additions change grows from step to step of training. Some runs of eager say how much that is, roughly.
EAGER_RUNS = 3
SPREAD = 8.0


def run_by(how: str, fn: Any) -> Any:
    """A function or module as it runs in one of the ways."""
    if how == "jit":
        return pygraph.jit(fn)
    torch._dynamo.reset()
    return torch.compile(fn, backend=pygraph.backend)


def kept(result: Any) -> list[Any]:
    """Copies of a result's tensors, and its other leaves."""
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in pytree.tree_leaves(result)]


def compare(
    how: str, got: Sequence[Any], expected: Sequence[Any], again: Sequence[Sequence[Any]], dtype: torch.dtype
) -> None:
    """On the emulated device, a replay is exact where eager is: where all runs of it are equal bit for bit."""
    assert len(got) == len(expected)
    for mine, other, *repeated in zip(got, expected, *again, strict=True):
        if not isinstance(other, Tensor):
            assert mine == other
        elif how == "compile" or other.is_cuda:
            within = dict(WITHIN[dtype])
            if other.is_floating_point() and other.numel():
                # What is added up of large terms is rounded as they are, however small it is itself.
                within["atol"] *= max(1.0, other.abs().nan_to_num(0.0).max().item())
                apart = [(other - one).abs().nan_to_num(0.0).max().item() for one in repeated]
                within["atol"] += SPREAD * max(apart)
            torch.testing.assert_close(mine, other, **within, equal_nan=True)
        elif all(torch.equal(other, one) for one in repeated):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(mine, other, equal_nan=True)


def check_inference(
    example: Example, how: str, device: torch.device, dtype: torch.dtype = torch.float32, part: str | None = None
) -> Any:
    """Several calls with other inputs; results that are held stay what they were; ``part`` as in `check_training`."""
    reference = example.model(device, dtype).eval()
    fast = copy.deepcopy(reference)
    if part is None:
        fast = run_by(how, fast)
    else:
        setattr(fast, part, run_by(how, getattr(fast, part)))
    held: list[tuple[Any, list[Any], list[Any]]] = []
    with torch.no_grad():
        for seed in range(4):
            inputs = example.call(device, seed, dtype)
            expected, again = kept(reference(**inputs)), [kept(reference(**inputs))]
            held.append((fast(**inputs), expected, again))
            compare(how, kept(held[-1][0]), expected, again, dtype)
        for result, expected, again in held:
            compare(how, kept(result), expected, again, dtype)
    return fast


def train(example: Example, device: torch.device, wrap: Callable[[Any], Any], whole: bool, steps: int) -> list[Any]:
    """Losses, and the gradients, parameters and buffers after so many steps, and what was made by ``wrap``."""
    model: Any = example.model(device, example.trained_in).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=example.rate, momentum=0.9)
    fast = model if whole else wrap(model)

    def step(**inputs: Any) -> Tensor:
        loss = example.loss(fast(**inputs))
        loss.backward()
        gradients.extend([] if whole else kept([parameter.grad for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def whole_step(**inputs: Any) -> Tensor:
        loss = example.loss(model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # at the end, so that every call finds the same gradients: none
        return loss.detach()

    run = wrap(whole_step) if whole else step
    gradients: list[Any] = []
    torch.manual_seed(1)
    losses = [run(**example.call(device, seed, example.trained_in, train=True)).clone() for seed in range(steps)]
    return [run if whole else fast, losses, gradients, kept(dict(model.state_dict()))]


def check_training(
    example: Example, how: str, device: torch.device, whole: bool = False, steps: int = 3, part: str | None = None
) -> Any:
    """Some training steps; with ``whole``, each is one function, and with ``part``, only that submodule is jitted."""

    def wrap(fn: Any) -> Any:
        if part is None:
            return run_by(how, fn)
        setattr(fn, part, run_by(how, getattr(fn, part)))
        return fn

    fast, *found = train(example, device, wrap, whole, steps)
    runs = [train(example, device, lambda fn: fn, whole, steps)[1:] for _ in range(EAGER_RUNS)]
    for got, expected, *again in zip(found, *runs, strict=True):
        compare(how, got, expected, again, example.trained_in)
    return fast


def assert_explained(fast: Any, why_not: str | None, trained: bool = False, allowed: tuple[str, ...] = ()) -> None:
    """All of it ran as graphs, or `explain()` says why not; ``allowed`` are reasons for copies of single tensors."""
    report = fast.explain().to_dict()
    reasons = [fallback["reason"] for fallback in report["fallbacks"]]
    if why_not is not None:
        told = [*reasons, *report["in_python"]]
        assert any(why_not in reason for reason in told), told
        return
    # Some kernels on CUDA take a tensor that they do not read, some nodes no other pointer; then the graph copies.
    copied = ("no pointer to it was found", "does not take another pointer to it", *allowed)
    told = [reason for reason in reasons if not any(why in reason for why in copied)]
    assert not told, told
    assert fast.cache_info().captures > 0
    ran = [entry for entry in report["entries"] if entry["kernels"]]
    assert all(entry["kernels_in_graphs"] == entry["kernels"] for entry in ran)
    if trained:
        names = [entry["function"] or "" for entry in ran]
        assert any(name.startswith("backward(") for name in names), names


# ---- generation -----------------------------------------------------------------------------------------------------


def generate(forward: Callable[[Tensor, Tensor], Tensor], prompt: Tensor, count: int, after: Any = None) -> Tensor:
    """Tokens by greedy decoding: one call for the prompt, and one for each token after the first.

    Args:
        forward: Logits of tokens at positions.
        prompt: Tokens to begin with, ``(batch, length)``.
        count: How many tokens to generate.
        after: Called after each token with its number.
    """
    length = prompt.shape[1]
    tokens = [forward(prompt, torch.arange(length, device=prompt.device))[:, -1:].argmax(-1)]
    for position in range(length, length + count - 1):
        tokens.append(forward(tokens[-1], torch.tensor([position], device=prompt.device))[:, -1:].argmax(-1))
        if after is not None:
            after(len(tokens))
    return torch.cat(tokens, 1)


def llama_with_cache(model: Any, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A model of transformers with a static cache, as a function of tokens and positions."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    takes_positions = "cache_position" in inspect.signature(type(model).forward).parameters

    def forward(tokens: Tensor, positions: Tensor) -> Tensor:
        more = {"cache_position": positions} if takes_positions else {}
        out = model(tokens, position_ids=positions[None], past_key_values=cache, use_cache=True, **more)
        return out.logits

    return forward


def check_generation(make: Callable[[], Callable[[Tensor, Tensor], Tensor]], how: str, device: torch.device) -> None:
    """The same tokens as in eager, the later ones of each text by replays of one graph."""
    prompts = [numbers(torch.Generator().manual_seed(seed), 2, 5).to(device) for seed in range(2)]
    for prompt in prompts:
        plain, prefill = make(), make()
        step = run_by(how, prefill)
        captures: list[int] = []

        def note(number: int, step: Any = step, captures: list[int] = captures) -> None:
            if how == "jit":
                captures.append(step.cache_info().captures)

        def forward(tokens: Tensor, positions: Tensor, prefill: Any = prefill, step: Any = step) -> Tensor:
            return (step if tokens.shape[1] == 1 else prefill)(tokens, positions)

        with torch.no_grad():
            got, expected = generate(forward, prompt, 12, note), generate(plain, prompt, 12)
        assert got.tolist() == expected.tolist()
        assert len(set(expected.flatten().tolist())) > 1
        if how == "jit":
            assert captures[0] > 0
            assert captures == captures[:1] * len(captures)
            assert_explained(step, None)
