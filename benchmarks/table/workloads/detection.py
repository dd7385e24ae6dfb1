"""Mask R-CNN of torchvision, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws


class Detector(nn.Module):
    """A detector, under autocast where its images have low precision, as some of its operations need float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        dtype = images[0].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return self.model(images)
        with torch.autocast(images[0].device.type, dtype):
            return self.model(images)


def maskrcnn(small: bool) -> Task:
    """One photograph of 480 × 640, which the model enlarges to 800 × 1066."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    height, width, classes = (48, 64, 3) if small else (480, 640, 91)
    options = {}
    if small:
        options = {"min_size": 64, "max_size": 96, "rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 12,
                   "box_detections_per_img": 4}  # fmt: skip
    backbone = resnet_fpn_backbone(backbone_name="resnet18" if small else "resnet50", weights=None)

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        return {"images": [Draws(seed, device, dtype).uniform(0, 1, 3, height, width)]}

    return Task(Detector(MaskRCNN(backbone, classes, **options)), batch)


MASKRCNN = Workload(
    name="maskrcnn-i", title="vision_maskrcnn", training=False, batch_size=1,
    source="torchvision.models.detection.MaskRCNN with ResNet-50",
    hard="How many boxes are kept depends on their scores: the host waits for sizes between the parts, and reads "
    "numbers with `.item()`; 59 % of the kernels were captured.",
    differs="Weights are random, so boxes are too: as a rule the most that there may be, 100, where a trained model "
    "finds fewer. The image is random. Runs in bfloat16 under autocast, where torch's runner takes float16, because "
    "torchvision suppresses boxes in float32 only.",
    make=maskrcnn, packages=("torchvision",),
)  # fmt: skip
