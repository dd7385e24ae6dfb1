"""The 25 workloads of the paper's table, in its order.

Models keep their dropout in training, as in the benchmarks they are from, where it is drawn from the generator of the
device. Ways of running a model that draw other numbers have other results: compare them after `without_dropout`.
"""

from __future__ import annotations

from torch import nn

from benchmarks.table.workload import Workload
from benchmarks.table.workloads.bert import BERT
from benchmarks.table.workloads.clip import CLIP
from benchmarks.table.workloads.dalle import DALLE2
from benchmarks.table.workloads.detection import MASKRCNN
from benchmarks.table.workloads.efficientdet import EFFICIENTDET
from benchmarks.table.workloads.language import LANGUAGE
from benchmarks.table.workloads.ocean_state import EQUATION_OF_STATE
from benchmarks.table.workloads.recommendation import DLRM, RECOMMENDERS
from benchmarks.table.workloads.speech import SPEECH2TEXT2, SPEECH_TRANSFORMER
from benchmarks.table.workloads.turbulence import TURBULENT_KINETIC_ENERGY
from benchmarks.table.workloads.vision import ALEXNET, DCGAN, DENSENET, LCNET

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *LANGUAGE, SPEECH2TEXT2, BERT, CLIP, SPEECH_TRANSFORMER, DALLE2, EQUATION_OF_STATE, TURBULENT_KINETIC_ENERGY,
        MASKRCNN, *RECOMMENDERS, ALEXNET, DCGAN, LCNET, DENSENET, DLRM, EFFICIENTDET,
    )
}  # fmt: skip
"""The rows of the table by their names."""

RANDOM = frozenset({"dalle2-i"})
"""The workloads whose results depend on random numbers even without dropout: they draw noise."""


def without_dropout(model: nn.Module) -> nn.Module:
    """The model itself, after all of its dropout is set to zero, that of dropped paths too.

    Example:
        >>> without_dropout(nn.Sequential(nn.Dropout(0.1)))
        Sequential(
          (0): Dropout(p=0.0, inplace=False)
        )
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
