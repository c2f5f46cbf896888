"""Names that tell where a node comes from: the path of its module and its operator ("layer1.0.conv1/Conv")."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from typing import Any, cast

import onnx_ir as ir
import torch
from torch import fx, nn

from qatkit.graph.nodes import module_of, site
from qatkit.graph.trace import tidy

_SCOPES = "pkg.torch.onnx.name_scopes"


class _Call(nn.Module):
    """A function as a module, so that the exporter records its place in the model."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.kind, self.function, self.keywords = node.op, node.target, dict(node.kwargs)

    def forward(self, *args: Any) -> Any:
        if self.kind == "call_method":
            return getattr(args[0], cast(str, self.function))(*args[1:], **self.keywords)
        return cast(Any, self.function)(*args, **self.keywords)


def name_functions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose functions are modules at the path of their site, and so is each further call of a module
    that holds no tensor (one ReLU for a whole block).
    """
    named = copy.deepcopy(graph_module)
    called: set[str] = set()
    for node in list(named.graph.nodes):
        if node.op == "call_module":
            module = module_of(node)
            if node.target in called and not module.state_dict():
                node.target = _free_path(named, site(node))
                named.add_submodule(node.target, copy.copy(module))
            called.add(node.target)
            continue
        tensor = isinstance(node.meta.get("value"), (torch.Tensor, tuple, list))
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
    """`path`, or more underscores after it where its module has that attribute (a child, or the method `float`)."""
    owner, _, name = path.rpartition(".")
    home = dict(graph_module.named_modules()).get(owner, nn.Module)
    while hasattr(home, name):
        name += "_"
    return f"{owner}.{name}" if owner else name


def name_nodes(model: ir.Model) -> None:
    """Names every node MODULE/OPERATOR and its outputs after it; graph inputs and outputs keep their names."""
    kept = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    used: Counter[str] = Counter()
    for node in model.graph:
        base = "/".join(p for p in (_scope(node), node.op_type) if p)
        used[base] += 1
        node.name = base if used[base] == 1 else f"{base}_{used[base] - 1}"
        for i, value in enumerate(node.outputs):
            if value.name not in kept:
                value.name = f"{node.name}_output" if len(node.outputs) == 1 else f"{node.name}_output_{i}"
    for name in list(model.graph.initializers):
        value = model.graph.initializers[name]
        if value.name is not None and value.name.startswith("val_"):
            value.name = value.name.replace("val_", "constant_")


def _scope(node: ir.Node) -> str:
    """The innermost module of the exporter's record: the list holds a path per module, and the fx node last."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    return str(scopes[-2]) if len(scopes) > 1 and not scopes[-2].startswith("_") else ""


def place(node: ir.Node) -> str:
    """Where a node of torch's exporter comes from, for messages: MODULE/OPERATOR, or its name."""
    scope = _scope(node)
    return f"{scope}/{node.op_type}" if scope else str(node.name)
