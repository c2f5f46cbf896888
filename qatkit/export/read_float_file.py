"""A float ONNX file as it comes from elsewhere: read, checked for what the rest relies on, brought to opset 13.

What is allowed: one float32 input [N, C, H, W] or [N, H, W, C] of 1 or 3 channels, one output, weights inside the file
or in external data beside it, 2 GB in all, nothing quantized yet. What the onnx package alone can tell is checked here;
`float_graph` and ONNX Runtime, which take longer to import, are asked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, external_data_helper, numpy_helper

from qatkit.encryption.vault import readable
from qatkit.export.quiet import quiet
from qatkit.export.sort_nodes import sort_nodes
from qatkit.records.run_files import REPORT_FILE, changed_since_its_report
from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.fitting import LAYOUTS, as_typed, sides

if TYPE_CHECKING:
    import onnx_ir as ir

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

_WEIGHTS = {
    **dict.fromkeys(("Conv", "ConvTranspose"), (1,)),
    **dict.fromkeys(("Gemm", "MatMul"), (0, 1)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2)),
}


@dataclass(frozen=True)
class FloatFile:
    """A float model that can be quantized.

    Attributes:
        path: where it was read from.
        model: its weights are in memory.
        shape: of its input, in the order of `layout`; None for what is dynamic.
        opset: what the file had before it was upgraded.
        upgraded: the opset now, or None when it was high enough.
        layout: nchw | nhwc.
    """

    path: Path
    model: ir.Model
    shape: tuple[int | None, ...]
    opset: int
    upgraded: int | None
    layout: str = "nchw"

    @property
    def image(self) -> tuple[int | None, int | None, int | None]:
        """(channels, height, width) of an image."""
        one, two, three = self.shape[1:]
        return (three, one, two) if self.layout == "nhwc" else (one, two, three)

    def size(self, asked: int | Sequence[int] | None) -> int | list[int] | None:
        """Returns the size of an image as it is typed: as the file says, and what it leaves open as `asked`.

        A file that says one side alone, where nothing is asked for, takes squares.
        """
        _, height, width = self.image
        typed = (None, None) if asked is None else sides(asked)
        high, wide = height or typed[0] or width, width or typed[1] or height
        return None if high is None or wide is None else as_typed((high, wide))

    def write(self, target: Path) -> None:
        """Writes the model into one file, whole or not at all.

        Raises:
            ConfigError: the checker or ONNX Runtime refuses it.
        """
        from onnx_ir.passes import common

        from qatkit.export.write_model import write_model

        with quiet():
            common.RemoveInitializersFromInputsPass()(self.model)
        try:
            write_model(self.model, target)
        except ValueError as error:
            raise ConfigError("onnx", self.path, f"a model that ONNX Runtime runs ({error})") from error


def read_float_file(path: Path, opset: int, layout: str = "nchw") -> FloatFile:
    """Reads and checks `path`.

    Args:
        path: an ONNX file, with its external data beside it where it has some.
        opset: a file of a lower opset is upgraded to this one.
        layout: axes of its input, nchw | nhwc.

    Raises:
        ConfigError: anything about the file that can't be used, in one line.
    """
    try:
        with quiet():
            return _read(path, opset, layout)
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes of the libraries that read it
        raise ConfigError("onnx", path, f"an ONNX file; this one is damaged ({one_line(error)})") from error


def _read(path: Path, opset: int, layout: str) -> FloatFile:
    if path.is_file() and changed_since_its_report(path):
        allowed = (
            f"the file that the {REPORT_FILE} beside it describes; this one was damaged or changed since"
        )
        raise ConfigError("onnx", path, allowed)
    proto = _load(path)
    operators = (node.op_type for node in proto.graph.node)
    if quantized := next((one for one in operators if one.startswith(_QUANTIZED)), None):
        raise ConfigError("onnx", path, f"a float model; this one is quantized already (it has {quantized})")
    shape = _input_shape(path, proto.graph, layout)
    if len(proto.graph.output) != 1:
        names = ", ".join(value.name for value in proto.graph.output)
        raise ConfigError("onnx", path, f"a model of one output; it has {names}")
    from qatkit.export.float_graph import float_graph

    model, before = float_graph(path, proto, opset)
    return FloatFile(path, model, shape, before, opset if before < opset else None, layout)


def _load(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ConfigError("onnx", path, "a float ONNX file that exists")
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError("onnx", path, "a model of at most 2 GB")
    with readable(path) as plain:
        try:
            model = onnx.load(str(plain), load_external_data=False)
        except Exception as error:  # protobuf's DecodeError is not importable from a stable place
            raise ConfigError("onnx", path, f"an ONNX file ({one_line(error)})") from error
    if not model.graph.node or not model.opset_import:
        raise ConfigError("onnx", path, "an ONNX file with a graph; this one holds no operator")
    _load_external(path, model)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    try:
        sort_nodes(model.graph)
    except ValueError as error:
        raise ConfigError("onnx", path, f"a graph without circles; {error}") from error
    _check_finite(path, model.graph)
    return model


def _check_finite(path: Path, graph: onnx.GraphProto) -> None:
    """Weights that are to be quantized; a mask, a pad or a bound may be infinite."""
    readers = {name: node for node in graph.node for name in _weights_of(node)}
    for tensor in graph.initializer:
        if tensor.name not in readers or tensor.data_type != TensorProto.FLOAT:
            continue
        if not np.isfinite(numpy_helper.to_array(tensor)).all():
            node = readers[tensor.name]
            reason = f"'{tensor.name}' of '{node.name}' ({node.op_type}) holds NaN or infinity"
            raise ConfigError("onnx", path, f"finite weights; {reason}")


def _weights_of(node: onnx.NodeProto) -> list[str]:
    """The inputs of an operator that a mode quantizes where they are constant."""
    places = _WEIGHTS.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
    return [node.input[place] for place in places if place < len(node.input)]


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
        raise ConfigError("onnx", path, f"a model with readable external data ({one_line(error)})") from error


def _input_shape(path: Path, graph: onnx.GraphProto, layout: str) -> tuple[int | None, ...]:
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    allowed = f"a model of one input, float32 images [{', '.join(layout.upper())}] of 1 or 3 channels"
    if len(inputs) != 1:
        names = ", ".join(value.name for value in inputs) or "none"
        raise ConfigError("onnx", path, f"{allowed}; it has {names}")
    tensor = _tensor_type(inputs[0].type)
    shape = tuple(size.dim_value if size.dim_value > 0 else None for size in tensor.shape.dim)
    kind = TensorProto.DataType.Name(tensor.elem_type)
    if kind != "FLOAT" or len(shape) != 4 or shape[layout.index("c")] not in (None, 1, 3):
        dims = ", ".join("?" if size is None else str(size) for size in shape)
        other = next(one for one in LAYOUTS if one != layout)
        turned = kind == "FLOAT" and len(shape) == 4 and shape[other.index("c")] in (1, 3)
        hint = f" (data.layout={other} is for such a file)" if turned else ""
        raise ConfigError(
            "onnx", path, f"{allowed}; its input '{inputs[0].name}' is {kind.lower()} [{dims}]{hint}"
        )
    return shape


def _tensor_type(value: onnx.TypeProto) -> onnx.TypeProto.Tensor:
    """The element type; for a sequence or optional value, that of its elements."""
    kind = value.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return _tensor_type(getattr(value, kind).elem_type)
    return value.sparse_tensor_type if kind == "sparse_tensor_type" else value.tensor_type
