"""ResNet-50 with a width factor.

References:
    He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, table 1; the
    stride sits on the 3 x 3 convolution, as everyone has it since.
"""

from __future__ import annotations

import torch
from torch import nn

BLOCKS = (3, 4, 6, 3)
EXPANSION = 4


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, and a shortcut around them."""

    def __init__(self, inputs: int, channels: int, stride: int):
        super().__init__()
        outputs = EXPANSION * channels
        self.residual = nn.Sequential(
            _convolution(inputs, channels, 1),
            nn.ReLU(inplace=True),
            _convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            _convolution(channels, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else _convolution(inputs, outputs, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, 4 channels, height / stride, width / stride)."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 for RGB images.

    Args:
        classes: number of logits; the tutorial has 1001, ImageNet's and a background class.
        width: factor on all numbers of channels; 1 / 16 fits 16 processes on a laptop.
    """

    def __init__(self, classes: int = 1001, width: float = 1.0):
        super().__init__()
        channels = max(1, round(64 * width))
        self.stem = nn.Sequential(
            _convolution(3, channels, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inputs, stages = channels, []
        for stage, blocks in enumerate(BLOCKS):
            outputs = channels * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(Bottleneck(inputs, outputs, stride))
                inputs = EXPANSION * outputs
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, classes)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, Bottleneck):
                # Every block starts as its shortcut, which helps large batches.
                nn.init.zeros_(module.residual[-1][-1].weight)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, classes) for images (batch, 3, height, width)."""
        features = self.stages(self.stem(images)).mean((2, 3))
        return self.classifier(features)
