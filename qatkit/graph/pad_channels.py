"""Pads channels with zeros to the multiples that a backend's int8 kernels need (`Backend.channel_multiples`).

    Conv 16→72 → depthwise 72 → Conv 72→24     Conv 16→80 → depthwise 80 → Conv 80→24
    image, 3 channels → Conv 3→64              image → Pad of its bytes → Conv 4→64

ONNX Runtime has a fast depthwise kernel only for multiples of 16 channels, and a fast convolution only for multiples
of 4 (docs/onnxruntime-qdq.md, 3b; for the gain of each see decision 29). No result changes. The added filters and
biases are 0, so the new channels contain zeros (or the values to which activations map zero), and the weights that read
them are 0 too. The integer sums stay the same, and so do the scales that they are multiplied by.

Tensors that share their channels are widened together or not at all. Such a group runs from the convolutions that
compute the tensors, through depthwise convolutions, activations, pools, gates and sums, to the convolutions that read
them. The whole group stays unchanged if another operator reads one of the tensors, if one is an output of the
graph, or if one belongs to an operator that stays float. `qatkit.graph.channels` cannot find these groups: the factors
that it follows do not pass through gates and sums, while zeros do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.convert.integer_modules import (
    Quantized,
    QuantizeDequantize,
    QuantizedHardSigmoid,
    QuantizedPair,
)
from qatkit.graph.node_arguments import arguments, shape_of
from qatkit.graph.nodes import is_depthwise, module_of, op_class, site
from qatkit.graph.pads import belongs_to
from qatkit.graph.trace import tidy

# The largest number of added channels, as a fraction of the existing ones: they cost time in neighbouring operators.
_MOST = 1 / 3
# For an image: the largest number of products added to each sum. 49 products (7x7, 3 channels) still save time, 98 and
# more cost time.
_MOST_PRODUCTS = 50
# With fewer outputs there is no fast kernel, whatever the number of inputs is.
_LEAST_OUTPUTS = 16
_INTEGER = (QuantizeDequantize, QuantizedHardSigmoid, QuantizedPair)
_CHANNELWISE = frozenset(
    {"relu", "relu6", "leaky_relu", "sigmoid", "hardsigmoid", "silu", "hardswish", "gelu", "add", "mul"}
    | {"max_pool", "avg_pool", "global_pool", "mean"}
)


@dataclass
class _Widening:
    """A group of tensors that share their channels, and the convolutions affected by widening them.

    Attributes:
        extra: the number of channels to add.
        tensors: the tensors that get the channels.
        makers: the convolutions that compute the tensors.
        between: the depthwise convolutions between the tensors.
        readers: the convolutions that read the tensors.
        source: for an image, the quantized tensor that is padded for the reader; None for inner tensors.
    """

    extra: int = 0
    tensors: set[fx.Node] = field(default_factory=set)
    makers: set[fx.Node] = field(default_factory=set)
    between: set[fx.Node] = field(default_factory=set)
    readers: set[fx.Node] = field(default_factory=set)
    source: fx.Node | None = None


def pad_channels(converted: fx.GraphModule, multiples: Mapping[str, int]) -> int:
    """Pads the channels of tensors and convolutions of a converted graph, in place.

    Args:
        converted: the converted graph.
        multiples: the multiples of channels that the kernels need, for "conv" and "depthwise"; if empty, nothing is
            done.

    Returns:
        The number of groups of tensors that were widened.
    """
    if not multiples:
        return 0
    found = [*_inside(converted.graph, multiples), *_images(converted.graph, multiples["conv"])]
    chosen = _alike(converted.graph, found)
    for one in chosen:
        if one.source is not None:
            _pad_bytes(one)
        for node in one.tensors:
            node.meta["value"] = _widened(node.meta.get("value"), one.extra)
    changes = _changes(chosen)
    for path, (inputs, outputs) in {str(node.target): change for node, change in changes.items()}.items():
        cast(Quantized, converted.get_submodule(path)).widen(inputs, outputs)
    tidy(converted)
    return len(chosen)


def _inside(graph: fx.Graph, multiples: Mapping[str, int]) -> list[_Widening]:
    """Finds the groups of inner tensors that need few more channels to reach the multiple of the kernels.

    Groups in which all tensors have a single spatial position are left out.
    """
    found, seen = [], set[fx.Node]()
    for node in graph.nodes:
        if not _is_convolution(node) or node in seen:
            continue
        widening, can = _shared(node)
        seen |= widening.tensors
        # Tensors with one spatial position, as in squeeze-and-excitation gates, would gain nothing.
        if can and any(max(_shape(tensor)[2:]) > 1 for tensor in widening.tensors):
            channels = _shape(node)[1]
            widening.extra = -channels % multiples["depthwise" if widening.between else "conv"]
            if 0 < widening.extra <= _MOST * channels:
                found.append(widening)
    return found


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's tensor; () if its output is not a tensor."""
    if node.target is torch.ops.qatkit.barrier:
        return _shape(node.all_input_nodes[0])
    return shape_of(node) or ()


