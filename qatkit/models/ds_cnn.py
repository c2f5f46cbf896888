"""DS-CNN for keyword spotting: depthwise-separable convolutions over the features of a recording.

Source: Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017, https://arxiv.org/abs/1711.07128. The
defaults are its small variant (DS-CNN-S): 64 channels, a first convolution of 10 x 4, four separable blocks.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class SeparableBlock(nn.Sequential):
    """A depthwise and a pointwise convolution, each with its BatchNorm and ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )


class DSCNN(nn.Module):
    """A DS-CNN from features [N, 1, frames, bands] to logits [N, num_classes].

    Args:
        num_classes: number of logits.
        channels: number of channels of each convolution.
        blocks: number of separable blocks.
        dropout: share of the pooled channels dropped in training.
    """

    def __init__(
        self, num_classes: int = 10, channels: int = 64, blocks: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, (10, 4), stride=2, padding=(5, 1), bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.blocks = nn.Sequential(*(SeparableBlock(channels) for _ in range(blocks)))
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.blocks(self.stem(x)).mean((2, 3))
        return cast(Tensor, self.classify(self.dropout(pooled)))


def ds_cnn(num_classes: int = 10, channels: int = 64, blocks: int = 4, dropout: float = 0.0) -> DSCNN:
    """Returns a DS-CNN, by default the small one, with random weights."""
    return DSCNN(num_classes, channels, blocks, dropout)
