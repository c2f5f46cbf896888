"""Adds non-maximum suppression to a detector's file after its boxes and scores, in standard operators of opset 13.

    boxes [N, boxes, 4], scores [N, boxes, classes] ── NonMaxSuppression ──> detections [found, 7]

A row of `detections` has the index of its picture in the batch, x1, y1, x2, y2, score and class. Rows are sorted by
picture, class and descending score; their number depends on the pictures. Boxes and scores remain outputs of the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qatkit.export.for_ort_tools import add_constant
from qatkit.export.write_model import write_model
from qatkit.records.detections import DETECTIONS, METADATA_KEY, Suppression
from qatkit_verify.errors import ConfigError


def add_nms(source: Path, target: Path, how: Suppression) -> None:
    """Writes `source` with non-maximum suppression to `target`, atomically.

    Args:
        source: a file whose outputs are corners [N, boxes, 4] and scores [N, boxes, classes].
        target: the path of the new file.
        how: the minimum score and the maximum overlap of the boxes that are kept, and their maximum number per picture
            and class.

    Raises:
        ConfigError: the file does not have exactly two outputs, or one of them does not have 3 axes.
        ValueError: the checker or ONNX Runtime refuses the new file.
    """
    model = ir.load(source)
    graph = model.graph
    if len(graph.outputs) != 2 or any(len(one.shape or ()) != 3 for one in graph.outputs):
        told = ", ".join(map(_described, graph.outputs))
        wanted = "boxes [N, boxes, 4] and scores [N, boxes, classes]"
        allowed = f"false, because the outputs are not {wanted} but {told}"
        raise ConfigError("export.nms", True, allowed)
    boxes, scores = graph.outputs
    numbers: dict[str, Any] = {
        "most": np.array([how.boxes], np.int64),
        "overlap": np.array([how.overlap], np.float32),
        "score": np.array([how.score], np.float32),
        "picture": np.array([0], np.int64),
        "class": np.array([1], np.int64),
        "picture_and_box": np.array([0, 2], np.int64),
        "last": np.array([1], np.int64),
    }
    at = {name: add_constant(graph, f"nms.{name}", value) for name, value in numbers.items()}

    def node(kind: str, inputs: list[ir.Value], name: str, **attributes: Any) -> ir.Value:
        made = ir.Value(name=f"nms_{name}")
        graph.append(ir.node(kind, inputs, attributes, outputs=[made], name=f"nms/{name}"))
        return made

    by_class = node("Transpose", [scores], "scores_by_class", perm=(0, 2, 1))
    chosen = node("NonMaxSuppression", [boxes, by_class, at["most"], at["overlap"], at["score"]], "chosen")
    where = node("Gather", [chosen, at["picture_and_box"]], "where", axis=1)
    columns = [
        node("Cast", [node("Gather", [chosen, at["picture"]], "picture", axis=1)], "picture_float", to=1),
        node("GatherND", [boxes, where], "corners"),
        node("Unsqueeze", [node("GatherND", [by_class, chosen], "score"), at["last"]], "score_column"),
        node("Cast", [node("Gather", [chosen, at["class"]], "class", axis=1)], "class_float", to=1),
    ]
    result = node("Concat", columns, DETECTIONS, axis=1)
    result.name = DETECTIONS
    result.shape, result.type = ir.Shape(["found", 7]), ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.insert(0, result)
    model.metadata_props[METADATA_KEY] = json.dumps(asdict(how))
    write_model(model, target)


def _described(output: ir.Value) -> str:
    sizes = (str(size) if isinstance(size, int) else size.value or "?" for size in output.shape or ())
    return f"{output.name} [{', '.join(sizes)}]"
