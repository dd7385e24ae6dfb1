"""The figures of the paper: arXiv 2503.19779, "PyGraph: Robust Compiler Support for CUDA Graphs in PyTorch".

They were measured on an H100 NVL with PyTorch 2.4, whose CUDA graphs did without graph partition and without moving
scalars to the GPU. Only figures that its text states are here.
"""

from __future__ import annotations

SOURCE = "arXiv 2503.19779"

SETTING = "H100 NVL, PyTorch 2.4"

MEAN_OVER_DEFAULT = 1.56
"""Geometric mean of the speed-ups over PyTorch without CUDA graphs."""

MODE_OVER_DEFAULT = 1.27
"""The same of PyTorch's own CUDA graphs."""

MEAN_OVER_MODE = 1.29
"""Over PyTorch's CUDA graphs, on average."""

MOST_OVER_MODE = ("XLNetLMHeadModel", False, 3.36)
"""The row with the largest speed-up over PyTorch's CUDA graphs: title, whether it is training, speed-up."""

ROWS_SLOWED_BY_MODE = 4
"""Rows of 25 that PyTorch's CUDA graphs made slower."""

SLOWED_BY_MODE = {("pyhpc_equation_of_state", False): -0.29, ("nvidia_deeprecommender", False): -0.15}
"""Change of speed by PyTorch's CUDA graphs."""

DEVICIFY_OVER_MODE = {
    ("XLNetLMHeadModel", False): 3.14,
    ("torch_multimodal_clip", False): 2.31,
    ("speech_transformer", False): 2.0,
    ("DALLE2_pytorch", False): 1.43,
    ("XLNetLMHeadModel", True): 1.16,
    ("vision_maskrcnn", False): 1.11,
}
"""Speed-ups over PyTorch's CUDA graphs by the code transformation (CGCT) alone, by title and whether it is training."""

COVERAGE = {
    ("speech_transformer", False): (0.05, 0.74),
    ("vision_maskrcnn", False): (0.59, 0.71),
    ("XLNetLMHeadModel", False): (0.0, 0.99),
    ("torch_multimodal_clip", False): (0.0, 0.99),
}
"""Shares of kernels in graphs: of PyTorch, and of the paper."""

BYTES_COPIED = {
    ("MT5ForConditionalGeneration", True): (1e9, 312.0),
    ("DistilGPT2", True): (953e6, 136.0),
}
"""Bytes copied per replay: by PyTorch, and by the paper."""

INDIRECTION = {("pyhpc_turbulent_kinetic_energy", False): 1.23, ("nvidia_deeprecommender", False): 1.18}
"""Speed-ups by parameter indirection."""

COMPILE_RATIO = 2.21
"""Compile time relative to PyTorch's, on average."""

DIFFERENCES = (
    "The paper measured on an H100 NVL with PyTorch 2.4; GPU and versions of this table are above.",
    "PyTorch's own CUDA graphs have become better since: they split around operations of the CPU (graph partition), "
    "and move some scalars to the GPU. The paper's coverage of 0 % and 5 % is not to be expected of them any more.",
    "The paper replaced launches below torch.compile. That is `backend` here; `jit` records what eager launches, "
    "`jit fused` compiles as well, and in training both hold the whole step with its optimizer.",
    "Weights are random here, and some models are written anew: the notes of each row say where it differs.",
)
"""What keeps the two from being compared number by number."""
