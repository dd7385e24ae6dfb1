"""Training of small versions of all models in ``transformers`` by pygraph, compared with eager to the last bit.

    python benchmarks/small_models.py --jobs 2 --out small_models.json
    python benchmarks/small_models.py --device cuda --ways step model --models bert gpt2

Each model is made from its configuration with small sizes, with its head for language, images or sequences, and trained
for a few steps with AdamW, dropout on: the whole step by ``pygraph.jit`` (``step``), the model by ``pygraph.jit``
(``model``), by ``torch.compile(backend="pygraph")`` without fusion (``backend``; beside ``aot_eager``, as Dynamo and
AOTAutograd change results too), or as a graphed callable (``graphed``). Nothing is downloaded. Each runs in a process
of its own, with a limit of memory and time.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import functools
import inspect
import json
import random
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting import command_line

WAYS = ("step", "model", "backend", "graphed")
_SECONDS, _BYTES, _PARAMETERS, _STEPS = 240, 12 << 30, 30_000_000, 6

_SMALL: dict[int, str] = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers n_head n_heads "
    "num_heads num_attention_heads encoder_attention_heads decoder_attention_heads num_key_value_heads num_codebooks "
    "num_experts_per_tok expand mamba_expand linear_num_key_heads linear_num_value_heads",
    4: "num_experts num_local_experts n_routed_experts mamba_n_heads",
    8: "patch_size state_size qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "attention_window rotary_dim mamba_d_state",
    16: "head_dim d_kv q_lora_rank kv_lora_rank mamba_d_head",
    32: "hidden_size d_model n_embd dim embed_dim embedding_size image_size moe_intermediate_size codebook_size "
    "shared_expert_intermediate_size",
    64: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim n_inner ffn_hidden_size "
    "max_position_embeddings n_positions n_ctx",
    1: "n_group topk_group mamba_n_groups",
    99: "vocab_size",
}
_SIZES = {name: size for size, names in _SMALL.items() for name in names.split()}

_HEADS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "sequence",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "audio",
}


class UnfitError(Exception):
    """A model that this program cannot make small, or that eager cannot train."""


def small_config(kind: type) -> Any:
    """The configuration of a class with small sizes where it has these names."""
    base = kind()
    known = {*inspect.signature(kind).parameters, *vars(base)}
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    sizes = {name: size for name, size in sizes.items() if not isinstance(getattr(base, name, None), (list, tuple))}
    try:
        config: Any = kind(**sizes)
    except Exception:  # each class has checks of its own
        config = kind(**{name: size for name, size in sizes.items() if name not in ("head_dim", "num_key_value_heads")})
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if value is None and name in ("pad_token_id", "decoder_start_token_id"):
            setattr(config, name, 0)
        elif isinstance(value, int) and value >= _SIZES["vocab_size"]:
            setattr(config, name, 1)
    return config


def make(name: str) -> tuple[Any, str]:
    """A small model and what it takes.

    Raises:
        UnfitError: There is no head, or no small configuration.
    """
    import torch
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    heads = {of: getattr(modeling_auto, of, {}) for of in _HEADS}
    found = next((of for of, names in heads.items() if name in names), None)
    if found is None:
        raise UnfitError("it has no head for what is trained here")
    head = heads[found][name]
    try:
        kind: Any = getattr(transformers, head[0] if isinstance(head, (list, tuple)) else head)
        config = small_config(configuration_auto.CONFIG_MAPPING[name])
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in kind(config).parameters())
        if count > _PARAMETERS:
            raise UnfitError(f"it has {count} parameters")
        torch.manual_seed(0)
        return kind(config).train(), _HEADS[found]
    except UnfitError:
        raise
    except Exception as error:  # each class has checks and requirements of its own
        raise UnfitError(f"{type(error).__name__}: {error}"[:200]) from error


def batches(takes: str, config: Any, device: Any) -> list[dict[str, Any]]:
    """Batches of two, the same every time."""
    import torch

    generator = torch.Generator().manual_seed(1)
    found: list[dict[str, Any]] = []
    for _ in range(_STEPS):
        ids = torch.randint(3, 90, (2, 16), generator=generator)
        labels = torch.randint(0, 2, (2,), generator=generator)
        if takes == "text":
            batch = {"input_ids": ids, "labels": ids}
        elif takes == "sequence":
            batch = {"input_ids": ids, "labels": labels}
        elif takes == "audio":
            batch = {"input_values": torch.randn(2, 4000, generator=generator), "labels": labels}
        else:
            size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
            shape = 2, getattr(config, "num_channels", 3), size, size
            batch = {"pixel_values": torch.randn(shape, generator=generator), "labels": labels}
        found.append({key: value.to(device) for key, value in batch.items()})
    return found


def train(model: Any, way: str, data: list[dict[str, Any]]) -> tuple[list[float], str]:
    """The losses of steps, and what pygraph says of them."""
    import numpy as np
    import torch

    import pygraph

    keys = list(data[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            return self.model(**dict(zip(keys, values, strict=True))).loss

    def step(loss_of: Callable[..., Any], *values: Any) -> Any:
        loss = loss_of(*values)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    explain: Callable[[], Any] = str
    if way == "eager":
        run = functools.partial(step, Loss())
    elif way == "step":
        fast = pygraph.jit(functools.partial(step, Loss()))
        run, explain = fast, fast.explain
    elif way == "model":
        whole = pygraph.jit(model)  # with all that it returns, as caches
        explain = whole.explain
        run = functools.partial(step, lambda *values: whole(**dict(zip(keys, values, strict=True))).loss)
    elif way == "backend":
        run = functools.partial(step, torch.compile(Loss(), backend="pygraph", options={"fuse": False}))
    elif way == "aot_eager":
        run = functools.partial(step, torch.compile(Loss(), backend="aot_eager"))
    else:
        made = pygraph.make_graphed_callables(Loss(), tuple(data[0].values()), allow_unused_input=True)
        run = functools.partial(step, made)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    losses = [run(*batch.values()).item() for batch in data]
    text = " ".join(str(explain()).split())
    return losses, text[text.rfind("┘") + 1 :]


def measure(name: str, way: str, device_type: str) -> dict[str, Any]:
    """Losses of one model in eager and by one way, and whether they and the parameters are the same."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if device_type == "emu":
        from pygraph.runtime.emulated import driver

        driver.driver()
    device = torch.device(device_type, 0)
    try:
        model, takes = make(name)
        data = batches(takes, model.config, device)
        model = model.to(device)
        mine = copy.deepcopy(model)
        try:
            expected, _ = train(model, "aot_eager" if way == "backend" else "eager", data)
        except Exception as error:  # what a model does with sizes that it is not made for
            raise UnfitError(f"without pygraph, {type(error).__name__}: {error}"[:200]) from error
    except UnfitError as error:
        return {"status": "unfit", "why": str(error)}
    try:
        losses, notes = train(mine, way, data)
    except Exception as error:  # that is what is looked for
        return {"status": "raises", "why": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()}
    pairs = [*zip(losses, expected, strict=True)]
    apart = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    same = all(a == b or (a != a and b != b) for a, b in pairs)
    parameters = zip(mine.parameters(), model.parameters(), strict=True)
    same = same and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in parameters)
    status = "same" if same else "close" if apart < 1e-5 else "differs"
    return {"status": status, "apart": apart, "losses": losses, "expected": expected, "notes": notes}


