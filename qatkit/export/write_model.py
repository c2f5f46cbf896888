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
            onnx.checker.check_model(str(temporary), full_check=True)
        except Exception as error:
            raise ValueError(f"{path.name}: {refusal(error)}") from error
