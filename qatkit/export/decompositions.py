"""Runs only the decompositions that an exported program needs.

torch's exporter traces every program a second time, operator by operator, to decompose operators that it cannot
translate. This takes about 45 % of the CPU time of an export (torch 2.13; ResNet-18 3.1 of 7.4 s, Swin-T 15 of 39 s),
but changes little except a few operators that move values, and global average pools. This module decomposes these
operators node by node, with the same result. If a program needs other decompositions as well, the exporter's own step
runs afterwards.

There is no public interface for this. If a later version of the exporter works differently, its own step runs
unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from qatkit.export.replaced import replaced

_aten = torch.ops.aten


@contextmanager
def decomposed_where_needed(way_out: str = "") -> Iterator[None]:
    """Decomposes a program node by node within one export; torch's exporter then does the rest, if there is any.

    Args:
        way_out: advice for the end of the error message about an operator that needs a fixed size.

    Raises:
        ValueError: the exporter's own step would replace a dynamic size by a number.
    """
    try:
        from torch.onnx._internal.exporter import _fx_passes
    except ImportError:
        yield
        return
    decompose = getattr(_fx_passes, "decompose_with_registry", None)
    if decompose is None:
        yield
        return

    def where_needed(program: ExportedProgram, registry: Any) -> ExportedProgram:
        functions = getattr(registry, "functions", {})
        translated = {getattr(way, "fx_target", None) for ways in functions.values() for way in ways[:1]}
        if _written_out(program.graph_module, translated):
            return program
        with _no_size_fixed(way_out):
            return cast(ExportedProgram, decompose(program, registry))

    with replaced(_fx_passes, "decompose_with_registry", where_needed):
        yield


@contextmanager
def _no_size_fixed(way_out: str) -> Iterator[None]:
    """Raises ValueError within the context if a dynamic size is used as a number.

    The exporter would write the example's size into the file, which would be wrong for other sizes.
    """
    from torch.fx.experimental.sym_node import SymNode

    guard = SymNode.guard_int

    def refuse(self: SymNode, file: str, line: int) -> int:
        if self.expr.free_symbols:
            raise ValueError(f"an operator works only at the size of the example{way_out}")
        return guard(self, file, line)

    with replaced(SymNode, "guard_int", refuse):
        yield


def _written_out(program: fx.GraphModule, translated: Container[Any]) -> bool:
    """Applies the rules, and returns whether the exporter can translate the program without decomposing it.

    In a program with branches, loops or several non-integer types, only adaptive pools are replaced, and the result is
    False.

    Args:
        program: the graph of the program, changed in place.
        translated: the operators that the exporter can translate.
    """
    for node in list(
        program.graph.nodes
    ):  # in every program, because the exporter's adaptive pools need windows of equal size
        if node.op == "call_function" and node.target in _POOLS:
            _as_mean(node)
    program.recompile()
    if any(isinstance(part, fx.GraphModule) for part in program.children()):  # branches and loops
        return False
    values = [node.meta.get("val") for node in program.graph.nodes]
    if len({x.dtype for x in values if isinstance(x, torch.Tensor) and not _is_integer(x)}) > 1:
        return False  # the exporter's type promotions rely on the values of its second trace
    for node in list(program.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            rule(node)
    program.graph.eliminate_dead_code()
    program.recompile()
    return all(_stays(node.target, translated) for node in program.graph.nodes if node.op == "call_function")


def _is_integer(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _stays(target: Any, translated: Container[Any]) -> bool:
    """Returns whether the exporter leaves an operator as it is.

    The exporter decomposes operators without a translation, operators that write in place, and composite operators
    that may return a view of an argument.
    """
    if not isinstance(target, torch._ops.OpOverload) or target in _LEFT:
        return True
    shares_memory = any(value.alias_info is not None for value in target._schema.returns)
    composite = target._can_decompose()
    return target in translated and not target._schema.is_mutable and not (shares_memory and composite)


def _as_view(node: fx.Node) -> None:
    """Replaces a change of shape by `reshape` if this has to infer at most one size; removes it if nothing changes."""
    x, shape = cast(fx.Node, node.args[0]), node.meta["val"].shape
    if x.meta["val"].shape == shape:
        _leave_out(node)
        return
    sizes: list[int | fx.Node] = [size if isinstance(size, int) else -1 for size in shape]
    if sizes.count(-1) > 1 and node.target is not _aten.reshape.default:
        sizes = [size if isinstance(size, int) else _computed(size, node) for size in shape]
    if sizes.count(-1) <= 1 and 0 not in sizes:
        node.target, node.args, node.kwargs = _aten.reshape.default, (x, sizes), {}


def _computed(size: torch.SymInt, node: fx.Node) -> int | fx.Node:
    """Returns a node before `node` that computes `size`: an existing node, or a new one that reads an argument's shape.

    Returns -1 if no argument has this size.
    """
    for one in node.graph.nodes:
        if one is node:
            break
        if one.target is _aten.sym_size.int and _same(one, size):
            return cast(fx.Node, one)
    for x in node.all_input_nodes:
        for axis, other in enumerate(getattr(x.meta["val"], "shape", ())):
            if _same(size, other):
                with node.graph.inserting_before(node):
                    return _made(node, _aten.sym_size.int, (x, axis), other)
    return -1


def _leave_out(node: fx.Node) -> None:
    """Removes a node that changes nothing; an output becomes a copy instead, since the program refers to its name."""
    if any(user.op == "output" for user in node.users):
        node.target, node.args, node.kwargs = _aten.clone.default, (node.args[0],), {}
    else:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _as_copy(node: fx.Node) -> None:
    """Replaces `contiguous` by a copy with the same memory layout, on which later views may rely."""
    x, contiguous = node.args[0], torch.contiguous_format
    node.target, node.args, node.kwargs = _aten.clone.default, (x,), {"memory_format": contiguous}


def _as_cast(node: fx.Node) -> None:
    """Replaces a conversion by a cast, or removes it if the type stays the same."""
    x, kind = node.args[0], node.meta["val"].dtype
    if x.meta["val"].dtype == kind:  # type: ignore[union-attr]
        _leave_out(node)
    else:
        node.target, node.args, node.kwargs = _aten._to_copy.default, (x,), {"dtype": kind}


def _as_mean(node: fx.Node) -> None:
    """Replaces an adaptive average pool by a mean, if each axis is reduced to size 1 or keeps its size.

    A sequence becomes an image with one row, since only means of images have an int8 kernel.
    """
    x, size = cast(tuple[fx.Node, list[Any]], node.args)
    rank, shape = len(size), x.meta["val"].shape
    axes = [axis - rank for axis, one in enumerate(size) if isinstance(one, int) and one == 1]
    kept = [axis for axis in range(-rank, 0) if axis not in axes]
    if not axes or not all(_same(size[axis], shape[axis]) for axis in kept):
        return
    if rank == 1:
        with node.graph.inserting_before(node):
            x = _made(node, _aten.unsqueeze.default, (x, -2), x.meta["val"].unsqueeze(-2))
            x = _made(node, _aten.mean.dim, (x, [-1, -2], True), node.meta["val"].unsqueeze(-2))
        node.target, node.args = _aten.squeeze.dim, (x, -2)
    else:
        node.target, node.args = _aten.mean.dim, (x, axes[::-1], True)


def _same(size: Any, other: Any) -> bool:
    """Returns whether two sizes (numbers, or nodes that compute them) are equal for every size of the input."""
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    if isinstance(value, int) and isinstance(other, int):
        return value == other
    return (
        isinstance(value, torch.SymInt)
        and isinstance(other, torch.SymInt)
        and value.node.expr == other.node.expr
    )


def _made(node: fx.Node, target: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
    """Adds a call at the insertion point, with the metadata of `node` but another value."""
    made = node.graph.call_function(target, arguments)
    made.meta.update(node.meta, val=value)
    return made


def _as_split(node: fx.Node) -> None:
    """Replaces `chunk` by `split`, if the size of the axis is known."""
    x, count, axis = (*node.args, 0)[:3]
    size = x.meta["val"].shape[axis]  # type: ignore[union-attr]
    if isinstance(size, int):
        node.target, node.args = _aten.split.Tensor, (x, -(-size // count), axis)  # type: ignore[operator]


def _as_inference(node: fx.Node) -> None:
    """Replaces a BatchNorm in inference mode by the operator that the exporter translates."""
    x, weight, bias, mean, var, training, momentum, eps = node.args[:8]
    if training or mean is None or var is None:
        return
    arguments = (x, weight, bias, mean, var, momentum, eps)
    empty = mean.meta["val"].new_empty(0)  # type: ignore[union-attr]
    with node.graph.inserting_before(node):
        target = _aten._native_batch_norm_legit_no_training.default
        norm = _made(node, target, arguments, (node.meta["val"], empty, empty))
    node.target, node.args, node.kwargs = operator.getitem, (norm, 0), {}


def _as_clamp(node: fx.Node) -> None:
    node.target = getattr(_aten.clamp, node.target._overloadname)  # type: ignore[union-attr]


def _as_power(node: fx.Node) -> None:
    node.target, node.args = _aten.pow.Tensor_Scalar, (node.args[0], 2)


def _as_bitwise(node: fx.Node) -> None:
    """Replaces an operator of Python by the function that it calls."""
    node.target = _BITWISE[node.target]


_BITWISE: dict[Any, Any] = {
    _aten.__and__.Tensor: _aten.bitwise_and.Tensor,
    _aten.__or__.Tensor: _aten.bitwise_or.Tensor,
    _aten.__xor__.Tensor: _aten.bitwise_xor.Tensor,
}


def _as_difference(node: fx.Node) -> None:
    """Replaces `diff` by the difference of two slices, except for booleans and differences of a higher order."""
    defaults: tuple[Any, ...] = (None, 1, -1, None, None)
    given = cast(tuple[Any, ...], node.args)
    x, order, axis, before, after = given + defaults[len(given) :]
    if order != 1 or node.kwargs or x.meta["val"].dtype == torch.bool:
        return
    with node.graph.inserting_before(node):
        parts = [one for one in (before, x, after) if one is not None]
        if len(parts) > 1:
            joined = torch.cat([one.meta["val"] for one in parts], axis)
            x = _made(node, _aten.cat.default, (parts, axis), joined)
        later, earlier = (
            _made(node, _aten.slice.Tensor, (x, axis, *ends), node.meta["val"])
            for ends in ((1, _LAST), (0, -1))
        )
    node.target, node.args, node.kwargs = _aten.sub.Tensor, (later, earlier), {}


_LAST = 2**63 - 1  # the end of a slice that reaches to the end of its axis


# Operators that stay: reshape, which becomes Reshape in ONNX, and checks, which the exporter removes.
_LEFT = {
    _aten.reshape.default,
    _aten._assert_async.default,
    _aten._assert_async.msg,
    _aten._assert_scalar.default,
    _aten._assert_tensor_metadata.default,
    _aten.sym_constrain_range_for_size.default,
}
_RULES: dict[Any, Callable[[fx.Node], None]] = {
    _aten.reshape.default: _as_view,
    _aten.flatten.using_ints: _as_view,
    _aten.unflatten.int: _as_view,
    _aten.view_as.default: _as_view,
    _aten.reshape_as.default: _as_view,
    _aten.contiguous.default: _as_copy,
    _aten.to.dtype: _as_cast,
    _aten.to.dtype_layout: _as_cast,
    _aten.type_as.default: _as_cast,
    _aten.chunk.default: _as_split,
    _aten.batch_norm.default: _as_inference,
    _aten.clip.default: _as_clamp,
    _aten.clip.Tensor: _as_clamp,
    _aten.square.default: _as_power,
    **dict.fromkeys(_BITWISE, _as_bitwise),
    _aten.diff.default: _as_difference,
}
_POOLS = (
    _aten.adaptive_avg_pool1d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten.adaptive_avg_pool3d.default,
)
