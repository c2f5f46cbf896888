"""Checks whether sums of two uint8 x int8 products saturate in ONNX Runtime here, as on x86 without VNNI."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime as ort

# y = MatMulInteger(x [1, 2] uint8, w [2, 1] int8 = 127): an ONNX file of IR version 8 and opset 13 as bytes,
# since this package has no means to write one.
_PAIR = bytes.fromhex(
    "08083a590a180a01780a0177120179220d4d61744d756c496e74656765721204706169722a0d0802080110032a027f7f4201"
    "775a130a0178120e0a0c080212080a0208010a02080262130a0179120e0a0c080612080a0208010a02080142040a00100d"
)


@functools.cache
def saturates_here() -> bool:
    """Returns whether this processor clips a sum of two products that exceeds 16 bits."""
    session = ort.InferenceSession(_PAIR, providers=["CPUExecutionProvider"])
    return int(session.run(None, {"x": np.array([[255, 255]], np.uint8)})[0].item()) != 2 * 255 * 127
