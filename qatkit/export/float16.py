"""Converts a float file to float16 with ONNX Runtime's converter.

Operators whose values float16 cannot hold (`keep_float32`) and the final probabilities (`last_probabilities`) stay
float32.

The converter puts Casts around each operator that stays float32, even between two such operators. A value that float16
cannot hold would be lost there, so the Casts between two such operators are removed. If operators of both types
read a constant, it is copied first, since the converter would clip it for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from qatkit.export.float_ranges import Range, ranges
from qatkit.export.for_ort_tools import copied, for_tools, prepared
from qatkit.export.hidden_names import free_name, hide_ends, restore_ends, tensor_names
from qatkit.export.keep_float32 import kept_in_float32
from qatkit.export.last_probabilities import last_probabilities
from qatkit.export.left_float import LeftFloat, left_float
from qatkit.export.quiet import quiet
from qatkit.export.write_mode_file import exact_weights, without_wrong_weights, write_mode_file
from qatkit.verify.graph_view import stored, weighted_ops
from qatkit_verify.feeds import feeds
from qatkit_verify.session import open_session


def float16(source: Path, target: Path, batches: Iterable[Any] = ()) -> LeftFloat:
    """Writes a copy of a file with float16 weights and activations; its inputs and outputs stay float32.

    If the copy would give NaN or infinity on `batches`, all operators without weights to quantize stay float32 too.

    Args:
        source: a float file of opset 13 or higher.
        target: the file to write.
        batches: inputs (`qatkit_verify.feeds`) on which the ranges of all tensors are measured; random inputs if
            empty.

    Returns:
        The operators that stay float32 because float16 cannot represent their values or weights; the operators of the
        final probabilities are not listed.

    Raises:
        ValueError: on `batches` the float16 file gives NaN or infinity where the float file gives finite numbers, a
            weight is not finite, or the checker or ONNX Runtime refuses the file.
    """
    given = list(batches)
    model = prepared(source)
    exact, known = exact_weights(model), ranges(model, given)
    found, last = kept_in_float32(model, known), last_probabilities(model)
    rest = [str(node.name) for node in model.graph if node.op_type not in weighted_ops()]
    every = list(dict.fromkeys([*found, *rest]))
    for kept in (found, every):
        half, wrong = without_wrong_weights(partial(_converted, model, [*kept, *last], known), exact)
        write_mode_file(half, target)
        if _is_finite(source, target, given):
            return left_float("float16", half, unheld=kept, wrong=wrong)
    raise ValueError("the float16 file gives NaN or infinity where the float file gives finite numbers")


def _converted(
    model: ir.Model, unheld: Collection[str], known: dict[str, Range], wrong: Collection[str]
) -> ir.Model:
    model, kept = model.clone(), [*unheld, *wrong]
    own = {node.name for node in model.graph}
    _part_constants(model, set(kept))
    hidden = hide_ends(model)
    proto = for_tools(model)
    _declare(proto, known)
    with quiet():
        half = convert_float_to_float16(proto, keep_io_types=True, node_block_list=kept)
    _drop_repeated(half.graph)
    made: ir.Model = ir.from_proto(half)
    restore_ends(made, hidden)
    _join_casts(made, own)
    return made


def _part_constants(model: ir.Model, kept: Collection[str]) -> None:
    """Copies constants for the operators that stay float32 if float16 operators read them too."""
    taken = tensor_names(model)
    for value in list(model.graph.initializers.values()):
        tensor, readers = stored(value), value.consumers()
        own = [node for node in readers if _is_float32(node, kept)]
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or not own or len(own) == len(readers):
            continue
        copy = copied(model.graph, tensor, free_name(f"{value.name}_float32", taken))
        for node, index in list(value.uses()):
            if node in own:
                node.replace_input_with(index, copy)


def _is_float32(node: ir.Node, kept: Collection[str]) -> bool:
    return node.name in kept or node.op_type in DEFAULT_OP_BLOCK_LIST


def _declare(proto: onnx.ModelProto, known: dict[str, Range]) -> None:
    """Declares tensors as float32 where type inference may fail, since the converter casts only declared tensors."""
    declared = {one.name for one in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
    made = {name for node in proto.graph.node for name in node.output}
    for name in known:
        if name in made and name not in declared:
            proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def _drop_repeated(graph: onnx.GraphProto) -> None:
    """Removes repeated Casts: the converter inserts one for each reader of a tensor, all with the same name."""
    seen, nodes = set[str](), []
    for node in graph.node:
        if node.op_type != "Cast" or node.output[0] not in seen:
            nodes.append(node)
        seen.update(node.output)
    del graph.node[:]
    graph.node.extend(nodes)


def _join_casts(model: ir.Model, own: Collection[str | None]) -> None:
    """Connects operators that stay float32 directly, without Casts between them.

    Args:
        model: the converted model.
        own: the names of the nodes before the conversion; Casts among them stay.
    """
    graph = model.graph
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Cast" else None
        first = None if value is None else value.producer()
        if first is None or first.op_type != "Cast" or node.attributes.get_int("to") != TensorProto.FLOAT:
            continue
        if first.name in own:
            continue
        origin, made = first.inputs[0], node.outputs[0]
        assert origin is not None, first
        if made.is_graph_output():
            node.replace_input_with(
                0, origin
            )  # the Cast now goes from float32 to float32, so that the output keeps its name
        else:
            made.replace_all_uses_with(origin)
            graph.remove(node)


def _is_finite(source: Path, target: Path, batches: Iterable[Any]) -> bool:
    """Returns whether the outputs of `target` are finite wherever the outputs of `source` are finite."""
    exact, half = (open_session(path, threads=1) for path in (source, target))
    for batch in batches:
        feed = feeds(exact, batch)
        for expected, found in zip(exact.run(None, feed), half.run(None, feed), strict=True):
            if found.dtype.kind == "f" and not np.isfinite(found[np.isfinite(expected)]).all():
                return False
    return True
