"""The loss of YOLOX, and the assignment of boxes to cells.

Source: Ge et al., "YOLOX: Exceeding YOLO Series in 2021", 2021, section 2.1 (SimOTA), and Megvii's code, version 0.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou

from qatkit.models.detectors.detector import boxes_of

_RADIUS = 1.5  # strides around the centre of a box within which cells may be assigned to it
_OVERLAPS = 10  # number of largest overlaps of a box; their sum is the number of its cells
_OUTSIDE = 1e6  # cost of a cell that is not near a box's centre
_IOU_COST, _BOX_WEIGHT = 3.0, 5.0


class YoloxLoss:
    """The loss of classes, objectness and boxes, divided by the number of assigned cells.

    It is the cross entropy of classes and objectness plus 5 · (1 - IoU²) of boxes.

    Args:
        cells: the top left corners of the cells in pixels, [boxes, 2].
        strides: the strides of the cells in pixels, [boxes, 1].
    """

    def __init__(self, cells: Tensor, strides: Tensor) -> None:
        self._centers, self._strides = cells + 0.5 * strides, strides

    def __call__(self, logits: Tensor, objectness: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of a batch.

        Args:
            logits: the logits of the classes, [N, boxes, classes].
            objectness: the logits of the objectness, [N, boxes, 1].
            boxes: the corners (x1, y1, x2, y2) of the predicted boxes in pixels, [N, boxes, 4].
            targets: the labelled boxes, [N, n, 6] (`qatkit.data.box_targets`).
        """
        found = torch.zeros_like(objectness)
        classes, overlaps, count = logits.new_zeros(()), logits.new_zeros(()), 0
        for place, (truth, labels) in enumerate(boxes_of(targets)):
            if not len(truth):
                continue
            chosen, owner = self._assigned(logits[place], objectness[place], boxes[place], truth, labels)
            count += len(chosen)
            found[place, chosen] = 1
            near = _paired_iou(boxes[place, chosen], truth[owner])
            wanted = F.one_hot(labels[owner], logits.shape[2]) * near.detach()[:, None]
            classes = classes + F.binary_cross_entropy_with_logits(
                logits[place, chosen], wanted, reduction="sum"
            )
            overlaps = overlaps + (1 - near**2).sum()
        objects = F.binary_cross_entropy_with_logits(objectness, found, reduction="sum")
        return (_BOX_WEIGHT * overlaps + objects + classes) / max(count, 1)

    @torch.no_grad()
    def _assigned(
        self, logits: Tensor, objectness: Tensor, boxes: Tensor, truth: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the indices of the assigned cells of one picture, and for each cell the index of its labelled box."""
        middles = (truth[:, :2] + truth[:, 2:]) / 2
        near = ((self._centers - middles[:, None]).abs() < _RADIUS * self._strides).all(2)  # [truth, boxes]
        cells = near.any(0).nonzero()[:, 0]
        if not len(cells):
            return cells, cells
        overlaps = box_iou(truth, boxes[cells])
        scores = (logits[cells].sigmoid() * objectness[cells].sigmoid()).sqrt()
        wanted = F.one_hot(labels, logits.shape[1]).to(scores)
        cost = F.binary_cross_entropy(
            scores.expand(len(truth), -1, -1), wanted[:, None].expand(-1, len(cells), -1), reduction="none"
        ).sum(2)
        cost = cost - _IOU_COST * (overlaps + 1e-8).log() + _OUTSIDE * ~near[:, cells]
        pairs = torch.zeros_like(cost, dtype=torch.bool)
        counts = overlaps.topk(min(_OVERLAPS, len(cells)), 1).values.sum(1).int().clamp(min=1)
        for one, number in enumerate(counts.tolist()):
            pairs[one, cost[one].topk(number, largest=False).indices] = True
        several = pairs.sum(0) > 1
        best = cost.argmin(0)
        pairs[:, several] = False
        pairs[best[several], several.nonzero()[:, 0]] = True
        chosen = pairs.any(0)
        return cells[chosen], pairs[:, chosen].int().argmax(0)


def _paired_iou(first: Tensor, second: Tensor) -> Tensor:
    """Returns the intersection over union of pairs of boxes, [n]."""
    low, high = torch.maximum(first[:, :2], second[:, :2]), torch.minimum(first[:, 2:], second[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    areas = [(one[:, 2:] - one[:, :2]).prod(1) for one in (first, second)]
    return both / (areas[0] + areas[1] - both).clamp(min=1e-12)
