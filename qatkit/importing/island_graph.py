"""Properties of nodes and values of an ONNX graph that decide what becomes an island."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from qatkit.export.rewrite import subgraphs
from qatkit.importing.operators.elementwise import SINGLE_VALUES
from qatkit.importing.operators.padding import SAME
from qatkit.importing.read import name_of
from qatkit_verify.session import open_session

STANDARD = ("", "ai.onnx")
_MAKE_SEQUENCES = (
    *(
        "SplitToSequence",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceInsert",
        "SequenceErase",
        "SequenceMap",
    ),
    *("Optional", "ZipMap"),
)
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN")
# Operators whose functions and modules do not depend on the size of their inputs, which may differ from run
# to run.
_ANY_SIZE = {
    *SINGLE_VALUES, "Conv", "Gemm", "MatMul", "BatchNormalization", "Concat", "Transpose", "GlobalAveragePool",
    "GlobalMaxPool", "MaxPool", "AveragePool", "Identity", "Dropout", "ReduceMax", "ReduceMin", "ReduceSum",
    "ReduceMean",
}  # fmt: skip


def read_by(node: ir.Node) -> list[ir.Value]:
    """Returns the values that a node reads, including outer values that its branches and loop bodies read."""
    found = [value for value in node.inputs if value is not None]
    for graph in subgraphs(node):
        made = {*graph.inputs, *graph.initializers.values(), *(v for inner in graph for v in inner.outputs)}
        inside = [value for inner in graph for value in read_by(inner)]
        found += [value for value in (*inside, *graph.outputs) if value not in made]
    return list(dict.fromkeys(found))


def inside(node: ir.Node) -> Iterable[ir.Node]:
    """Yields the nodes of a node's branches and loop bodies, at any depth."""
    for graph in subgraphs(node):
        for inner in graph:
            yield inner
            yield from inside(inner)


def holders(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """Returns the names of the nodes, also in branches and loop bodies, that multiply by constant weights."""
    every = (one for node in nodes for one in (node, *inside(node)))
    return tuple(
        name_of(one)
        for one in every
        if one.op_type in _WEIGHTED and one.domain in STANDARD and any(map(_is_constant, one.inputs[:3]))
    )


def _is_constant(value: ir.Value | None) -> bool:
    maker = None if value is None else value.producer()
    return value is not None and (
        value.const_value is not None or (maker is not None and maker.op_type == "Constant")
    )


def operator_name(node: ir.Node) -> str:
    """Returns the operator of a node, with its domain if it is not the standard one."""
    return node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"


def takes_any_size(node: ir.Node) -> bool:
    """Returns whether the module or function of a node accepts inputs of a different size in each run."""
    if node.domain not in STANDARD or node.op_type not in _ANY_SIZE:
        return False
    pads = node.attributes.get_ints("pads", ())
    return (
        node.attributes.get_string("auto_pad", "NOTSET") not in SAME
        and list(pads[: len(pads) // 2]) == list(pads[len(pads) // 2 :])
        and node.attributes.get_int("ceil_mode", 0) == 0
    )


def one_image(value: ir.Value) -> bool | None:
    """Returns whether the first axis of a value has size 1; None if its shape is not known."""
    return None if value.shape is None else len(value.shape) > 0 and value.shape[0] == 1


def splits(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> bool:
    """Returns whether a region of a file with a batch size of 1 can run image by image, with the results joined."""
    ends = [value.shape for value in outputs]
    in_front = all(
        shape is None or (len(shape) > 0 and (shape[0] == 1 or not isinstance(shape[0], int)))
        for shape in ends
    )
    return in_front and any(one_image(value) for value in inputs)


def reached(graph: ir.Graph, start: ir.Node, *, forward: bool) -> set[ir.Node]:
    """Returns the nodes of a graph that depend on `start` (`forward`), or on which `start` depends."""
    found, values = set[ir.Node](), {*(start.outputs if forward else read_by(start))}
    for node in graph if forward else reversed(list(graph)):
        if values & {*(read_by(node) if forward else node.outputs)}:
            found.add(node)
            values |= {*(node.outputs if forward else read_by(node))}
    return found


def output_dtypes(model: ir.Model) -> dict[str, ir.DataType]:
    """Returns the types of those outputs of a model that are tensors, by name, as ONNX Runtime infers them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "types.onnx"
        ir.save(model, path)
        found = open_session(path, threads=1, optimize=False).get_outputs()
    kinds = {one.name: dtype_of(one.type) for one in found}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def dtype_of(kind: str) -> ir.DataType | None:
    """Returns the type that ONNX Runtime calls `kind`, such as tensor(float); None if it is not a tensor's type."""
    name = kind.removeprefix("tensor(").removesuffix(")").upper()
    return ir.DataType.__members__.get(name)


def no_tensors(graph: ir.Graph, given: Iterable[ir.Value] = ()) -> set[ir.Value]:
    """Returns the sequences, optional values and maps in a graph, which shape inference treats as tensors.

    Args:
        graph: the graph.
        given: inputs of the graph that are known to be such values.
    """
    found = {value for value in graph.inputs if isinstance(value.type, (ir.SequenceType, ir.OptionalType))}
    found |= set(given)
    for node in graph:
        inner = subgraphs(node)
        if node.op_type in _MAKE_SEQUENCES or (node.op_type == "Identity" and node.inputs[0] in found):
            found |= set(node.outputs)
        elif node.op_type == "OptionalGetElement":
            before = None if node.inputs[0] is None else node.inputs[0].producer()
            if before is None or (
                before.op_type == "Optional" and before.inputs[:1] and before.inputs[0] in found
            ):
                found |= set(node.outputs)
        elif (
            node.op_type == "Loop"
        ):  # the first two inputs of a body are the iteration number and a condition
            pairs = zip(inner[0].inputs[2:], node.inputs[2:], strict=False)
            found |= no_tensors(inner[0], [own for own, outer in pairs if outer in found])
            found |= {
                own for own, out in zip(node.outputs, inner[0].outputs[1:], strict=False) if out in found
            }
        else:
            for branch in inner:
                found |= no_tensors(branch)
                found |= {own for own, out in zip(node.outputs, branch.outputs, strict=False) if out in found}
    return found
