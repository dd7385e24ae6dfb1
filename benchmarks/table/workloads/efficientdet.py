"""EfficientDet-D1 in training: a backbone of timm, a pyramid that goes both ways, two heads, and their losses.

After Tan, Pang and Le, "EfficientDet: Scalable and Efficient Object Detection" (CVPR 2020), with the sizes of
tf_efficientdet_d1, which TorchBench trains.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import HOST, Draws

LEVELS, ANCHORS, CLASSES = (3, 4, 5, 6, 7), 9, 90


class Norm(nn.BatchNorm2d):
    """A batch norm with the numbers of TensorFlow."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-3, momentum=0.01)


class Separable(nn.Sequential):
    """A convolution of each channel, and one of all channels at each point."""

    def __init__(self, before: int, after: int) -> None:
        each = nn.Conv2d(before, before, 3, padding=1, groups=before, bias=False)
        super().__init__(each, nn.Conv2d(before, after, 1))


class Resample(nn.Module):
    """A map of another level: with as many channels as the pyramid, and doubled or halved."""

    def __init__(self, before: int, after: int, change: int) -> None:
        super().__init__()
        self.channels = nn.Identity() if before == after else nn.Sequential(nn.Conv2d(before, after, 1), Norm(after))
        smaller, larger = nn.MaxPool2d(3, 2, ceil_mode=True), nn.Upsample(scale_factor=2, mode="nearest")
        self.size = {-1: larger, 0: nn.Identity(), 1: smaller}[change]

    def forward(self, x: Tensor) -> Tensor:
        return self.size(self.channels(x))


class Fusion(nn.Module):
    """A node of the pyramid: a sum with learned weights, which are positive and add up to one, and a convolution."""

    def __init__(self, width: int, resamples: list[Resample]) -> None:
        super().__init__()
        self.resamples, self.weights = nn.ModuleList(resamples), nn.Parameter(torch.ones(len(resamples)))
        self.convolution, self.norm = Separable(width, width), Norm(width)

    def forward(self, *maps: Tensor) -> Tensor:
        weights = F.relu(self.weights)
        total = weights.sum() + 1e-4
        read = [resample(x) for resample, x in zip(self.resamples, maps, strict=True)]
        fused = torch.stack([x * weight / total for x, weight in zip(read, weights, strict=True)], -1).sum(-1)
        return self.norm(self.convolution(F.silu(fused)))


class Cell(nn.Module):
    """A way down the pyramid and a way up again."""

    def __init__(self, width: int, given: list[int]) -> None:
        super().__init__()
        last = len(given) - 1
        self.down = nn.ModuleList(
            Fusion(
                width,
                [Resample(given[level], width, 0), Resample(given[last] if level + 1 == last else width, width, -1)],
            )
            for level in reversed(range(last))
        )
        self.up = nn.ModuleList(
            Fusion(width, [Resample(given[level], width, 0)]
                   + ([Resample(width, width, 0)] if level < last else []) + [Resample(width, width, 1)])
            for level in range(1, last + 1)
        )  # fmt: skip

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        last = len(maps) - 1
        middle = {last: maps[last]}
        for level, node in zip(reversed(range(last)), self.down, strict=True):
            middle[level] = node(maps[level], middle[level + 1])
        out = [middle[0]]
        for level, node in zip(range(1, last + 1), self.up, strict=True):
            own = (middle[level],) if level < last else ()
            out.append(node(maps[level], *own, out[-1]))
        return out


class Head(nn.Module):
    """Convolutions that all levels share, with norms of their own."""

    def __init__(self, width: int, repeats: int, outputs: int, bias: float) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Separable(width, width) for _ in range(repeats))
        self.norms = nn.ModuleList(nn.ModuleList(Norm(width) for _ in LEVELS) for _ in range(repeats))
        self.out = Separable(width, outputs)
        nn.init.constant_(self.out[1].bias, bias)  # pyright: ignore

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        outputs = []
        for level, x in enumerate(maps):
            for convolution, norms in zip(self.convolutions, self.norms, strict=True):
                x = F.silu(norms[level](convolution(x)))  # type: ignore[index]
            outputs.append(self.out(x))
        return outputs


