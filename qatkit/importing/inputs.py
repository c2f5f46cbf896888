"""Describes the inputs of an ONNX file: types, axes, batch axes, and inputs that are fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import as_typed, sides

if TYPE_CHECKING:
    import onnx_ir as ir

_FIX = "model.kwargs.fix"
_RECURRENT = ("LSTM", "GRU", "RNN")


class FileInput(NamedTuple):
    """An input of a file.

    Attributes:
        name: the name in the file.
        dtype: NumPy's name of its type.
        shape: its sizes; None for a dynamic size.
        axis: the batch axis; None without one.
        names: the names of the dynamic sizes; "" for a size that is fixed or has no name.
        below: the number of rows of the smallest table that it indexes; None if no such table is found.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    axis: int | None
    names: tuple[str, ...] = ()
    below: int | None = None


@dataclass(frozen=True)
class ImageInput:
    """The input of a file whose only input is a batch of images.

    Attributes:
        shape: the sizes in the order of `layout`, the batch first; None for a dynamic axis.
        layout: nchw or nhwc.
    """

    shape: tuple[int | None, ...]
    layout: str = "nchw"

    @property
    def image(self) -> tuple[int | None, int | None, int | None]:
        """The size of an image: (channels, height, width); None for a dynamic axis."""
        one, two, three = self.shape[1:]
        return (three, one, two) if self.layout == "nhwc" else (one, two, three)

    def size(self, asked: int | Sequence[int] | None, file: object) -> int | list[int] | None:
        """Returns the image size in pixels: one number for squares, [height, width] for others, None if unknown.

        Sides that are dynamic in the file come from `asked`. If only one side is fixed and `asked` is None, images
        are square.

        Args:
            asked: the setting `data.image_size`, in pixels.
            file: the name of the file, for messages.

        Raises:
            ConfigError: the file has another size.
        """
        _, height, width = self.image
        typed = (None, None) if asked is None else sides(asked)
        high, wide = height or typed[0] or width, width or typed[1] or height
        found = None if high is None or wide is None else as_typed((high, wide))
        if asked is not None and found != as_typed(asked):
            raise ConfigError("data.image_size", asked, f"null or {found}, the input size of {file}")
        return found


def image_input(inputs: Sequence[FileInput], layout: str) -> ImageInput | None:
    """Returns the only input if it is a batch of float32 images of 1, 3 or any number of channels; else None."""
    if len(inputs) != 1 or inputs[0].dtype != "float32" or len(inputs[0].shape) != 4:
        return None
    found = ImageInput(inputs[0].shape, layout)
    return found if found.image[0] in (None, 1, 3) else None


def file_inputs(file: Path, model: ir.Model, fixed: Iterable[str], any_batch: bool = True) -> list[FileInput]:
    """Returns the inputs of a file that are not fixed, in the order of the file.

    Raises:
        ConfigError: an input is not a tensor of numbers, or the file does not give its type and shape.
    """
    from qatkit.importing.id_ranges import rows_indexed_by

    left = [value for value in model.graph.inputs if value.name not in set(fixed)]
    axes = batch_axes(left, any_batch and one_sample_per_run(left, model.graph))
    found = []
    for value in left:
        if not _is_tensor(value):
            raise ConfigError("onnx", file, reason=f"input '{value.name}' is not a tensor of numbers")
        if value.dtype is None or value.shape is None:
            raise ConfigError(
                "onnx", file, f"a file that gives the type and the shape of its input '{value.name}'"
            )
        sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
        names = tuple("" if isinstance(size, int) else str(size.value or "") for size in value.shape)
        name, kind = str(value.name), str(value.dtype.numpy())
        found.append(FileInput(name, kind, sizes, axes[name], names, rows_indexed_by(value)))
    return found


def _is_tensor(value: ir.Value) -> bool:
    import onnx_ir as ir

    plain = value.type is None or isinstance(value.type, ir.TensorType)
    return plain and value.dtype != ir.DataType.STRING


