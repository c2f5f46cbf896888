"""Writes an ONNX file after checking that it loads."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort

from qatkit_verify.files import whole
from qatkit_verify.session import add_libraries, refusal


def write_model(model: ir.Model, path: Path) -> None:
    """Writes a model atomically: to a temporary file, which is checked and then renamed.

    Raises:
        ValueError: the checker or ONNX Runtime refuses the file.
    """
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # shapes of the opset-18 graph, which readers infer again
    with whole(path) as temporary:
        temporary.write_bytes(proto.SerializeToString(deterministic=True))
        checked = _without_outputs_that_lack_shapes(proto)
        del proto  # a copy of all weights; the next steps make further copies
        try:
            options = ort.SessionOptions()
            options.log_severity_level = 3
            options.add_session_config_entry("session.disable_prepacking", "1")  # another copy, for speed
            add_libraries(options)
            # The checker runs last, since its messages are less exact: for a node in a branch, it names only the If.
            ort.InferenceSession(str(temporary), options, providers=["CPUExecutionProvider"])
            onnx.checker.check_model(str(temporary) if checked is None else checked, full_check=True)
        except Exception as error:
            raise ValueError(f"{path.name}: {refusal(error)}") from error


def _without_outputs_that_lack_shapes(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Removes outputs without a shape, which onnx's checker refuses although ONNX Runtime accepts them.

    Returns:
        The changed model; None if all outputs have shapes.
    """
    kept = [one for one in proto.graph.output if not _lacks_shape(one.type)]
    if len(kept) == len(proto.graph.output):
        return None
    del proto.graph.output[:]
    proto.graph.output.extend(kept)
    return proto


def _lacks_shape(kind: onnx.TypeProto) -> bool:
    return kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
