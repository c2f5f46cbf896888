"""Writing an ONNX file that is known to load."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort

from qatkit_verify.files import whole
from qatkit_verify.session import add_libraries, refusal


def write_model(model: ir.Model, path: Path) -> None:
    """Serialises, loads and checks a temporary file, then renames it: whole or not at all.

    Raises:
        ValueError: the checker or ONNX Runtime refuses it.
    """
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # inferred shapes of the opset-18 graph; readers infer their own
    with whole(path) as temporary:
        temporary.write_bytes(proto.SerializeToString(deterministic=True))
        try:
            options = ort.SessionOptions()
            options.log_severity_level = 3
            add_libraries(options)
            # Before the checker, which says less: of a node in a branch it names the If alone.
            ort.InferenceSession(str(temporary), options, providers=["CPUExecutionProvider"])
            _check(proto, temporary)
        except Exception as error:
            raise ValueError(f"{path.name}: {refusal(error)}") from error


def _check(proto: onnx.ModelProto, path: Path) -> None:
    """Asks onnx's checker, which wants shapes of tensors that are outputs, and ONNX Runtime does not."""
    kept = [one for one in proto.graph.output if not _lacks_shape(one.type)]
    if len(kept) == len(proto.graph.output):
        onnx.checker.check_model(str(path), full_check=True)
        return
    known = onnx.ModelProto()
    known.CopyFrom(proto)
    del known.graph.output[:]
    known.graph.output.extend(kept)
    onnx.checker.check_model(known, full_check=True)


def _lacks_shape(kind: onnx.TypeProto) -> bool:
    return kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
