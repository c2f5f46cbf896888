"""Operators that return the shape of a tensor, or rearrange its values without changing them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.importing.operators.table import Array, Node, UnsupportedError, Value, function
from qatkit.importing.operators.values import TYPES, array, axes_of, ints, one_int, sizes_of, tensor

_PAD_MODES = ("constant", "reflect", "edge", "wrap")  # NumPy uses the same names


@function("Shape")
def shape(node: Node, x: Value) -> Array:
    """Returns the sizes of a tensor from axis `start` to axis `end`."""
    sizes = sizes_of(x)
    return np.asarray(sizes[node.get("start", 0) : node.get("end", None)], dtype=np.int64)


@function("Size")
def size(node: Node, x: Value) -> Array:
    """Returns the number of values of a tensor."""
    return np.asarray(math.prod(sizes_of(x)), dtype=np.int64)


@function("Constant")
def constant(node: Node) -> Array:
    """Returns a constant, from whichever attribute it is in.

    Raises:
        UnsupportedError: it is a string or sparse.
    """
    for key in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        if key in node.attributes:
            kind = None if key == "value" else np.int64 if "int" in key else np.float32
            return array(np.asarray(node.get(key), dtype=kind))
    raise UnsupportedError("its constant is a string or sparse, and has no PyTorch equivalent")


@function("ConstantOfShape", known=(0,))
def constant_of_shape(node: Node, sizes: Value) -> Array:
    """Returns an array of the given sizes filled with one value."""
    value = array(node.get("value", np.zeros(1, np.float32)))
    return np.full(ints(sizes), value.reshape(-1)[0], value.dtype)


@function("Range", known=(0, 1, 2))
def arithmetic_range(node: Node, start: Value, limit: Value, delta: Value) -> Tensor:
    """Returns equally spaced numbers from `start` up to `limit`, which is excluded."""
    ends = [value.item() for value in (start, limit, delta) if value is not None]
    kind = torch.as_tensor(start).dtype
    return torch.arange(*ends, dtype=kind)


@function("Reshape", known=(1,))
def reshape(node: Node, x: Value, sizes: Value = None) -> Tensor:
    """Reshapes; without `allowzero`, a size of 0 keeps the size of x.

    If the file accepts one image per run but the module several, a first size of 1 keeps the batch size (`program.py`).
    """
    x = tensor(x)
    target = list(node.get("shape", [])) if sizes is None else ints(sizes)
    if not node.get("allowzero", 0):
        target = [x.shape[i] if size == 0 else size for i, size in enumerate(target)]
    if node.any_batch and x.ndim and target and target[0] == 1 != x.shape[0]:
        target[0] = x.shape[0]
    return x.reshape(target)


@function("Flatten")
def flatten(node: Node, x: Value) -> Tensor:
    """Reshapes to two axes: all axes before `axis`, and all axes from it on."""
    x, axis = tensor(x), node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    if axis == 1:
        return torch.flatten(x, 1) if x.ndim > 1 else x.reshape(x.shape[0], 1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@function("Transpose")
def transpose(node: Node, x: Value) -> Tensor:
    """Permutes axes; reverses them if no order is given."""
    x = tensor(x)
    return x.permute(node.get("perm") or list(reversed(range(x.ndim))))


@function("Squeeze", known=(1,))
def squeeze(node: Node, x: Value, axes: Value = None) -> Tensor:
    """Removes the given axes, or all axes of size 1."""
    x = tensor(x)
    given = node.get("axes") if axes is None else ints(axes)
    found = [i for i, size in enumerate(x.shape) if size == 1] if given is None else axes_of(given, x.ndim)
    for axis in sorted(found, reverse=True):
        x = torch.squeeze(x, axis)
    return x


@function("Unsqueeze", known=(1,))
def unsqueeze(node: Node, x: Value, axes: Value = None) -> Tensor:
    """Inserts new axes of size 1, numbered as in the result."""
    x = tensor(x)
    given = node.get("axes") if axes is None else ints(axes)
    for axis in sorted(axes_of(list(given), x.ndim + len(given))):
        x = torch.unsqueeze(x, axis)
    return x


@function("Concat")
def concat(node: Node, *values: Value) -> Tensor:
    """Concatenates tensors along an axis."""
    like = next((value for value in values if isinstance(value, Tensor)), None)
    return torch.cat([tensor(value, like) for value in values], node.get("axis", 1))


@function("Split", known=(1,))
def split(node: Node, x: Value, sizes: Value = None) -> tuple[Tensor, ...]:
    """Splits into parts of given sizes, or into equal parts, the last of which may be smaller."""
    x, axis = tensor(x), node.get("axis", 0)
    given = node.get("split") if sizes is None else ints(sizes)
    count = node.get("num_outputs", len(node.outputs))
    parts = given or -(-x.shape[axis] // count)
    return tuple(torch.split(x, parts, axis))


@function("Expand", known=(1,))
def expand(node: Node, x: Value, sizes: Value) -> Tensor:
    """Repeats axes of size 1, by broadcasting with the given shape."""
    x = tensor(x)
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(ints(sizes))))


@function("Tile", known=(1,))
def tile(node: Node, x: Value, repeats: Value) -> Tensor:
    """Repeats the tensor along every axis the given number of times."""
    return tensor(x).repeat(ints(repeats))


def _unknown_pad(node: Node) -> str:
    mode = node.get("mode", "constant")
    return (
        ""
        if mode in _PAD_MODES
        else f"Pad with mode={mode} is not in the ONNX specification, which has {', '.join(_PAD_MODES)}"
    )


@function("Pad", known=(1, 2, 3), refuses=_unknown_pad)
def pad(node: Node, x: Value, pads: Value = None, value: Value = None, axes: Value = None) -> Tensor:
    """Pads with constant, reflected, repeated or wrapped borders; amounts are attributes before opset 11."""
    x = tensor(x)
    given = list(node.get("pads", [])) if pads is None else ints(pads)
    along = axes_of(ints(axes), x.ndim) if axes is not None else list(range(x.ndim))
    begin, end = [0] * x.ndim, [0] * x.ndim
    for i, axis in enumerate(along):
        begin[axis], end[axis] = given[i], given[i + len(along)]
    mode = node.get("mode", "constant")
    if mode != "constant":
        return _pad_by_values(x, begin, end, mode)
    fill = node.get("value", 0.0) if value is None else tensor(value).item()
    if x.dtype is torch.bool:
        return F.pad(x.to(torch.uint8), _for_torch(begin, end), value=int(fill)).bool()
    return F.pad(x, _for_torch(begin, end), value=fill if x.is_floating_point() else int(fill))


def _for_torch(begin: list[int], end: list[int]) -> list[int]:
    """Returns the padding in the order of `F.pad`: last axis first, without outer axes that have no padding."""
    flat = [size for axis in reversed(range(len(begin))) for size in (begin[axis], end[axis])]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return flat


def _pad_by_values(x: Tensor, begin: list[int], end: list[int], mode: str) -> Tensor:
    if min(begin + end) < 0:  # negative pads crop first, before the borders are filled
        kept = zip(begin, end, x.shape, strict=True)
        x = x[tuple(slice(max(-low, 0), size - max(-high, 0)) for low, high, size in kept)]
        begin, end = ([max(side, 0) for side in sides] for sides in (begin, end))
    inner = _for_torch(begin, end)
    torch_mode = {"reflect": "reflect", "edge": "replicate"}.get(mode)
    spatial = x.ndim - 2
    if torch_mode and x.ndim in (3, 4) and not any(begin[:2] + end[:2]):
        return F.pad(x, (inner + [0] * (2 * spatial))[: 2 * spatial], mode=torch_mode)
    for axis, (low, high) in enumerate(zip(begin, end, strict=True)):
        if low or high:
            places = np.pad(np.arange(x.shape[axis]), (low, high), mode=mode)  # type: ignore[call-overload]
            x = torch.index_select(x, axis, torch.from_numpy(places).to(x.device))
    return x


@function("DepthToSpace")
def depth_to_space(node: Node, x: Value) -> Tensor:
    """Moves channels to positions; in DCR order the block index comes before the channel, in CRD order after it."""
    x, block = tensor(x), node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    parts = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // block**2, h * block, w * block)


@function("SpaceToDepth")
def space_to_depth(node: Node, x: Value) -> Tensor:
    """Moves positions to channels."""
    x, block = tensor(x), node.get("blocksize")
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * block**2, h // block, w // block)


@function("Trilu", known=(1,))
def triangle(node: Node, x: Value, diagonal: Value = None) -> Tensor:
    """Returns the upper or lower triangle of matrices."""
    k = 0 if diagonal is None else one_int(diagonal)
    return (torch.triu if node.get("upper", 1) else torch.tril)(tensor(x), k)


@function("EyeLike")
def eye_like(node: Node, x: Value) -> Tensor:
    """Returns ones on a diagonal and zeros elsewhere, of the type `dtype` or, without this attribute, of x's type."""
    rows, columns = sizes_of(x)
    made = torch.from_numpy(np.eye(rows, columns, node.get("k", 0), dtype=np.float32))
    kind = node.get("dtype")
    return made.to(tensor(x).dtype if kind is None else TYPES[kind])
