"""Translates the operator `qatkit::suppress` to operators of opset 18 that also exist in opset 13.

Boxes belong to groups, such as the levels of a feature pyramid, and suppress only boxes of their group.
NonMaxSuppression reads boxes [N, n, 4] and scores [N, groups, n]: the scores [N, n], masked for each group. It returns
the indices of the boxes to keep. GatherND reads their scores, and ScatterND writes these scores into a tensor filled
with `DROPPED`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript

from qatkit.graph.suppress import DROPPED

op: Any = onnxscript.opset18


def suppress(boxes, scores, valid, groups, overlap: float, most: int):  # type: ignore[no-untyped-def]
    """Translates `qatkit::suppress`: each group becomes a class, in which only the valid boxes of the group take part.

    Returns the scores [N, n]; those of boxes that are suppressed or not valid become `DROPPED`.
    """
    group_of_box = np.repeat(np.arange(len(groups)), groups)
    members = group_of_box[None] == np.arange(len(groups))[:, None]
    dropped = op.CastLike(_constant(DROPPED, np.float32), scores)
    taken = op.Unsqueeze(valid, [1])
    if len(groups) > 1:
        taken = op.And(taken, _constant(members, np.bool_))
    by_group = op.Where(taken, op.Unsqueeze(scores, [1]), dropped)
    kept = op.NonMaxSuppression(
        boxes,
        by_group,
        _constant([most], np.int64),
        _constant([overlap], np.float32),
        _constant([DROPPED / 2], np.float32),
    )
    image_and_box = op.Gather(kept, _constant([0, 2], np.int64), axis=1)
    nothing = op.Expand(dropped, op.Shape(scores))
    return op.ScatterND(nothing, image_and_box, op.GatherND(scores, image_and_box))


def _constant(value: Any, dtype: Any) -> Any:
    return op.Constant(value=ir.tensor(np.array(value, dtype)))
