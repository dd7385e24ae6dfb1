"""Vision without constructs of the host: AlexNet and DenseNet of torchvision, LCNet of timm, and DCGAN.

DCGAN after Radford, Metz and Chintala, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks" (2016), with the sizes of TorchBench.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.table.workload import Batch, Task, Workload
from benchmarks.table.workloads.draws import Draws


def _images(size: int, side: int, name: str) -> Callable[..., Batch]:
    def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
        return {name: Draws(seed, device, dtype).normal(size, 3, side, side)}

    return batch


def settled(model: nn.Module, side: int) -> nn.Module:
    """The model itself, whose batch norms have seen a few images: else random weights let activations vanish."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(8, 3, side, side))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model


def alexnet(small: bool) -> Task:
    """Two images of 224 × 224."""
    from torchvision.models import alexnet as model

    return Task(model(num_classes=10 if small else 1000), _images(2, 64 if small else 224, "x"))


def lcnet(small: bool) -> Task:
    """LCNet of half the width, with 256 images of 224 × 224."""
    import timm

    side = 32 if small else 224
    return Task(settled(timm.create_model("lcnet_050"), side), _images(2 if small else 256, side, "x"))


def densenet(small: bool) -> Task:
    """DenseNet of 121 layers, with 64 images of 224 × 224."""
    from torchvision.models import DenseNet, densenet121

    model, side = (DenseNet(8, (2, 2), 16, num_classes=10), 32) if small else (densenet121(), 224)
    return Task(settled(model, side), _images(2 if small else 64, side, "x"))


class Discriminator(nn.Module):
    """Convolutions that halve an image until one number is left: how likely it is real."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for factor in (1, 2, 4):
            layers += [
                nn.Conv2d(factor * width, 2 * factor * width, 4, 2, 1, bias=False),
                nn.BatchNorm2d(2 * factor * width),
                nn.LeakyReLU(0.2, inplace=True),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid())
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, 0.02)
            elif isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.weight, 1.0, 0.02)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def realness_loss(output: Tensor, batch: Batch) -> Tensor:
    """The binary cross-entropy of images that are all real, in the words of autocast, which refuses torch's own."""
    return -output.float().log().clamp(min=-100).mean()


def dcgan(small: bool) -> Task:
    """The discriminator, with 32 images of 64 × 64."""
    return Task(Discriminator(4 if small else 64), _images(4 if small else 32, 64, "images"), realness_loss)


ALEXNET = Workload(
    name="alexnet-i", title="alexnet", training=False, batch_size=2, source="torchvision.models.alexnet",
    hard="No construct of the host: some twenty kernels, so short that launches are most of the time.",
    differs="", make=alexnet, packages=("torchvision",),
)  # fmt: skip

DCGAN = Workload(
    name="dcgan-t", title="dcgan", training=True, batch_size=32, source="written here",
    hard="No construct of the host: a short step, in-place activations, and running statistics that every step "
    "changes.",
    differs="One step of the discriminator on real images, which is the model that TorchBench gives to torch's "
    "runner; the loss is the cross-entropy of TorchBench's own step, where the runner takes the mean of the output.",
    make=dcgan,
)  # fmt: skip

LCNET = Workload(
    name="lcnet-i", title="lcnet_050", training=False, batch_size=256, source="timm.create_model('lcnet_050')",
    hard="No construct of the host: a small network of short kernels, for an input of 77 MB in bfloat16 that would be "
    "copied.",
    differs="Random weights, with batch norms that have seen random images.", make=lcnet, packages=("timm",),
)  # fmt: skip

DENSENET = Workload(
    name="densenet121-i", title="densenet121", training=False, batch_size=64, source="torchvision.models.densenet121",
    hard="No construct of the host: hundreds of kernels, many of which put together what all layers before have made.",
    differs="Random weights, with batch norms that have seen random images.", make=densenet, packages=("torchvision",),
)  # fmt: skip