def one(name: str, way: str, device_type: str) -> dict[str, Any]:
    """What a process of its own finds out about one model and way."""
    command = [sys.executable, __file__, "--measure", name, way, device_type]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (_BYTES, _BYTES))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False,
            preexec_fn=limit if device_type == "emu" else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"status": "too slow"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines and not done.returncode else {"status": "died", "why": done.stderr[-500:]}


def main() -> None:
    """Train models in processes of their own, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="names of configurations; all by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--device", choices=("emu", "cuda"), default="emu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "WAY", "DEVICE"), help="one, and print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = options.models or sorted(CONFIG_MAPPING_NAMES)
    found: dict[str, dict[str, Any]] = {}

    def run(name: str) -> None:
        for way in options.ways:
            result = one(name, way, options.device)
            found.setdefault(name, {})[way] = result
            print(f"{name:28} {way:8} {result['status']:8} {result.get('why', '')[:120]}", flush=True)
            if result["status"] == "unfit":
                return

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, names))
    counts = collections.Counter((way, one["status"]) for ways in found.values() for way, one in ways.items())
    for (way, status), count in sorted(counts.items()):
        print(f"{way:8} {status:8} {count}")
    if options.out:
        kept = {
            name: {way: [one["status"], *([one["why"]] if "why" in one else [])] for way, one in ways.items()}
            for name, ways in sorted(found.items())
        }
        options.out.write_text(json.dumps({"command": command_line(), "models": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
