"""Rewrites a transposed convolution as a convolution, which runtimes compute in 8 bits, and rearranges its output.

With stride s and a kernel of k taps, the output at q·s + r - padding, where 0 ≤ r < s, is a sum over only the taps r,
r + s, r + 2s, ... of the kernel. Each phase r is thus a convolution with ceil(k / s) taps. All phases together are one
convolution with s times the channels, whose output is interleaved (in ONNX: DepthToSpace) and cut to size. For k = s,
the usual upsampling in a U-Net, that is a 1x1 convolution without a cut.

    weight [in, out / groups, k, ...]  →  [out · s · ..., in / groups, taps, ...], computed at each step
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.node_arguments import shape_of
from qatkit.graph.nodes import OWNER, module_of, owner, site
from qatkit.graph.weights.operator import Kind, OperatorBuilder

_KINDS: dict[int, Kind] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
TYPES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def by_phases(weight: Tensor, stride: Sequence[int], taps: Sequence[int], groups: int) -> Tensor:
    """Returns the weight of the convolution that computes all phases.

    Args:
        weight: the weight of the transposed convolution, [in, out / groups, kernel...].
        stride: the stride of the transposed convolution, per axis.
        taps: number of taps of each phase, per axis; taps beyond the kernel are zero.
        groups: the number of groups.

    Returns:
        [out · phases, in / groups, taps...]
    """
    rank = len(stride)
    missing = [(0, t * s - k) for t, s, k in zip(taps, stride, weight.shape[2:], strict=True)]
    padded = F.pad(weight, [amount for pair in reversed(missing) for amount in pair])
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    sizes = [size for pair in zip(taps, stride, strict=True) for size in pair]
    split = padded.reshape(groups, inputs, outputs, *sizes).flip([3 + 2 * i for i in range(rank)])
    phases, kept = [4 + 2 * i for i in range(rank)], [3 + 2 * i for i in range(rank)]
    turned = split.permute(0, 2, *phases, 1, *kept)
    return turned.reshape(groups * outputs * math.prod(stride), inputs, *taps)


def from_phases(weight: Tensor, kernel: Sequence[int], stride: Sequence[int], groups: int) -> Tensor:
    """Returns the weight of the transposed convolution, [in, out / groups, kernel...]: the inverse of `by_phases`."""
    rank, taps = len(stride), weight.shape[2:]
    inputs, outputs = weight.shape[1], weight.shape[0] // (groups * math.prod(stride))
    split = weight.reshape(groups, outputs, *stride, inputs, *taps)
    sizes = [axis for i in range(rank) for axis in (3 + rank + i, 2 + i)]
    turned = split.permute(0, 2 + rank, 1, *sizes).flip([3 + 2 * i for i in range(rank)])
    whole = turned.reshape(groups * inputs, outputs, *(t * s for t, s in zip(taps, stride, strict=True)))
    return whole[(slice(None), slice(None), *(slice(size) for size in kernel))]


def lower_transposed(builder: OperatorBuilder, node: fx.Node) -> str | None:
    """Rewrites a call of nn.ConvTranspose or F.conv_transpose and returns None, or returns why it can't."""
    given = _given(builder, node)
    shape, weight, bias = shape_of(given["input"]), given["weight"], given["bias"]
    value = builder.constants.tensor(weight)
    if value is None or (bias is not None and builder.constants.tensor(bias) is None):
        return "its weight or bias depends on the input, so it stays float"
    rank, groups = value.ndim - 2, int(given["groups"])
    stride, padding, extra, dilation = (
        _each(given[k], rank) for k in ("stride", "padding", "output_padding", "dilation")
    )
    if shape is None:
        return "the shape of its input is not known without an example"
    if len(shape) != rank + 2 or set(dilation) != {1}:
        return "a transposed convolution with dilation, or of one image without a batch, stays float"
    kernel = list(value.shape[2:])
    taps = [-(-(k + max(e - p, 0)) // s) for k, s, p, e in zip(kernel, stride, padding, extra, strict=True)]
    weight = builder.constants.add(node, by_phases, weight, stride, taps, groups)
    if bias is not None and math.prod(stride) > 1:
        bias = builder.constants.add(node, "repeat_interleave", bias, math.prod(stride))
    around = [t - 1 for t in taps]
    y = builder.call(node, _KINDS[rank], given["input"], weight, bias, padding=tuple(around), groups=groups)
    y = _interleave(node, y, stride, value.shape[1] * groups)
    sizes = [
        (n - 1) * s - 2 * p + k + e
        for n, s, p, k, e in zip(shape[2:], stride, padding, kernel, extra, strict=True)
    ]
    made = [(n + a) * s for n, a, s in zip(shape[2:], around, stride, strict=True)]
    y = _cut(node, y, padding, sizes, made)
    y.meta["value"] = node.meta.get("value")
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)
    return None


def _given(builder: OperatorBuilder, node: fx.Node) -> dict[str, Any]:
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    if node.op == "call_function":
        return defaults | dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    module: Any = module_of(node)
    found = {key: getattr(module, key) for key in defaults if key != "bias"}
    names = ["weight"] + ["bias"] * (module.bias is not None)
    tensors = {name: builder.attribute(node, f"{node.target}.{name}") for name in names}
    return defaults | found | tensors | {"input": node.args[0]}


def _each(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [int(v) for v in values] * (rank if len(values) == 1 else 1)


def _interleave(node: fx.Node, y: fx.Node, stride: Sequence[int], channels: int) -> fx.Node:
    """Interleaves the phases: [N, C·s·..., H, ...] → [N, C, H·s, ...]."""
    rank = len(stride)
    if math.prod(stride) == 1:
        return y
    if rank == 2 and stride[0] == stride[1]:
        return _new(node, "shuffle", F.pixel_shuffle, y, stride[0])
    y = _new(node, "unflatten", "unflatten", y, 1, (channels, *stride))
    axes = [axis for i in range(rank) for axis in (2 + rank + i, 2 + i)]
    y = _new(node, "permute", "permute", y, 0, 1, *axes)
    for i in range(rank):
        y = _new(node, f"flatten_{i}", "flatten", y, 2 + i, 3 + i)
    return y


def _cut(
    node: fx.Node, y: fx.Node, begin: Sequence[int], sizes: Sequence[int], made: Sequence[int]
) -> fx.Node:
    """Cuts each axis of `y` to the part that is the output of the transposed convolution."""
    if list(sizes) == list(made) and not any(begin):
        return y
    # Ends are counted from the back, which is correct for inputs of any size.
    rests = [m - b - size for b, size, m in zip(begin, sizes, made, strict=True)]
    parts = [slice(b, -rest if rest else None) for b, rest in zip(begin, rests, strict=True)]
    return _new(node, "cut", operator.getitem, y, (slice(None), slice(None), *parts))


def _new(node: fx.Node, what: str, target: Any, *args: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        call = node.graph.call_method if isinstance(target, str) else node.graph.call_function
        new = call(target, args)
    new.meta["site"] = f"{site(node)}_{what}"
    new.meta[OWNER] = owner(node) or site(node)
    return new