def _shared(start: fx.Node) -> tuple[_Widening, bool]:
    """Returns the group of tensors that share their channels with `start`'s output, and whether it can be widened."""
    channels = _shape(start)[1]
    found, waiting, can = _Widening(), [start], True
    while waiting:
        node = waiting.pop()
        if node in found.tensors:
            continue
        found.tensors.add(node)
        can = can and len(_shape(node)) == 4 and _shape(node)[1] == channels
        if _is_dense(node):
            found.makers.add(node)
        elif _is_channelwise(node):
            waiting += node.all_input_nodes
        else:
            can = False
        if _is_depthwise(node):
            found.between.add(node)
        found.readers |= {user for user in node.users if _is_dense(user)}
        others = [user for user in node.users if not _is_dense(user)]
        waiting += [user for user in others if _is_channelwise(user)]
        can = can and all(map(_is_channelwise, others))
    return found, can


def _is_convolution(node: fx.Node) -> bool:
    """Returns whether a node is an int8 Conv2d, dense or depthwise."""
    return _is_dense(node) or _is_depthwise(node)


def _settings(node: fx.Node) -> nn.Conv2d | None:
    module = module_of(node) if node.op == "call_module" else None
    bare = module.operator.bare if isinstance(module, Quantized) else None
    return bare if isinstance(bare, nn.Conv2d) else None


def _is_dense(node: fx.Node) -> bool:
    conv = _settings(node)
    return conv is not None and conv.groups == 1


def _is_depthwise(node: fx.Node) -> bool:
    conv = _settings(node)
    return conv is not None and is_depthwise(conv)


def _is_channelwise(node: fx.Node) -> bool:
    """Returns whether each output channel depends only on the same channel of the operands."""
    if node.op == "call_module" and isinstance(module_of(node), _INTEGER):
        return True
    if op_class(node) == "pad":
        return node.op == "call_function" and len(arguments(node, F.pad)["pad"]) <= 4
    return op_class(node) in _CHANNELWISE or node.target is torch.ops.qatkit.barrier or _is_depthwise(node)


def _images(graph: fx.Graph, multiple: int) -> list[_Widening]:
    """Finds the convolutions that read a quantized input of the graph and become faster if its channels are padded."""
    found = []
    for node in filter(_is_dense, graph.nodes):
        conv, source = cast(nn.Conv2d, _settings(node)), _unpadded(node)
        pair = source.op == "call_module" and isinstance(module_of(source), QuantizeDequantize)
        if not pair or _unpadded(source).op != "placeholder":
            continue
        extra = -conv.in_channels % multiple
        pays = 0 < extra * conv.kernel_size[0] * conv.kernel_size[1] <= _MOST_PRODUCTS
        if pays and conv.out_channels % multiple == 0 and conv.out_channels >= _LEAST_OUTPUTS:
            found.append(_Widening(extra, readers={node}, source=source))
    return found


def _unpadded(node: fx.Node) -> fx.Node:
    """Returns the first input of a node, or what that was before zero paddings that nothing else reads."""
    source = cast(fx.Node, node.args[0])
    while belongs_to(source, node) and len(source.users) == 1:
        node, source = source, cast(fx.Node, source.args[0])
    return source


def _alike(graph: fx.Graph, found: list[_Widening]) -> list[_Widening]:
    """Drops groups that would pad operators with equal weights differently.

    The file stores equal weights only once.
    """
    tied = defaultdict[Any, list[fx.Node]](list)
    for node in filter(_is_convolution, graph.nodes):
        weight = cast(Quantized, module_of(node)).weight
        tied[tuple(weight.shape), weight.numpy().tobytes()].append(node)
    while True:
        changes = _changes(found)
        sets = [same for same in tied.values() if len({changes.get(node) for node in same}) > 1]
        unlike = {node for same in sets for node in same}
        kept = [one for one in found if not unlike & (one.makers | one.between | one.readers)]
        if len(kept) == len(found):
            return kept
        found = kept


def _changes(found: Iterable[_Widening]) -> dict[fx.Node, tuple[int, int]]:
    """Returns the numbers of input and output channels that are added to each convolution."""
    changes: dict[fx.Node, tuple[int, int]] = {}
    for one in found:
        for node in one.makers | one.between | one.readers:
            inputs, outputs = changes.get(node, (0, 0))
            if node in one.between or node in one.readers:
                inputs += one.extra
            if node in one.between or node in one.makers:
                outputs += one.extra
            changes[node] = inputs, outputs
    return changes


def _pad_bytes(one: _Widening) -> None:
    """Pads the channels of a quantized image and quantizes it again; exported as one Pad of bytes (`export.pads`)."""
    source, (reader,) = cast(fx.Node, one.source), one.readers
    while (before := cast(fx.Node, reader.args[0])) is not source:
        reader = before  # the spatial zero padding stays a part of the convolution
    with source.graph.inserting_after(source):
        padded = source.graph.call_function(F.pad, (source, _behind(one.extra)))
    with source.graph.inserting_after(padded):
        again = source.graph.call_module(str(source.target), (padded,))
    value = _widened(source.meta["value"], one.extra)
    padded.meta = {"site": f"{site(source)}_pad", "value": value}
    again.meta = {**source.meta, "site": f"{site(source)}_pad_quant", "value": value}
    reader.replace_input_with(source, again)


def _widened(value: Any, extra: int) -> Any:
    return F.pad(value, _behind(extra)) if isinstance(value, Tensor) else value


def _behind(extra: int) -> list[int]:
    """Returns the padding, in the order of `F.pad`, that appends `extra` channels to an image."""
    return [0, 0, 0, 0, 0, extra]
