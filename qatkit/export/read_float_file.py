"""A float ONNX file as it comes from elsewhere: read, checked for what the rest relies on, brought to opset 13.

What is allowed: one float32 input [N, C, H, W] of 1 or 3 channels, one output, weights inside the file or in
external data beside it, 2 GB in all, nothing quantized yet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import TensorProto, external_data_helper, numpy_helper, version_converter
from onnx_ir.passes import common

from qatkit.bundle import REPORT_FILE, changed_since_its_report
from qatkit.encryption.vault import readable
from qatkit.export.for_ort_tools import prepared
from qatkit.export.torch_to_onnx import quiet, write_model
from qatkit.verify.graph_view import element_type, weight_of, weighted_ops, with_initializers
from qatkit_verify.errors import ConfigError

MAX_BYTES = 2**31 - 1  # protobuf's limit for one message
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
_ASYMMETRIC = 10  # the last opset whose Resize (and Upsample) knows no coordinate_transformation_mode
_IR_VERSION = 7  # the first of opset 13; from 4 on, weights need not be listed as inputs


@dataclass(frozen=True)
class FloatFile:
    """A float model that can be quantized.

    Attributes:
        path: where it was read from.
        model: its weights are in memory.
        shape: [N, C, H, W] of its input; None for what is dynamic.
        opset: what the file had before it was upgraded.
        upgraded: the opset now, or None when it was high enough.
    """

    path: Path
    model: ir.Model
    shape: tuple[int | None, ...]
    opset: int
    upgraded: int | None

    def write(self, target: Path) -> None:
        """Writes the model into one file, whole or not at all.

        Raises:
            ConfigError: the checker or ONNX Runtime refuses it.
        """
        with quiet():
            common.RemoveInitializersFromInputsPass()(self.model)
        try:
            write_model(self.model, target)
        except ValueError as error:
            raise ConfigError(
                "onnx", self.path, f"a model that ONNX Runtime runs ({_line(error)})"
            ) from error


def read_float_file(path: Path, opset: int) -> FloatFile:
    """Reads and checks `path`.

    Args:
        path: an ONNX file, with its external data beside it where it has some.
        opset: a file of a lower opset is upgraded to this one.

    Raises:
        ConfigError: anything about the file that can't be used, in one line.
    """
    try:
        with quiet():
            return _read(path, opset)
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise ConfigError("onnx", path, f"an ONNX file; this one is damaged ({_line(error)})") from error


def _read(path: Path, opset: int) -> FloatFile:
    if path.is_file() and changed_since_its_report(path):
        allowed = f"the file that the {REPORT_FILE} beside it tells of: this one was damaged or changed since"
        raise ConfigError("onnx", path, allowed)
    proto = _load(path)
    model = _parsed(path, proto)
    if quantized := next((node.op_type for node in model.graph if node.op_type.startswith(_QUANTIZED)), None):
        raise ConfigError("onnx", path, f"a float model; this one is quantized already (it has {quantized})")
    shape = _input_shape(path, model.graph)
    if len(model.graph.outputs) != 1:
        names = ", ".join(str(value.name) for value in model.graph.outputs)
        raise ConfigError("onnx", path, f"a model of one output, logits [N, classes]; it has {names}")
    hidden = _branched(model.graph) and _branched(_folded(proto).graph)
    if hidden:
        allowed = f"a model with its Conv, Gemm and MatMul in the main graph; its {hidden} holds some"
        raise ConfigError("onnx", path, allowed)
    before = model.opset_imports.get("", 0)
    if before < opset:
        model = _upgrade(path, proto, before, opset)
    if not _has_weights(model):
        allowed = (
            "a model with an operator to quantize: Conv, Gemm or MatMul with float32 weights; it has none"
        )
        raise ConfigError("onnx", path, allowed)
    return FloatFile(path, model, shape, before, opset if before < opset else None)


def _load(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ConfigError("onnx", path, "a float ONNX file that exists")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError("onnx", path, "a model of at most 2 GB")
    with readable(path) as plain:
        try:
            model = onnx.load(str(plain), load_external_data=False)
        except Exception as error:  # protobuf's DecodeError is not importable from a stable place
            raise ConfigError("onnx", path, f"an ONNX file ({_line(error)})") from error
    if not model.graph.node or not model.opset_import:
        raise ConfigError("onnx", path, "an ONNX file with a graph; this one holds no operator")
    _load_external(path, model)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _check_finite(path, model)
    return model


def _parsed(path: Path, model: onnx.ModelProto) -> ir.Model:
    try:
        return ir.from_proto(model)
    except Exception as error:  # a name that two nodes make, an unknown type
        raise ConfigError("onnx", path, f"an ONNX file ({_line(error)})") from error


def _has_weights(model: ir.Model) -> bool:
    """Whether a Conv, Gemm or MatMul of the main graph has float32 weights, constants in whatever form."""
    lifted = with_initializers(model.clone())
    found = (weight_of(node) for node in lifted.graph if node.op_type in weighted_ops())
    return any(w is not None and element_type(w.value) == ir.DataType.FLOAT for w in found)


def _branched(graph: ir.Graph) -> str:
    """The If, Loop or Scan that holds operators to quantize, by its type."""
    return next((node.op_type for node in graph if any(map(_holds_matrix, _graphs(node)))), "")


def _folded(model: onnx.ModelProto) -> ir.Model:
    """As the modes will see it: a branch that is always taken is part of the main graph."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, str(Path(folder) / "model.onnx"))
        return prepared(Path(folder) / "model.onnx")


