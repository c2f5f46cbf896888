"""Reads or draws the inputs on which a model and its cleaned form are compared."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from qatkit.export.clean.graphs import size_name
from qatkit_verify.errors import ConfigError, one_line

Feeds = dict[str, NDArray[Any]]
KEY = "clean.inputs"
_SIZES = (32, 64, 16, 128, 224, 512, 8, 2, 1)  # sizes that are tried for dynamic axes other than the first
_HIGHEST = (3, 1)  # upper bounds of random integers, exclusive; with 1 all are 0


class Port(NamedTuple):
    """The name, type and axes of an input; an axis is a number, the name of a dynamic size, or None without a name."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...]


def ports(model: ir.Model, path: Path) -> list[Port]:
    """Returns the inputs of a model; `path` is its file, for messages.

    Raises:
        ConfigError: an input is not a tensor of numbers, or its rank is unknown.
    """
    found = []
    for value in model.graph.inputs:
        kind = value.type
        if not isinstance(kind, ir.TensorType) or kind.dtype == ir.DataType.STRING or value.shape is None:
            reason = f"input '{value.name}' is not a tensor of numbers with a known rank, so qatkit cannot run the file"
            raise ConfigError("onnx", path, reason=reason)
        shape = tuple(size if isinstance(size, int) else size_name(size) for size in value.shape)
        found.append(Port(str(value.name), np.dtype(kind.dtype.numpy()), shape))
    return found


def drawn(session: ort.InferenceSession, wanted: Sequence[Port]) -> list[Feeds]:
    """Returns two sets of random inputs that a model accepts, or only one set if it refuses a further one.

    If the first axis is dynamic, the second set has a batch size of 2, provided that the model accepts this.

    Raises:
        ConfigError: the model accepts none of the sizes that are tried.
    """
    failure: Exception | None = None
    for size, highest in product(_SIZES, _HIGHEST):
        feeds = _feeds(wanted, 0, size, highest, 1)
        found = _failure(session, feeds)
        if found is None:
            return [feeds, *_second(session, wanted, size, highest)]
        failure = failure or found
    assert failure is not None
    reason = (
        f"the model accepts none of the random inputs ({one_line(failure)}); give inputs with {KEY}=FILE.npz"
    )
    raise ConfigError(KEY, None, reason=reason)


def _second(
    session: ort.InferenceSession, wanted: Sequence[Port], size: int, highest: int
) -> Iterator[Feeds]:
    """Yields one set of inputs with batch size 2, else 1, or nothing if the model accepts neither."""
    for batch in (2, 1):
        feeds = _feeds(wanted, 1, size, highest, batch)
        if _failure(session, feeds) is None:
            yield feeds
            return


def _failure(session: ort.InferenceSession, feeds: Feeds) -> Exception | None:
    try:
        session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        return error
    return None


def _feeds(wanted: Sequence[Port], seed: int, size: int, highest: int, batch: int) -> Feeds:
    draw = np.random.default_rng(seed)
    first = next((port.shape[0] for port in wanted if port.shape), None)
    sizes: dict[str, int] = {first: batch} if isinstance(first, str) and first else {}
    return {port.name: _array(draw, port, _sizes(port, sizes, size, batch), highest) for port in wanted}


def _sizes(port: Port, sizes: Mapping[str, int], size: int, batch: int) -> list[int]:
    return [
        one if isinstance(one, int) else sizes.get(one or "", batch if axis == 0 and not one else size)
        for axis, one in enumerate(port.shape)
    ]


def _array(draw: np.random.Generator, port: Port, shape: Sequence[int], highest: int) -> NDArray[Any]:
    if port.dtype.kind == "b":
        return draw.integers(0, 2, shape).astype(np.bool_)
    if port.dtype.kind in "iu":
        above = 256 if port.dtype == np.uint8 and highest > 1 else highest
        return np.asarray(draw.integers(0, above, shape)).astype(port.dtype)
    return np.asarray(draw.standard_normal(shape)).astype(port.dtype)


def given(path: Path, wanted: Sequence[Port]) -> Feeds:
    """Returns the inputs in an .npz file.

    Raises:
        ConfigError: the file cannot be read, lacks an input, or has an input of another type or shape.
    """
    if not path.is_file():
        raise ConfigError("clean.inputs", path, "an .npz file that exists")
    try:
        with np.load(path) as held:
            found = {name: held[name] for name in held.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        # A TypeError means that the file is an .npy file.
        cause = "it contains a single array" if isinstance(error, TypeError) else one_line(error)
        reason = f"the file can't be read as .npz ({cause})"
        raise ConfigError(KEY, path, reason=reason) from error
    for port in wanted:
        array = found.get(port.name)
        if array is None:
            raise ConfigError(
                KEY, path, f"an .npz file with all inputs of the model; '{port.name}' is missing"
            )
        fits = len(array.shape) == len(port.shape) and all(
            not isinstance(own, int) or size == own for size, own in zip(array.shape, port.shape, strict=True)
        )
        if array.dtype != port.dtype or not fits:
            sizes = ", ".join("?" if size is None else str(size) for size in port.shape)
            held_text = f"{array.dtype} {list(array.shape)}"
            allowed = (
                f"an .npz file whose array '{port.name}' is {port.dtype} [{sizes}]; the array is {held_text}"
            )
            raise ConfigError(KEY, path, allowed)
    return {port.name: found[port.name] for port in wanted}