def one_sample_per_run(inputs: Sequence[ir.Value], graph: ir.Graph) -> bool:
    """Returns whether the first axis of every input is a batch axis of size 1.

    False if an input is the initial state of a recurrent node, whose first axis is the layers.
    """
    return (
        bool(inputs)
        and all(_one_sample(value) for value in inputs)
        and _initial_states(graph).isdisjoint(str(value.name) for value in inputs)
    )


def _initial_states(graph: ir.Graph) -> set[str]:
    """Returns the names of values that are initial states [layers, batch, hidden] of recurrent operators.

    If nodes compute the state, the name is that of the value from which they compute it.
    """
    recurrent = [
        node for node in graph if node.op_type in _RECURRENT and not node.attributes.get_int("layout", 0)
    ]
    initial = [_source(value) for node in recurrent for value in node.inputs[5:7] if value is not None]
    return {str(value.name) for value in initial}


def _source(value: ir.Value) -> ir.Value:
    """Returns the value from which `value` is computed, following the first inputs of nodes."""
    node = value.producer()
    while node is not None and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def batch_axes(inputs: Sequence[ir.Value], widened: bool) -> dict[str, int | None]:
    """Returns the batch axis of each input; None for an input without one.

    The first input that is not a scalar decides. If its first size is 1, or all its sizes are fixed, no input has a
    batch axis. Otherwise the batch axis of each input is the axis whose size has the name of the first dynamic size of
    that first input. If this size has no name, the batch axis of each input is its first axis if that is dynamic,
    otherwise its only dynamic axis.

    Args:
        inputs: the inputs that are not fixed.
        widened: whether the module accepts any batch size although the file has batch size 1; the batch axis of
            every input is then 0.
    """
    shapes = {str(value.name): list(value.shape) if value.shape is not None else [] for value in inputs}
    if widened:
        return dict.fromkeys(shapes, 0)
    first = next((shape for shape in shapes.values() if shape), [])
    symbol = next((size for size in first if not isinstance(size, int)), None)
    if symbol is None or first[0] == 1:  # if the first axis is 1, a dynamic axis after it is time or a height
        return dict.fromkeys(shapes)
    if symbol.value is None:  # dynamic sizes without names
        return {name: _first_or_only(shape) for name, shape in shapes.items()}
    return {name: shape.index(symbol) if symbol in shape else None for name, shape in shapes.items()}


def _first_or_only(shape: Sequence[Any]) -> int | None:
    """Returns the first axis if it is dynamic, otherwise the only dynamic axis; None if there are none or several."""
    axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    return axes[0] if axes[:1] == [0] or len(axes) == 1 else None


def _one_sample(value: ir.Value) -> bool:
    """Returns whether an input has more than one axis, the first of size 1."""
    return value.shape is not None and len(value.shape) > 1 and value.shape[0] == 1


def fixed_inputs(file: Path, graph: ir.Graph, fixed: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns the inputs that become constants, in the types of the file.

    Raises:
        ConfigError: a name is not an input, or a value does not fit the type and shape of the input.
    """
    known = {str(value.name): value for value in graph.inputs}
    found = {}
    for name, given in fixed.items():
        if name not in known:
            raise ConfigError(_FIX, name, f"an input of {file.name} ({', '.join(known)})")
        kind, sizes = known[name].dtype, known[name].shape
        dtype = None if kind is None else kind.numpy()
        shape = "" if sizes is None else f"shape [{', '.join(_size(size) for size in sizes)}]"
        told = " and ".join(filter(None, (shape, "" if dtype is None else f"type {dtype}")))
        allowed = f"a value{f' of {told}' if told else ''} for input '{name}'"
        try:
            value = np.asarray(given, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(_FIX, f"{name}: {given}", allowed) from error
        fraction = value.dtype.kind in "iu" and not np.array_equal(value, np.asarray(given))
        if fraction or (sizes is not None and not _fits(value, sizes)):
            raise ConfigError(_FIX, f"{name}: {given}", allowed)
        found[name] = value
    return found


def _size(size: Any) -> str:
    return str(size) if isinstance(size, int) else str(size.value or "any")


def _fits(value: NDArray[Any], sizes: ir.Shape) -> bool:
    known = [size if isinstance(size, int) else None for size in sizes]
    return value.ndim == len(known) and all(a in (None, b) for a, b in zip(known, value.shape, strict=True))
