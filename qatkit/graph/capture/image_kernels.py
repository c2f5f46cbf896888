"""Rewrites convolutions with a kernel for each image.

In such a convolution each image of the batch is one group. An ONNX file has a fixed number of groups, so it could not
be run with other batch sizes.

    conv2d(x [1, B·C, H, W], w [B·D, C, k, k], groups=B)   →  w [B, D, C·k·k] @ unfold(x [B, C, H, W]), [1, B·D, …]
    conv_transpose2d(x, w [B·C, D, k, k], groups=B)        →  fold(w [B, C, D·k·k]ᵀ @ x [B, C, H·W])

CondConv, StyleGAN2's modulated convolutions and the correlations of Siamese trackers are written in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_NAMES: dict[Any, tuple[str, ...]] = {
    F.conv1d: _CONV,
    F.conv2d: _CONV,
    F.conv_transpose2d: _TRANSPOSED,
}


def open_image_kernels(graph: fx.Graph) -> int:
    """Rewrites, in place, the convolutions whose groups are the images of the batch; returns their number."""
    changed = 0
    for node in list(graph.nodes):
        names = _NAMES.get(node.target) if node.op == "call_function" else None
        given = dict(zip(names, node.args, strict=False)) | node.kwargs if names else {}
        if not isinstance(given.get("groups"), fx.Node):
            continue
        shapes = [given[name].meta.get("shape") for name in ("input", "weight")]
        if None in shapes or shapes[0][0] != 1:
            continue
        writer = _Writer(node, given, *shapes)
        with graph.inserting_before(node):
            new = writer.transposed() if node.target is F.conv_transpose2d else writer.conv()
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        changed += 1
    return changed


class _Writer:
    """A writer that rewrites one convolution in front of its node."""

    def __init__(
        self, node: fx.Node, given: dict[str, Any], x: tuple[int, ...], weight: tuple[int, ...]
    ) -> None:
        self.node, self.given, self.x, self.weight = node, given, x, weight
        self.result: tuple[int, ...] = node.meta["shape"]
        self.flat = len(x) == 3  # a 1-D convolution

    def conv(self) -> fx.Node:
        inputs, kernel = self.weight[1], self.pair(self.weight[2:], 1)
        groups = self.x[1] // inputs
        outputs = self.weight[0] // groups
        stride, dilation = (self.pair(self.given.get(name, 1), 1) for name in ("stride", "dilation"))
        padding = self.given.get("padding", 0)
        x = self.call("reshape", self.given["input"], -1, inputs, *self.pair(self.x[2:], 1))
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            ends = [end for size in reversed(total) for end in (size // 2, size - size // 2)]
            x = self.function(F.pad, x, ends)
        pads = (0, 0) if isinstance(padding, str) else self.pair(padding, 0)
        if kernel == (1, 1) == stride and pads == (0, 0):
            columns = self.call("flatten", x, 2)
        else:
            columns = self.function(F.unfold, x, kernel, dilation, pads, stride)
        rows = self.call("reshape", self.given["weight"], -1, outputs, inputs * kernel[0] * kernel[1])
        return self.joined(self.function(torch.matmul, rows, columns), outputs)

    def transposed(self) -> fx.Node:
        groups = 1 if not self.x[1] else self.result[1] // self.weight[1]
        inputs, outputs, kernel = self.weight[0] // groups, self.weight[1], self.weight[2:]
        stride, dilation = (self.pair(self.given.get(name, 1), 1) for name in ("stride", "dilation"))
        x = self.call("reshape", self.given["input"], -1, inputs, self.x[2] * self.x[3])
        rows = self.call("reshape", self.given["weight"], -1, inputs, outputs * kernel[0] * kernel[1])
        columns = self.function(torch.matmul, self.call("transpose", rows, 1, 2), x)
        pads = self.pair(self.given.get("padding", 0), 0)
        y = self.function(F.fold, columns, tuple(self.result[2:]), tuple(kernel), dilation, pads, stride)
        return self.joined(y, outputs)

    def joined(self, y: fx.Node, outputs: int) -> fx.Node:
        """Adds the bias to `y` [B, D, …] and returns it as [1, B·D, …]."""
        if self.given.get("bias") is not None:
            bias = self.call(
                "reshape", self.given["bias"], -1, outputs, *[1] * (len(self.weight) - 1 - self.flat)
            )
            y = self.function(torch.add, self.call("flatten", y, 2), self.call("flatten", bias, 2))
        return self.call("reshape", y, 1, -1, *self.result[2:])

    def pair(self, value: Any, other: int) -> tuple[int, ...]:
        """Returns a number for each of two axes; a 1-D convolution has `other` for the axis that it lacks."""
        found = (value,) * (len(self.x) - 2) if isinstance(value, int) else tuple(value)
        found = found * 2 if len(found) == 1 and not self.flat else found
        return (other, *found) if self.flat else found

    def call(self, name: str, *args: Any) -> fx.Node:
        return self.marked(self.node.graph.call_method(name, args))

    def function(self, what: Callable[..., Tensor], *args: Any) -> fx.Node:
        return self.marked(self.node.graph.call_function(what, args))

    def marked(self, new: fx.Node) -> fx.Node:
        new.meta |= {key: value for key, value in self.node.meta.items() if key != "shape"}
        return new
