"""Non-maximum suppression of a fixed size: returns all scores, with `DROPPED` for suppressed boxes.

torchvision's function returns as many indices as boxes are kept, which depends on values. Here all sizes are known
beforehand, so that a two-stage detector is one graph for any batch: a TopK afterwards selects a fixed number of boxes.
In ONNX it is NonMaxSuppression followed by a ScatterND (`qatkit.export.suppression`).
"""

from __future__ import annotations

import torch
from torch import Tensor

# The score of a dropped box, which is far below every logit and which float16 can represent. Half of it separates
# dropped boxes from others.
DROPPED = -20000.0


def suppress(
    boxes: Tensor, scores: Tensor, valid: Tensor, groups: list[int], overlap: float, most: int
) -> Tensor:
    """Returns `scores` with `DROPPED` for each box that is not valid or overlaps a better one of its group too much.

    Boxes after the best `most` of a group are dropped too. No gradient flows through the function.

    Args:
        boxes: the corners of the boxes, [N, boxes, 4].
        scores: the scores of the boxes, [N, boxes], in any unit, above `DROPPED` / 2.
        valid: whether each box takes part, [N, boxes] of booleans.
        groups: sizes of consecutive groups of boxes, such as the levels of a feature pyramid.
        overlap: maximum intersection over union with a better box.
        most: maximum number of boxes kept per group, best first; among equal scores, the first box is better.
    """
    found: Tensor = torch.ops.qatkit.suppress(boxes.detach(), scores.detach(), valid, groups, overlap, most)
    return found


@torch.library.custom_op("qatkit::suppress", mutates_args=())
def _suppress(
    boxes: Tensor, scores: Tensor, valid: Tensor, groups: list[int], overlap: float, most: int
) -> Tensor:
    from torchvision.ops import nms

    result = torch.full_like(scores, DROPPED)
    for corners, values, there, kept_values in zip(boxes, scores, valid, result, strict=True):
        start = 0
        for size in groups:
            candidates = start + there[start : start + size].nonzero()[:, 0]
            kept = candidates[nms(corners[candidates], values[candidates], overlap)[:most]]
            kept_values[kept] = values[kept]
            start += size
    return result


@_suppress.register_fake
def _(boxes: Tensor, scores: Tensor, valid: Tensor, groups: list[int], overlap: float, most: int) -> Tensor:
    return torch.empty_like(scores)
