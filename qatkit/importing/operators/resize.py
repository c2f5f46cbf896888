"""Resize and Upsample, in all modes of ONNX and all coordinate systems except tf_crop_and_resize.

Resize with antialias, or with a policy that keeps the aspect ratio, is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.importing.operators.table import Array, Node, Value, function
from qatkit.importing.operators.values import axes_of, ints, tensor

_COORDINATES = (
    *("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "align_corners", "asymmetric"),
    "tf_half_pixel_for_nn",
)


@function("Upsample", known=(1,))
def upsample(node: Node, x: Value, scales: Value = None) -> Tensor:
    """Resizes with asymmetric coordinates, as Upsample and the Resize of opset 10 do."""
    given = node.get("scales") if scales is None else np.asarray(tensor(scales).tolist())
    return _resized(node, tensor(x), list(map(float, given)), None, "asymmetric", "floor")


def _unknown(node: Node) -> str:
    if node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "Resize that keeps the aspect ratio has no PyTorch equivalent"
    if node.get("antialias", 0):
        return "Resize with antialias has no PyTorch equivalent"
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    return "" if mode in _COORDINATES else f"Resize with coordinates {mode} has no PyTorch equivalent"


@function("Resize", known=(1, 2, 3), refuses=_unknown)
def resize(node: Node, x: Value, roi: Value = None, scales: Value = None, sizes: Value = None) -> Tensor:
    """Resizes by factors or to sizes, along all axes or some."""
    x = tensor(x)
    if node.version < 11:
        return upsample(node, x, roi)
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    along = axes_of(list(node.get("axes") or range(x.ndim)), x.ndim)
    target, factors = list(x.shape), [1.0] * x.ndim
    given = ints(sizes)
    if given:
        for axis, size in zip(along, given, strict=True):
            target[axis], factors[axis] = size, size / x.shape[axis]
        return _resized(node, x, factors, target, mode, node.get("nearest_mode", "round_prefer_floor"))
    for axis, factor in zip(along, np.ravel(tensor(scales).tolist()), strict=True):
        factors[axis] = float(factor)
    return _resized(node, x, factors, None, mode, node.get("nearest_mode", "round_prefer_floor"))


def _resized(
    node: Node, x: Tensor, factors: Sequence[float], target: list[int] | None, coordinates: str, rounding: str
) -> Tensor:
    mode = node.get("mode", "nearest")
    sizes = target or [int(np.floor(size * factor)) for size, factor in zip(x.shape, factors, strict=True)]
    changed = [axis for axis in range(x.ndim) if sizes[axis] != x.shape[axis]]
    if not changed:
        return x
    images = x.ndim == 4 and changed[0] >= 2
    if mode == "nearest":
        places = {a: _nearest(x.shape[a], sizes[a], factors[a], coordinates, rounding) for a in changed}
        if images and all(_torch_nearest(x.shape[a], sizes[a], places[a]) for a in changed):
            return F.interpolate(x, sizes[2:], mode="nearest")
        for axis, found in places.items():
            x = torch.index_select(x, axis, torch.from_numpy(found).to(x.device))
        return x
    exact = all(abs(sizes[a] - x.shape[a] * factors[a]) < 1e-6 for a in changed)
    halves = coordinates == "half_pixel" or (
        coordinates == "pytorch_half_pixel" and all(sizes[a] > 1 for a in changed)
    )
    kind = {"linear": "bilinear", "cubic": "bicubic"}[mode]
    torch_cubic = mode == "linear" or (
        node.get("cubic_coeff_a", -0.75) == -0.75 and not node.get("exclude_outside", 0)
    )
    if images and torch_cubic and (coordinates == "align_corners" or (halves and exact)):
        return F.interpolate(x, sizes[2:], mode=kind, align_corners=coordinates == "align_corners")
    for axis in changed:
        weights = _weights(node, x.shape[axis], sizes[axis], factors[axis], coordinates)
        matrix = torch.from_numpy(weights).to(x.device)
        x = torch.matmul(x.movedim(axis, -1), matrix).movedim(-1, axis)
    return x


def _coordinates(size: int, target: int, factor: float, mode: str) -> Array:
    """Returns the coordinate in the input of each output position."""
    place = np.arange(target, dtype=np.float64)
    if mode == "align_corners":
        return place * (size - 1) / (target - 1) if target > 1 else place * 0
    if mode == "asymmetric":
        return place / factor
    if mode == "pytorch_half_pixel" and target == 1:
        return place * 0
    if mode == "half_pixel_symmetric":
        adjusted = target / (factor * size)
        center = size / 2
        return center * (1 - adjusted) + (place + 0.5) / factor - 0.5
    if mode == "tf_half_pixel_for_nn":
        return (place + 0.5) / factor
    return (place + 0.5) / factor - 0.5


def _nearest(size: int, target: int, factor: float, mode: str, rounding: str) -> Array:
    place = _coordinates(size, target, factor, mode)
    roundings: dict[str, Any] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda v: np.ceil(v - 0.5),
        "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    }
    return np.clip(roundings[rounding](place), 0, size - 1).astype(np.int64)


def _torch_nearest(size: int, target: int, places: Array) -> bool:
    """Returns whether `F.interpolate` with mode nearest picks exactly the positions `places` of the input."""
    return bool(np.array_equal(places, np.minimum(np.floor(np.arange(target) * (size / target)), size - 1)))


def _weights(node: Node, size: int, target: int, factor: float, mode: str) -> Array:
    """Returns the matrix [size, target] of a linear or cubic interpolation along one axis."""
    place = _coordinates(size, target, factor, mode)
    low = np.floor(place).astype(np.int64)
    part = place - low
    if node.get("mode") == "linear":
        taps = [(0, 1 - part), (1, part)]
    else:
        a = node.get("cubic_coeff_a", -0.75)

        def near(t: Array) -> Array:
            return ((a + 2) * t - (a + 3)) * t * t + 1

        def far(t: Array) -> Array:
            return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

        taps = [(-1, far(part + 1)), (0, near(part)), (1, near(1 - part)), (2, far(2 - part))]
    matrix = np.zeros((size, target))
    for offset, weight in taps:
        outside = (low + offset < 0) | (low + offset >= size)
        kept = np.where(outside, 0.0, weight) if node.get("exclude_outside", 0) else weight
        np.add.at(matrix, (np.clip(low + offset, 0, size - 1), np.arange(target)), kept)
    if node.get("exclude_outside", 0):
        matrix /= matrix.sum(0, keepdims=True)
    return matrix.astype(np.float32)
