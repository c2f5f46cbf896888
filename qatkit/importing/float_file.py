"""Checks a float ONNX file for export.py, without torch and, as far as possible, without ONNX Runtime.

Checks that need only the file come first: damage, quantized nodes and inputs. If ONNX Runtime's tools quantize the
file, `qatkit.export.float_graph` then checks the graph and upgrades it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit.export.quiet import quiet
from qatkit.importing.inputs import FileInput, ImageInput, file_inputs, fixed_inputs, image_input
from qatkit.importing.read import MAX_BYTES, name_of, read, reading
from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit.records.run_files import REPORT_FILE, changed_since_its_report
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import LAYOUTS

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_QUANTIZED = (
    "Quantize",
    "Dequantize",
    "Dynamic",
    "QLinear",
    "QGemm",
    "QAttention",
    "ConvInteger",
    "MatMulInteger",
)
_WEIGHTS = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (1,)),
    **dict.fromkeys(("Gemm", "MatMul"), (0, 1)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2)),
}


@dataclass(frozen=True)
class FloatFile:
    """A float model that was read from a file.

    Attributes:
        path: the file.
        model: the model, with its weights in memory and fixed inputs as constants.
        inputs: the inputs that are not fixed.
        fixed: the values of fixed inputs, by name.
        opset: the opset of the file.
        upgraded: the opset of `model` if it was upgraded; otherwise None.
    """

    path: Path
    model: ir.Model
    inputs: tuple[FileInput, ...]
    fixed: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    opset: int = 0
    upgraded: int | None = None

    def images(self, layout: str) -> ImageInput:
        """Returns the input of a file whose only input is a batch of images.

        Args:
            layout: nchw or nhwc.

        Raises:
            ConfigError: the file has several inputs, or its input is not a batch of images.
        """
        found = image_input(self.inputs, layout)
        if found is not None:
            return found
        allowed = f"a model with one input, float32 images [{', '.join(layout.upper())}] of 1 or 3 channels"
        hint = "data=arrays supports any inputs"
        if len(self.inputs) != 1:
            names = ", ".join(one.name for one in self.inputs)
            has = f"the inputs {names}" if names else "no inputs"
            raise ConfigError("onnx", self.path, f"{allowed}; this one has {has} ({hint})")
        (only,) = self.inputs
        other = next(one for one in LAYOUTS if one != layout)
        if image_input(self.inputs, other) is not None:
            hint = f"data.layout={other} supports it"
        dims = ", ".join("?" if size is None else str(size) for size in only.shape)
        raise ConfigError(
            "onnx", self.path, f"{allowed}; the input '{only.name}' is {only.dtype} [{dims}] ({hint})"
        )

    def write(self, target: Path) -> None:
        """Writes the model into one file, atomically.

        Raises:
            ConfigError: the checker or ONNX Runtime refuses it.
        """
        from qatkit.export.write_model import write_model
        from qatkit_verify.session import RUNTIME_VERSION

        try:
            write_model(self.model, target)
        except ValueError as error:
            cause = str(error).partition(": ")[2]  # without the name of the written file
            checker = type(error.__cause__).__module__.startswith("onnx.")
            refused = (
                "onnx's checker refuses the file"
                if checker
                else f"ONNX Runtime {RUNTIME_VERSION} can't load the file"
            )
            raise ConfigError("onnx", self.path, reason=f"{refused} ({cause})") from error


def layout_of(path: Path, typed: str | None) -> str:
    """Returns the layout of a file's images: `typed`, else the one in model.json next to the file, else nchw."""
    told = preprocessing_beside(path) or {}
    return typed or str(told.get("layout", "nchw")).lower()


def read_float_file(path: Path, fixed: Mapping[str, Any] | None = None) -> FloatFile:
    """Reads a float ONNX file and checks it for export.py.

    Args:
        path: an ONNX file, with any external data next to it.
        fixed: values of inputs that become constants, by name.

    Raises:
        ConfigError: the file is missing, damaged, too large or already quantized, has changed since its report, has
            weights that are not finite or inputs that are not tensors of numbers, or `fixed` does not fit its inputs.
    """
    if path.is_file() and changed_since_its_report(path):
        reason = f"the file is damaged, or has changed since {REPORT_FILE} next to it was written"
        reason += "; copy the file again, or move it to another folder"
        raise ConfigError("onnx", path, reason=reason)
    model = read(path, most=MAX_BYTES, check=partial(_check_float, path))
    with reading(path):
        return _checked(path, model, fixed or {})


def _check_float(path: Path, graph: onnx.GraphProto) -> None:
    """Refuses a file that is quantized already, including in branches and loop bodies."""
    for node in graph.node:
        if node.op_type.startswith(_QUANTIZED):
            told = f"a float model; this one is quantized already (it contains {node.op_type})"
            raise ConfigError("onnx", path, told)
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                _check_float(path, inner)


def _checked(path: Path, model: ir.Model, fixed: Mapping[str, Any]) -> FloatFile:
    _check_finite(path, model.graph)
    values = fixed_inputs(path, model.graph, fixed)
    inputs = tuple(file_inputs(path, model, values))
    for name, value in values.items():
        _fix(model.graph, name, value)
    return FloatFile(path, model, inputs, values, model.opset_imports.get("", 0))


def _fix(graph: ir.Graph, name: str, value: NDArray[Any]) -> None:
    """Turns an input into a constant."""
    import onnx_ir as ir

    given = next(one for one in graph.inputs if one.name == name)
    graph.inputs.remove(given)
    given.const_value = ir.tensor(value, name=name)
    graph.register_initializer(given)


def _check_finite(path: Path, graph: ir.Graph) -> None:
    """Refuses weights with NaN or infinity; a mask, a pad or a bound may be infinite."""
    import onnx_ir as ir

    for node in graph:
        places = _WEIGHTS.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
        for value in (node.inputs[place] for place in places if place < len(node.inputs)):
            tensor = value.const_value if value is not None and value.is_initializer() else None
            if tensor is None or tensor.dtype != ir.DataType.FLOAT or np.isfinite(tensor.numpy()).all():
                continue
            assert value is not None
            told = f"the weight '{value.name}' of '{name_of(node)}' ({node.op_type}) contains NaN or infinity"
            raise ConfigError("onnx", path, f"a model with finite weights; {told}")


def for_tools(file: FloatFile, opset: int) -> FloatFile:
    """Returns the file as ONNX Runtime's quantization tools need it, with `opset` or a higher one.

    Raises:
        ConfigError: the file has no weights to quantize, has them in branches, or cannot be upgraded.
    """
    from qatkit.export.float_graph import float_graph

    with quiet():
        model = float_graph(file.path, file.model, opset)
    return replace(file, model=model, upgraded=opset if file.opset < opset else None)