def _graphs(node: ir.Node) -> list[ir.Graph]:
    """Branches and bodies of If, Loop and Scan."""
    return [item.as_graph() for item in node.attributes.values() if item.type == ir.AttributeType.GRAPH]


def _holds_matrix(graph: ir.Graph) -> bool:
    return any(node.op_type in weighted_ops() for node in ir.traversal.RecursiveGraphIterator(graph))


def _check_finite(path: Path, model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and not np.isfinite(numpy_helper.to_array(tensor)).all():
            raise ConfigError("onnx", path, f"finite weights; '{tensor.name}' holds NaN or infinity")


def _load_external(path: Path, model: onnx.ModelProto) -> None:
    """Brings weights that are stored beside the file into it."""
    tensors = [t for t in model.graph.initializer if external_data_helper.uses_external_data(t)]
    locations = {external_data_helper.ExternalDataInfo(tensor).location for tensor in tensors}
    for location in sorted(locations):
        if not (path.parent / location).is_file():
            raise ConfigError(
                "onnx", path, f"a model with its external data beside it; {location} is missing"
            )
    if path.stat().st_size + sum((path.parent / name).stat().st_size for name in locations) > MAX_BYTES:
        raise ConfigError("onnx", path, "a model of at most 2 GB, external data included")
    try:
        external_data_helper.load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        raise ConfigError("onnx", path, f"a model with readable external data ({_line(error)})") from error


def _input_shape(path: Path, graph: ir.Graph) -> tuple[int | None, ...]:
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    allowed = "a model of one input, float32 images [N, C, H, W] of 1 or 3 channels"
    if len(inputs) != 1:
        raise ConfigError("onnx", path, f"{allowed}; it has {_names(str(value.name) for value in inputs)}")
    shape = tuple(size if isinstance(size, int) and size > 0 else None for size in inputs[0].shape or ())
    kind = inputs[0].dtype or ir.DataType.UNDEFINED
    if kind != ir.DataType.FLOAT or len(shape) != 4 or shape[1] not in (None, 1, 3):
        dims = ", ".join("?" if size is None else str(size) for size in shape)
        given = f"{kind.name.lower()} [{dims}]"
        raise ConfigError("onnx", path, f"{allowed}; its input '{inputs[0].name}' is {given}")
    if shape[2] != shape[3] and None not in shape[2:]:
        raise ConfigError("onnx", path, f"{allowed}, height and width equal; it has {shape[2]} x {shape[3]}")
    return shape


def _upgrade(path: Path, model: onnx.ModelProto, before: int, opset: int) -> ir.Model:
    try:
        upgraded = ir.from_proto(version_converter.convert_version(model, opset))
    except Exception as error:
        reason = f"opset {opset} or higher; it has {before} and can't be upgraded ({_line(error)})"
        raise ConfigError("onnx", path, reason) from error
    upgraded.ir_version = max(upgraded.ir_version, _IR_VERSION)
    if before <= _ASYMMETRIC:
        _keep_asymmetric(upgraded.graph)
    return upgraded


def _keep_asymmetric(graph: ir.Graph) -> None:
    """Resize and Upsample had one way to place pixels; the converter leaves today's default, which is another."""
    for node in graph:
        if node.op_type != "Resize" or "coordinate_transformation_mode" in node.attributes:
            continue
        node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
        if "nearest_mode" not in node.attributes:
            node.attributes.add(ir.AttrString("nearest_mode", "floor"))


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
