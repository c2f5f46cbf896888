"""Names nodes by the path of their module and their operator ("layer1.0.conv1/Conv").

A tensor is named after the node that computes it, and a weight keeps its name in the module ("layer1.0.conv1.weight").
Any other constant is named after the first node that reads it and the name of its operand there
("flatten/Reshape.shape"). A node without a module, such as the one that computes the batch size of the input, gets the
module of a reader, or else of a node that it reads.
"""

from __future__ import annotations

import ast
import copy
import itertools
import keyword
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, cast

import onnx
import onnx_ir as ir
import torch
from torch import fx, nn

import qatkit.graph.convert.integer_modules  # noqa: F401  it defines the barrier
from qatkit.graph.nodes import module_of, site
from qatkit.graph.sharing import large_tensors
from qatkit.graph.trace import tidy

_SCOPES = "pkg.torch.onnx.name_scopes"


class _Call(nn.Module):
    """A module that calls a function, so that the exporter records the function's place in the model."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.kind, self.function, self.keywords = node.op, node.target, dict(node.kwargs)

    def forward(self, *args: Any) -> Any:
        if self.kind == "call_method":
            return getattr(args[0], cast(str, self.function))(*args[1:], **self.keywords)
        return cast(Any, self.function)(*args, **self.keywords)


def name_functions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph in which every function that returns tensors is a module at the path of its site.

    The site (`qatkit.graph.nodes.site`) is the path of the enclosing module, followed by the operator. Functions with
    nodes among their keyword arguments stay functions.

    If a module without tensors is called several times (one ReLU for a whole block), each further call gets a copy.
    """
    named = copy.deepcopy(graph_module, large_tensors(graph_module))
    called: set[str] = set()
    for node in list(named.graph.nodes):
        if node.op == "call_module":
            module = module_of(node)
            if node.target in called and not module.state_dict():
                node.target = _free_path(named, site(node))
                named.add_submodule(node.target, copy.copy(module))
            called.add(node.target)
            continue
        barrier = node.target is torch.ops.qatkit.barrier  # inserted by convert, without a site and a value
        if barrier:
            node.meta["site"] = f"{site(cast(fx.Node, node.args[0]))}.barrier"
        tensor = barrier or isinstance(node.meta.get("value"), (torch.Tensor, tuple, list))
        if node.op in ("call_function", "call_method") and tensor and not _reads_nodes(node.kwargs):
            path = _free_path(named, site(node))
            named.add_submodule(path, _Call(node))
            node.op, node.target, node.kwargs = "call_module", path, {}
    tidy(named)
    return named


def _reads_nodes(kwargs: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(kwargs, found.append)
    return bool(found)


def _free_path(graph_module: fx.GraphModule, path: str) -> str:
    """Returns `path`, with underscores appended until it is free.

    A path is taken if the module already has an attribute with this name (a child, or the method `float`), or if the
    name is a Python keyword (`and`, `or`).
    """
    owner, _, name = path.rpartition(".")
    home = dict(graph_module.named_modules()).get(owner, nn.Module)
    while hasattr(home, name) or keyword.iskeyword(name):
        name += "_"
    return f"{owner}.{name}" if owner else name


def name_nodes(model: ir.Model, kept: Collection[str]) -> None:
    """Names every node MODULE/OPERATOR, its outputs after the node, and constants after their readers.

    Args:
        model: the model, changed in place; the inputs and outputs of its graph keep their names.
        kept: the names of the module's tensors; initializers with these names keep them.
    """
    ends = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    used: Counter[str] = Counter()
    scopes = _scopes(model.graph)
    for node in model.graph:
        base = "/".join(p for p in (scopes[node], node.op_type) if p)
        used[base] += 1
        node.name = base if used[base] == 1 else f"{base}_{used[base] - 1}"
        for i, value in enumerate(node.outputs):
            if value.name not in ends:
                value.name = f"{node.name}_output" if len(node.outputs) == 1 else f"{node.name}_output_{i}"
    taken = (
        {value.name for node in model.graph for value in node.outputs} | ends | set(model.graph.initializers)
    )
    for value in list(model.graph.initializers.values()):
        if value.uses() and value.name not in kept and value.name not in ends:
            value.name = _free_name(_operand_name(value, model.opset_imports.get("", 1)), taken)


def _operand_name(value: ir.Value, opset: int) -> str:
    """Returns NODE.OPERAND for a constant, where NODE is its first reader.

    OPERAND is the last part of a name with slashes, else the name of the reader's input in ONNX, else its index.
    """
    node, index = next(iter(value.uses()))
    what = str(value.name).rpartition("/")[2] if "/" in str(value.name) else ""
    if not what and onnx.defs.has(node.op_type, opset, node.domain):
        formal = onnx.defs.get_schema(node.op_type, opset, node.domain).inputs
        what = formal[min(index, len(formal) - 1)].name
    return f"{node.name}.{what or index}"


def _free_name(name: str, taken: set[str | None]) -> str:
    """Returns `name`, with a number appended if it is taken, and marks it as taken."""
    free = next(n for i in itertools.count() if (n := f"{name}_{i}" if i else name) not in taken)
    taken.add(free)
    return free


def _scopes(graph: ir.Graph) -> dict[ir.Node, str]:
    """Returns the module path of each node; a node without one gets that of a reader, or else of a producer."""
    known = {node: scope for node in graph if (scope := _scope(node)) is not None}
    for node in reversed(graph):
        readers = (reader for value in node.outputs for reader in value.consumers())
        _inherit(known, node, readers)
    for node in graph:
        _inherit(known, node, (maker for value in node.inputs if value and (maker := value.producer())))
    return {node: known.get(node, "") for node in graph}


def _inherit(known: dict[ir.Node, str], node: ir.Node, others: Iterable[ir.Node]) -> None:
    found = next((known[other] for other in others if other in known), None)
    if node not in known and found is not None:
        known[node] = found


def _scope(node: ir.Node) -> str | None:
    """Returns the path of the innermost module in the exporter's metadata, whose last entry is the fx node; or None."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    return str(scopes[-2]) if len(scopes) > 1 and scopes[0] == "" else None


def place(node: ir.Node) -> str:
    """Returns the origin of a node for messages: MODULE/OPERATOR if known, otherwise its name."""
    scope = _scope(node)
    return f"{scope}/{node.op_type}" if scope else str(node.name)
