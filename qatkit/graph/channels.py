"""Follows the channels of an operator's output: where each is in later values, and which operators read it.

Every channel gets a number, and the numbers are passed through the later operators as if they were values. A reshape
moves them, a pooling of equal numbers keeps them, and a matrix product with another tensor keeps them along the axes
that it does not sum over. Where a Conv or Linear reads them, each of its input channels must have a single number.
Views, chunks, windows, heads and flattens therefore need no special cases.

A channel is `free` if all operators that read it commute with a positive factor until a Conv or Linear, whose weight
can compensate for the factor. For shifts (`follow_shifts`) the factor is replaced by an added constant, for
which the bias of the Conv or Linear compensates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.graph.node_arguments import parameter_of, shape_of
from qatkit.graph.nodes import called, facts, module_of, op_class, site
from qatkit.graph.quantizers import is_quantizer
from qatkit.quant.computed_weights import Computed
from qatkit.quant.fake_quantize import FakeQuantize

# Functions and methods that move values and have no class in the operator table.
_MOVERS = frozenset(
    {"roll", "expand", "expand_as", "repeat", "repeat_interleave", "flip", "narrow", "select", "unbind"}
    | {"movedim", "moveaxis", "stack", "tile", "view_as", "reshape_as", "T", "mT"}
)


@dataclass(frozen=True)
class Reader:
    """A Conv or Linear that reads channels of the source.

    Attributes:
        node: the call of the Conv or Linear.
        channels: the channel of the source in each input channel, -1 for none; int64 [input channels].
    """

    node: fx.Node
    channels: Tensor


@dataclass
class Followed:
    """The result of following the channels of one operator's output.

    Attributes:
        free: whether each channel can be scaled (or shifted), bool [channels]; False for a channel that none of the
            `readers` reads.
        readers: the operators that compensate for the factors (or shifts).
        added: parameters that are added to the channels before the readers; each with an int64 tensor of its shape
            that has the channel of every value, -1 for none.
        why: the first reason why a channel is not free; "" if there is none.
    """

    free: Tensor
    readers: list[Reader] = field(default_factory=list)
    added: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    why: str = ""


def follow(source: fx.Node, axis: int, reads: Mapping[int, int]) -> Followed:
    """Follows the channels of a node's output through all values computed from it.

    Args:
        source: a node of a graph whose nodes have their shapes (`trace.propagate`, `prepare_qat`).
        axis: the negative index of the channel axis.
        reads: how often each parameter is read (`nodes.parameter_reads`).
    """
    shape = shape_of(source)
    assert shape is not None
    return _Follower(source, shape, axis, reads).run()


def follow_shifts(source: fx.Node, axis: int, reads: Mapping[int, int]) -> Followed:
    """Follows constants that are added to the channels, instead of factors (see `follow`).

    Constants pass through operators that move values, and through sums with weights that add up to 1, as in attention.
    An operator that pads, has no bias of its own or still has its BatchNorm cannot compensate for them.
    """
    shape = shape_of(source)
    assert shape is not None
    return _ShiftFollower(source, shape, axis, reads).run()


class _Follower:
    """A walk through the graph along the channels.

    Attributes:
        numbers: for each node, 1 + the channel of every value; 0 for a value that belongs to no channel.
    """

    def __init__(self, source: fx.Node, shape: tuple[int, ...], axis: int, reads: Mapping[int, int]) -> None:
        own = torch.arange(1, shape[axis] + 1, dtype=torch.float64)
        own = own.view([-1 if d == axis % len(shape) else 1 for d in range(len(shape))])
        self.source, self.reads = source, reads
        self.numbers: dict[fx.Node, Any] = {source: own.expand(shape).clone()}
        self.found = Followed(torch.ones(shape[axis], dtype=torch.bool))

    def run(self) -> Followed:
        node = self.source.next
        left = dict.fromkeys(self.source.users)
        while left:
            if node in left:
                del left[node]
                self._visit(node)
                if node in self.numbers:
                    left |= dict.fromkeys(node.users)
            node = node.next
        reached = torch.zeros_like(self.found.free)
        for reader in self.found.readers:
            reached[reader.channels[reader.channels >= 0]] = True
        self.found.free &= reached
        return self.found

    def _visit(self, node: fx.Node) -> None:
        if facts(node).weighted and node.op == "call_module":
            self._read(node)
            return
        try:
            result = self._passed(node)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            result = None  # its effect on channel numbers is unknown
        if result is None:
            end = node.op == "output"  # no reason is needed for channels that reach an output
            self._hold(node, "" if end else f"{site(node)} ({_kind(node)}) does not scale channel by channel")
        else:
            self.numbers[node] = result

    def _hold(self, node: fx.Node, reason: str) -> None:
        """Marks as not free the channels that `node` reads, and records the reason if it is the first."""
        for operand in node.all_input_nodes:
            for part in _tensors(self.numbers.get(operand)):
                held = part.unique().long()
                self.found.free[held[held > 0] - 1] = False
        self.found.why = self.found.why or reason

    def _read(self, node: fx.Node) -> None:
        """Records a Conv or Linear as a reader: its output no longer belongs to these channels."""
        module, numbers = module_of(node), self.numbers.get(cast(fx.Node, node.args[0]))
        weight = cast(Tensor, module.weight)
        axis = -1 if op_class(node) == "linear" else 1 - weight.ndim
        if isinstance(module, Computed):
            self._hold(node, f"the weight or bias of {site(node)} is computed from other parameters")
        elif self.reads[id(weight)] > 1:
            self._hold(node, f"{site(node)} is called more than once, or something else reads its weight")
        else:
            channels = _along(numbers, axis) if isinstance(numbers, Tensor) else None
            if channels is None:
                self._hold(node, f"{site(node)} does not read the channels along its input axis")
            else:
                self.found.readers.append(Reader(node, channels.long() - 1))

    def _passed(self, node: fx.Node) -> Any:
        """Returns the numbers after a node that commutes with factors; None for any other node."""
        kind, record = op_class(node), facts(node)
        numbers = [self.numbers.get(operand) for operand in node.all_input_nodes]
        if is_quantizer(node):
            bounds = cast(FakeQuantize, module_of(node)).bounds
            return numbers[0] if bounds in ((None, None), (0.0, None)) else None
        if record.homogeneous and record.values == "moved" and kind == "pass":
            return numbers[0]
        if record.pools or kind == "mean":
            return self._pooled(node)
        if kind in ("mul", "add", "matmul"):
            return _ARITHMETIC[kind](self, node)
        if record.homogeneous or kind in ("shape", "cat") or called(node) in _MOVERS:
            return self._run(node, lambda x: x)
        return None

    def _run(self, node: fx.Node, change: Callable[[Tensor], Tensor]) -> Any:
        """Runs the operator of a node on numbers changed by `change`; operands without channels are zeros."""

        def value(operand: fx.Node) -> Any:
            known = self.numbers.get(operand)
            if known is not None:
                return change(known) if isinstance(known, Tensor) else type(known)(map(change, known))
            found = operand.meta.get("value")
            if not isinstance(found, Tensor):
                return found
            if not found.is_floating_point():
                raise ValueError("the channels depend on indices that are known only in a run")
            return torch.zeros(found.shape, dtype=torch.float64)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        if node.op == "call_module":
            return module_of(node)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return cast(Any, node.target)(*args, **kwargs)

    def _pooled(self, node: fx.Node) -> Tensor | None:
        """Returns the numbers after a mean or maximum of equal numbers; None if the numbers differ."""
        share = self._run(node, torch.ones_like)
        lowest = -self._run(node, torch.neg) / share
        mean, square = (self._run(node, f) / share for f in (torch.clone, torch.square))
        same = torch.allclose(mean, lowest) and torch.allclose(square, mean.square())
        return cast(Tensor, mean.round()) if same else None

    def _mul(self, node: fx.Node) -> Tensor | None:
        """Returns the numbers after a product with a Python number or with values without channels; else None."""
        own = [n for n in node.all_input_nodes if n in self.numbers]
        if len(own) != 1 or sum(n is own[0] for n in node.args) != 1:
            return None
        return cast(Tensor, self.numbers[own[0]].expand(shape_of(node)).clone())

    def _add(self, node: fx.Node) -> Tensor | None:
        """Returns the numbers after adding a parameter, which is recorded, since it is scaled too.

        Returns None for any other sum, and if something else reads the parameter.
        """
        own = [n for n in node.all_input_nodes if n in self.numbers]
        others = [n for n in node.args if n not in own]
        parameter = parameter_of(others[0]) if len(own) == len(others) == 1 else None
        if not isinstance(parameter, torch.nn.Parameter) or self.reads[id(parameter)] > 1 or node.kwargs:
            return None
        numbers = self.numbers[own[0]].expand(shape_of(node))
        channels = _as(numbers, tuple(parameter.shape))
        if channels is None:
            return None
        self.found.added.append((parameter, channels.long() - 1))
        return cast(Tensor, numbers.clone())

    def _matmul(self, node: fx.Node) -> Tensor | None:
        """Returns the numbers after a product that sums over equal numbers, such as attention times v; else None."""
        found = [self.numbers.get(cast(fx.Node, operand)) for operand in node.args[:2]]
        known = [
            (numbers, axis) for numbers, axis in zip(found, (-1, -2), strict=True) if numbers is not None
        ]
        if len(known) != 1 or known[0][0].ndim < 2:
            return None
        numbers, axis = known[0]  # the numbers, and the axis that is summed over
        if not torch.equal(numbers.amax(axis), numbers.amin(axis)):
            return None
        return cast(Tensor, numbers.amax(axis, keepdim=True).expand(shape_of(node)).clone())


class _ShiftFollower(_Follower):
    """The walk for added constants, which commute with fewer operators than factors do."""

    def _read(self, node: fx.Node) -> None:
        module = module_of(node)
        padded = any(getattr(module, "padding", ()))  # the padded zeros are not shifted
        alone = module.bias is not None and self.reads[id(module.bias)] == 1
        if padded or not alone or getattr(module, "bn", None) is not None:
            self._hold(node, f"{site(node)} pads, has no bias of its own or still has its BatchNorm")
        else:
            super()._read(node)

    def _passed(self, node: fx.Node) -> Any:
        kind, record = op_class(node), facts(node)
        if is_quantizer(node):
            free = cast(FakeQuantize, module_of(node)).bounds == (None, None)
            return self.numbers[node.all_input_nodes[0]] if free else None
        if kind == "matmul":
            return self._matmul(node) if _sums_to_one(cast(fx.Node, node.args[0])) else None
        if record.values == "moved" or kind in ("shape", "cat") or called(node) in _MOVERS:
            return super()._passed(node)
        return None


def _sums_to_one(node: fx.Node) -> bool:
    """Returns whether a node is a softmax over the last axis, disregarding dropout and quantization."""
    while is_quantizer(node) or op_class(node) == "pass":
        node = node.all_input_nodes[0]
    if op_class(node) != "softmax":
        return False
    axis = (
        module_of(node).dim
        if node.op == "call_module"
        else node.kwargs.get("dim", (*node.args, None, None)[1])
    )
    rank = len(shape_of(node) or ())
    return axis in (-1, rank - 1)


_ARITHMETIC: dict[str, Callable[[_Follower, fx.Node], Tensor | None]] = {
    "mul": _Follower._mul,
    "add": _Follower._add,
    "matmul": _Follower._matmul,
}


def _along(numbers: Tensor, axis: int) -> Tensor | None:
    """Returns the only number at each position of an axis, [size of `axis`]; None if a position has several numbers."""
    rows = numbers.movedim(axis, 0).flatten(1)
    return rows[:, 0] if torch.equal(rows.amax(1), rows.amin(1)) else None


def _as(numbers: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Returns the numbers of a tensor of `shape` that is broadcast to `numbers`; None if a value would have several."""
    padded = (1,) * (numbers.ndim - len(shape)) + shape
    for axis, size in enumerate(padded):
        if size == 1:
            low, high = numbers.amin(axis, keepdim=True), numbers.amax(axis, keepdim=True)
            if not torch.equal(low, high):
                return None
            numbers = low
    return numbers.reshape(shape)


def _tensors(numbers: Any) -> list[Tensor]:
    if numbers is None:
        return []
    return [numbers] if isinstance(numbers, Tensor) else [part for part in numbers if part is not None]


def _kind(node: fx.Node) -> str:
    kind = op_class(node)
    return called(node) if kind == "other" and node.op != "call_module" else kind
