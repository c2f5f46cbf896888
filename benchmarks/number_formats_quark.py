"""Quantizes a float file with AMD Quark's presets of number formats, in an interpreter that has Quark.

    PYTHON benchmarks/number_formats_quark.py FLOAT.onnx IMAGES.npz OUTPUTS.npz [--formats bfp16 mxfp4]

`number_formats.py --quark PYTHON` calls it. IMAGES.npz contains `calibration` and `test`, [N, C, H, W]. OUTPUTS.npz
receives the outputs of each format for `test`, computed by ONNX Runtime with Quark's operators, under these names:

    FORMAT         the unchanged preset
    FORMAT.same    only the inputs and weights of Conv, Gemm and MatMul with a weight, as in backend=simulated
    FORMAT.last    the same with blocks along the last axis, which is right for inputs of MatMul and wrong for weights
    FORMAT.sums    the same with blocks along the axis over which each product sums; no preset offers this, so the axes
                   of Quark's operators are changed in the written file

It needs amd-quark, onnx, onnxruntime, and a C++ compiler for Quark's operators.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

PRESETS = {
    "bfloat16": "BF16",
    "bfp16": "BFP16",
    "mxint8": "MXINT8",
    "mxfp8_e4m3": "MXFP8E4M3",
    "mxfp8_e5m2": "MXFP8E5M2",
    "mxfp6_e2m3": "MXFP6E2M3",
    "mxfp6_e3m2": "MXFP6E3M2",
    "mxfp4": "MXFP4E2M1",
}
_PRODUCTS = ["Conv", "Gemm", "MatMul"]
_PLACEMENTS = ("", "same", "last", "sums")
_BATCH = 50


class Reader:
    """A calibration data reader over batches of images."""

    def __init__(self, name: str, images: Any) -> None:
        self.batches = [{name: images[i : i + _BATCH]} for i in range(0, len(images), _BATCH)]
        self.rewind()

    def get_next(self) -> Any:
        return next(self.left, None)

    def rewind(self) -> None:
        self.left = iter(self.batches)


def without_weight(model: onnx.ModelProto) -> list[str]:
    """Returns the names of the MatMuls of two activations."""
    constant = {one.name for one in model.graph.initializer}
    return [n.name for n in model.graph.node if n.op_type == "MatMul" and constant.isdisjoint(n.input)]


def configured(preset: str, model: onnx.ModelProto, kind: str) -> Any:
    """Returns Quark's configuration for a preset and one of `_PLACEMENTS`."""
    from quark.onnx.quantization.config import DefaultConfigMapping
    from quark.onnx.quantization.config.config import Config

    made = copy.deepcopy(DefaultConfigMapping[preset])
    if kind:
        made.op_types_to_quantize, made.nodes_to_exclude = _PRODUCTS, without_weight(model)
        made.extra_options.pop("QuantizeAllOpTypes", None)
        made.extra_options |= {"OpTypesToExcludeOutputQuantization": _PRODUCTS, "QuantizeBias": False}
    if kind == "last":
        for key in ("BFPAttributes", "MXAttributes"):
            if key in made.extra_options:
                made.extra_options[key]["axis"] = -1
    return Config(global_quant_config=made)


def along_sums(path: Path) -> None:
    """Sets the axis of each Quark operator to the reduction axis of the Conv, Gemm or MatMul that reads it."""
    model = onnx.load(str(path))
    readers = {name: (node.op_type, i) for node in model.graph.node for i, name in enumerate(node.input)}
    for node in model.graph.node:
        kind, place = readers.get(node.output[0], ("", 0))
        if node.domain == "com.amd.quark" and kind in _PRODUCTS:
            axis = 1 if kind == "Conv" else -2 if (kind, place) == ("MatMul", 1) else -1
            kept = [one for one in node.attribute if one.name != "axis"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("axis", axis)])
    onnx.save(model, str(path))


def outputs(path: Path, images: Any) -> Any:
    """Returns the outputs of a file, computed by ONNX Runtime with Quark's operators."""
    from quark.onnx.operators.custom_ops import get_library_path

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.register_custom_ops_library(get_library_path("CPU"))
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = [session.run(None, {name: images[i : i + _BATCH]})[0] for i in range(0, len(images), _BATCH)]
    return np.concatenate(parts)


def main() -> None:
    """Writes the outputs of every format that Quark can quantize to."""
    from quark.onnx import ModelQuantizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("made", type=Path)
    parser.add_argument("--formats", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--placements", nargs="+", choices=_PLACEMENTS, default=_PLACEMENTS)
    asked = parser.parse_args()
    images, model, found = np.load(asked.images), onnx.load(str(asked.file)), {}
    for name in asked.formats:
        for kind in asked.placements:
            path = asked.made.with_suffix(f".{name}{kind}.onnx")
            label = f"{name}.{kind}".rstrip(".")
            try:
                reader = Reader(model.graph.input[0].name, images["calibration"])
                config = configured(PRESETS[name], model, kind)
                ModelQuantizer(config).quantize_model(str(asked.file), str(path), reader)
                if kind == "sums":
                    along_sums(path)
                found[label] = outputs(path, images["test"])
                np.savez(asked.made, **found)
            except Exception as error:  # a format that fails is reported and left out
                print(f"{label}: {error!r}"[:300], file=sys.stderr)
            finally:
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
