"""The interface of a detector that `task=detection` trains, quantizes and exports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qatkit.tasks.average_precision import IGNORED


class Detector(nn.Module):
    """The base class of detectors, from images [N, C, H, W] to corners [N, boxes, 4] and scores [N, boxes, classes].

    Further outputs are the inputs of the loss.

    Attributes:
        inference_outputs: number of outputs in an exported file: corners and scores.
        unordered: whether rows of boxes have no fixed place in the image but are ordered by scores
            (`qatkit.tasks.unordered_boxes`).
    """

    inference_outputs = 2
    unordered = False

    @property
    @abstractmethod
    def criterion(self) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        """The loss, a function from (further outputs, labelled boxes [N, n, 6]) to a scalar.

        The boxes are in the format of `qatkit.data.box_targets`.
        """


def boxes_of(targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the corners [n, 4] and classes [n] of each picture, without ignored boxes."""
    found = []
    for rows in targets:
        kept = rows[(rows[:, 0] >= 0) & (rows[:, 5] < IGNORED)]
        found.append((kept[:, 1:5], kept[:, 0].long()))
    return found


def grid(height: int, width: int, stride: int) -> Tensor:
    """Returns the top left corners of cells, row by row, in pixels: float32 [height * width, 2], x and y."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([x, y], -1).reshape(-1, 2).float() * stride
