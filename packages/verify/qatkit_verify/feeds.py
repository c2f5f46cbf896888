"""Turns a batch in any of the following forms into the inputs of a file or a module, by name.

array or tensor                             the one input of the file
(images, labels)                            the same; the second entry must be labels, since there is one input
(image, vector), [image, vector]            as many as the file has inputs, in their order
{"ids": ids, "mask": mask}                  by name; other entries (labels) are ignored
{"scan": {"left": a, "right": b}}           by path: scan_left, scan_right
({"left": a, "right": b}, c)                nested, in their order
((image, vector), labels), ({..}, labels)   inputs and labels
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.integer_ends import IntegerIO

if TYPE_CHECKING:
    import onnxruntime as ort

Array = NDArray[Any]
_TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_}


def by_name(names: Sequence[str], batch: Any) -> dict[str, Any]:
    """Returns the tensors of a batch by name, for the inputs `names`.

    Raises:
        ConfigError: the batch neither contains all names nor has as many tensors as there are names.
    """
    if isinstance(batch, Mapping) and set(names) <= set(batch):
        return {name: batch[name] for name in names}
    found = list(_leaves(batch))
    if isinstance(batch, Mapping) and set(names) <= {path for path, _ in found}:
        return {name: dict(found)[name] for name in names}
    if len(found) == len(names):
        return dict(zip(names, (value for _, value in found), strict=True))
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return by_name(names, batch[0])  # with labels
    given = ", ".join(path or "a tensor" for path, _ in found)
    raise ConfigError("batch", given or "no tensors", f"{counted(len(names), 'tensor')} ({', '.join(names)})")


def _leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested lists, tuples and mappings with their paths, joined by "_"; skips None."""
    if isinstance(batch, (Mapping, tuple, list)):
        parts = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for name, part in parts:
            yield from _leaves(part, f"{path}_{name}" if path else str(name))
    elif batch is not None:
        yield path, batch


def input_names(session: ort.InferenceSession) -> tuple[str, ...]:
    """Returns the names of a file's inputs."""
    return tuple(one.name for one in session.get_inputs())


def inputs_alone(names: Sequence[str], batch: Any) -> Any:
    """Returns a batch without its labels: a single tensor, or tensors by name."""
    found = by_name(names, batch)
    return found[names[0]] if len(names) == 1 else found


def rows(batch: Any) -> int:
    """Returns the number of images of a batch without labels: the length of its first tensor with axes, else 1."""
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((rows(one) for one in batch if isinstance(one, (tuple, list, Mapping)) or one.ndim), 1)
    return len(batch)


def feeds(session: ort.InferenceSession, batch: Any, ends: IntegerIO | None = None) -> dict[str, Array]:
    """Returns a batch by input name, as arrays of the file's types; with `ends`, as uint8 pixels."""
    found = by_name(input_names(session), batch)
    if ends is not None:
        return {name: ends.pixels(np.ascontiguousarray(v, np.float32)) for name, v in found.items()}
    return {
        one.name: np.asarray(found[one.name], numpy_type(one.type), order="C") for one in session.get_inputs()
    }


def numpy_type(kind: str) -> Any:
    """Returns NumPy's type, or its name, for ONNX Runtime's name of a type, such as "tensor(float)"."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(name, name)


def noise_feeds(
    session: ort.InferenceSession, given: Sequence[int] | Mapping[str, Any] | None, seed: int, batch: int = 1
) -> dict[str, Array]:
    """Returns inputs for a run: standard normal floats, random uint8 pixels, 0 (a valid id) and True (a mask).

    Args:
        session: a session of the file.
        given: the shape of the only input; or a batch by input name, which is used instead of noise. None: the
            shapes that the file declares.
        seed: the seed of the random numbers.
        batch: the size of a dynamic first axis.

    Raises:
        ConfigError: another axis is dynamic, a shape is given for a file with several inputs, or the batch lacks
            an input.
    """
    if isinstance(given, Mapping):
        return feeds(session, given)
    ports, draw = session.get_inputs(), np.random.default_rng(seed)
    if given is not None and len(ports) > 1:
        named = ", ".join(input_names(session))
        raise ConfigError("input_shape", list(given), f"a mapping of arrays by input name ({named})")
    shapes = [_shape(one.name, one.shape, batch) if given is None else tuple(given) for one in ports]
    return {one.name: _drawn(draw, shape, one.type) for one, shape in zip(ports, shapes, strict=True)}


def _shape(name: str, shape: Sequence[Any], batch: int) -> tuple[int, ...]:
    known = [batch if i == 0 and not isinstance(size, int) else size for i, size in enumerate(shape)]
    if not all(isinstance(size, int) for size in known):
        sizes = ", ".join("?" if size is None else str(size) for size in shape)
        reason = (
            f"the shape [{sizes}] of input '{name}' has dynamic axes; give an array for this input (--inputs FILE.npz,"
            " or input_shape in Python)"
        )
        raise ConfigError("input", name, reason=reason)
    return tuple(known)


def _drawn(draw: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    dtype = np.dtype(numpy_type(kind))
    if dtype == np.uint8:
        return draw.integers(0, 256, shape, dtype=np.uint8)
    if dtype.kind == "f":
        return np.asarray(draw.standard_normal(shape, dtype=np.float32), dtype)
    return np.full(shape, dtype.kind == "b", dtype)