class EfficientDet(nn.Module):
    """The detector, which returns its loss for images with labelled anchors."""

    def __init__(self, backbone: nn.Module, channels: list[int], width: int, cells: int, repeats: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.coarser = nn.ModuleList([Resample(channels[-1], width, 1), Resample(width, width, 1)])
        given = [*channels, width, width]
        self.cells = nn.ModuleList(Cell(width, [width] * len(LEVELS) if cell else given) for cell in range(cells))
        self.classes = Head(width, repeats, ANCHORS * CLASSES, bias=-math.log(99))
        self.boxes = Head(width, repeats, ANCHORS * 4, bias=0.0)

    def forward(
        self, images: Tensor, classes: list[Tensor], boxes: list[Tensor], positives: Tensor
    ) -> dict[str, Tensor]:
        maps = list(self.backbone(images))
        for coarser in self.coarser:
            maps.append(coarser(maps[-1]))
        for cell in self.cells:
            maps = cell(maps)
        found, placed, count = self.classes(maps), self.boxes(maps), positives.sum() + 1
        class_losses, box_losses = [], []
        for level in range(len(LEVELS)):
            class_losses.append(class_loss(found[level].permute(0, 2, 3, 1), classes[level], count))
            box_losses.append(box_loss(placed[level].permute(0, 2, 3, 1), boxes[level], count))
        class_sum, box_sum = torch.stack(class_losses).sum(), torch.stack(box_losses).sum()
        return {"loss": class_sum + 50.0 * box_sum, "class_loss": class_sum, "box_loss": box_sum}


def class_loss(logits: Tensor, classes: Tensor, count: Tensor) -> Tensor:
    """The focal loss of Lin and others (2017); class -1 is of anchors on no object, -2 of those left out."""
    known = classes >= 0
    wanted = F.one_hot(classes * known, CLASSES) * known.unsqueeze(-1)
    logits = logits.reshape(wanted.shape).float()
    wanted, likely = wanted.to(logits.dtype), logits.sigmoid()
    error = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    right = wanted * likely + (1 - wanted) * (1 - likely)
    weight = wanted * 0.25 + (1 - wanted) * 0.75
    loss = weight * (1 - right) ** 1.5 * error / count
    return (loss * (classes != -2).unsqueeze(-1)).sum()


def box_loss(boxes: Tensor, wanted: Tensor, count: Tensor) -> Tensor:
    """The Huber loss of the boxes of anchors that are on an object."""
    error = (boxes.float() - wanted).abs()
    near = error.clamp(max=0.1)
    return ((0.5 * near.square() + 0.1 * (error - near)) * (wanted != 0.0)).sum() / (count * 4.0)


# ---- labels ----------------------------------------------------------------------------------------------------------


def anchors(side: int) -> list[Tensor]:
    """The anchors of each level, as top, left, bottom, right, of shape (height, width, 9, 4)."""
    levels = []
    for level in LEVELS:
        stride = 2**level
        centres = torch.arange(stride / 2, side, stride)
        rows, columns = torch.meshgrid(centres, centres, indexing="ij")
        sizes = [(4 * stride * 2 ** (octave / 3) * wide / 2, 4 * stride * 2 ** (octave / 3) * high / 2)
                 for octave in range(3) for wide, high in ((1.0, 1.0), (1.4, 0.7), (0.7, 1.4))]  # fmt: skip
        boxes = [torch.stack([rows - high, columns - wide, rows + high, columns + wide], -1) for wide, high in sizes]
        levels.append(torch.stack(boxes, 2))
    return levels


def _overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """The areas that each two boxes share, over those they cover."""
    low, high = torch.maximum(boxes[:, None, :2], others[:, :2]), torch.minimum(boxes[:, None, 2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(group[:, 2:] - group[:, :2]).prod(-1) for group in (boxes, others)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def _centres(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]


def labelled(side: int, boxes: Tensor, classes: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Classes and boxes of the anchors of an image, and how many are on an object; made on the host, by the loader."""
    levels = anchors(side)
    flat = torch.cat([level.flatten(0, 2) for level in levels])
    overlaps = _overlaps(boxes, flat)
    best, owner = overlaps.max(0)
    nearest = overlaps.argmax(1)
    owner[nearest] = torch.arange(len(boxes))
    positive = best >= 0.5
    positive[nearest] = True
    (centre, size), (own_centre, own_size) = _centres(flat), _centres(boxes[owner])
    codes = torch.cat([(own_centre - centre) / size, (own_size / size).log()], 1) * positive[:, None]
    kinds, counts = torch.where(positive, classes[owner], -1), [level[..., 0].numel() for level in levels]
    found = [part.view(1, *level.shape[:3]) for part, level in zip(kinds.split(counts), levels, strict=True)]
    placed = [part.view(1, *level.shape[:2], -1) for part, level in zip(codes.split(counts), levels, strict=True)]
    return found, placed, positive.sum().float()[None]


def efficientdet(small: bool) -> Task:
    """One image of 640 × 640 with seven objects."""
    import timm

    name, side, width, cells, repeats = ("tf_efficientnet_b1", 640, 88, 4, 3)
    if small:
        name, side, width, cells, repeats = ("mobilenetv3_small_050", 256, 8, 1, 1)
    backbone = timm.create_model(name, features_only=True, out_indices=(2, 3, 4), drop_path_rate=0.2)
    channels = backbone.feature_info.channels()

    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        host = Draws(seed, HOST)
        corners, sizes = host.uniform(0, 0.6 * side, 7, 2), host.uniform(0.05 * side, 0.4 * side, 7, 2)
        boxes = torch.cat([corners, corners + sizes], 1)
        classes, placed, positives = labelled(side, boxes, host.integers(0, CLASSES, 7))
        return {
            "images": Draws(seed, device).normal(1, 3, side, side),
            "classes": [level.to(device) for level in classes],
            "boxes": [level.to(device) for level in placed],
            "positives": positives.to(device),
        }

    model = EfficientDet(backbone, channels, width, cells, repeats)
    return Task(model, batch, lambda output, batch: output["loss"].float())


EFFICIENTDET = Workload(
    name="efficientdet-t", title="timm_efficientdet", training=True, batch_size=1,
    source="written here, with a backbone of timm",
    hard="No construct of the host, but some thousand short kernels for one image: depthwise convolutions, norms of "
    "every level, sums with learned weights; paths are dropped at random.",
    differs="Pyramid, heads, loss and labels are written here; the backbone is timm's with TensorFlow's padding, "
    "while the pyramid pads both sides alike. Random images and boxes, labelled by the loader as in the original.",
    make=efficientdet, packages=("timm",),
)  # fmt: skip
