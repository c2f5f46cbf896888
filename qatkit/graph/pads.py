"""Turns the padding of modules and convolutions into a separate operator, which only moves values.

    nn.ZeroPad2d(p), nn.ReflectionPad2d(p), ...     →  F.pad
    nn.Conv2d(..., padding_mode="reflect")          →  F.pad, Conv2d without padding
    F.pad(x, (l, r), "circular")                    →  cat of slices; an ONNX Pad can't wrap before opset 19

Every range contains zero, so a padding with zeros or existing values needs no range of its own: it runs on
bytes, and the quantizer of its output moves up before it. The export writes zeros around an image into the
`pads` of the convolution that reads them (`qatkit.export.pads`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from qatkit.graph.node_arguments import arguments, shape_of
from qatkit.graph.nodes import module_of, op_class, site
from qatkit.quant.qat_layers import with_the_same_parameters

_Conv = nn.modules.conv._ConvNd
_PADDING = nn.modules.padding
# The mode of F.pad for each type of module.
_MODES: dict[type[nn.Module], str] = {
    _PADDING._ConstantPadNd: "constant",
    _PADDING._ReflectionPadNd: "reflect",
    _PADDING._ReplicationPadNd: "replicate",
    _PADDING._CircularPadNd: "circular",
}


def open_pads(graph_module: fx.GraphModule) -> None:
    """Turns the paddings of a traced graph into separate operators, in place."""
    opened: dict[str, tuple[list[int], str]] = {}
    for node in [n for n in graph_module.graph.nodes if n.op == "call_module"]:
        module, path = module_of(node), str(node.target)
        mode = next((mode for kind, mode in _MODES.items() if isinstance(module, kind)), None)
        if mode is not None:
            _module_to_function(node, mode)
        elif path in opened:
            _pad_before(node, *opened[path])
        elif isinstance(module, _Conv) and op_class(node) == "conv" and module.padding_mode != "zeros":
            opened[path] = list(module._reversed_padding_repeated_twice), module.padding_mode
            graph_module.set_submodule(path, _without_padding(module))
            _pad_before(node, *opened[path])
    for node in [n for n in graph_module.graph.nodes if n.target is F.pad]:
        given = arguments(node, F.pad)
        if given["mode"] == "circular" and all(isinstance(a, int) and a >= 0 for a in given["pad"]):
            _wrap(node, given["input"], given["pad"])


def _wrap(node: fx.Node, x: fx.Node, amounts: Sequence[int]) -> None:
    """Replaces `node` by a circular padding of `x`: each axis is extended by values from its other end.

    `amounts` are in the order of F.pad, with the last axis first.
    """
    for i in range(0, len(amounts), 2):
        (before, after), axis = amounts[i : i + 2], -1 - i // 2
        every = [slice(None)] * (-1 - axis)
        with node.graph.inserting_before(node):
            ends = [
                node.graph.call_function(operator.getitem, (x, cast(Any, (..., part, *every))))
                for part in (slice(-before, None), slice(0, after))
            ]
            joined = [*ends[: bool(before)], x, *(ends[1:] if after else [])]
            x = node.graph.call_function(torch.cat, (joined, axis))
        for new, what in zip((*ends, x), ("before", "after", "cat"), strict=True):
            new.meta["site"] = f"{site(node)}.{what}{i // 2 or ''}"
    node.replace_all_uses_with(x)
    node.graph.erase_node(node)


def _module_to_function(node: fx.Node, mode: str) -> None:
    module: Any = module_of(node)
    value = {"value": module.value} if mode == "constant" else {}
    with node.graph.inserting_before(node):
        new = node.graph.call_function(F.pad, (node.args[0], list(module.padding), mode), value)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _pad_before(node: fx.Node, amounts: list[int], mode: str) -> None:
    with node.graph.inserting_before(node):
        padded = node.graph.call_function(F.pad, (node.args[0], list(amounts), mode))
    padded.meta["site"] = f"{site(node)}_pad"
    node.args = (padded,)


def _without_padding(conv: nn.modules.conv._ConvNd) -> nn.Module:
    """Returns a convolution with the same parameters for an input that is already padded."""
    new: Any = with_the_same_parameters(cast(nn.Module, conv))
    new.padding, new.padding_mode = (0,) * len(conv.kernel_size), "zeros"
    new._reversed_padding_repeated_twice = [0] * (2 * len(conv.kernel_size))
    return cast(nn.Module, new)


def belongs_to(pad: fx.Node, reader: fx.Node) -> bool:
    """Returns whether a padding can be part of a convolution that reads it: it adds only zeros around the image."""
    shape = shape_of(pad)
    if op_class(pad) != "pad" or pad.op != "call_function" or shape is None:
        return False
    given = arguments(pad, F.pad)
    amounts = given["pad"]
    return (
        given["mode"] == "constant"
        and reader.args[0] is pad
        and all(isinstance(a, int) and a >= 0 for a in amounts)
        and len(amounts) <= 2 * (len(shape) - 2)
    )
