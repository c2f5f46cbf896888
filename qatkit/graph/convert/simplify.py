"""Simplifies a graph for inference.

dropout, auxiliary heads               removed
weights that are computed              become parameters
values that depend only on parameters  are computed once
γ · Linear(x), ConvNeXt's layer scale  becomes a Linear with γ in its rows: the integers stay, the scales change
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import called, module_of, op_class, site
from qatkit.graph.placement import constants
from qatkit.graph.signature import Example, in_float32
from qatkit.graph.single_precision import in_single_precision
from qatkit.graph.stub import stub
from qatkit.graph.trace import propagate, tidy
from qatkit.quant.computed_weights import settled
from qatkit.quant.qat_layers import QATOperator, plain_operator
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

_MEGABYTE = 1 << 20
# Types of values that can be arguments of a node.
_WRITTEN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def simplify(graph_module: fx.GraphModule) -> None:
    """Simplifies `graph_module`, which is in inference mode, in place."""
    _settle_weights(graph_module)
    _drop_passes(graph_module)
    _fold_constants(graph_module)
    _fold_layer_scale(graph_module)
    tidy(graph_module)


def float_baseline(model: nn.Module, example: Example) -> fx.GraphModule:
    """Returns the float model, optimized for ONNX Runtime: BatchNorms folded, attention as in the INT8 file."""
    model, _ = in_single_precision(model)
    example = in_float32(example)
    graph_module = stub(fuse(model, example).graph, example).graph.eval()
    simplify(graph_module)
    propagate(graph_module, example)  # all tensors get a name in the file, those of opened attention too
    return graph_module


def _settle_weights(graph_module: fx.GraphModule) -> None:
    """Turns computed weights into parameters, and folds the BatchNorms of operators that are not quantized."""
    for path in dict.fromkeys(str(n.target) for n in graph_module.graph.nodes if n.op == "call_module"):
        module = settled(graph_module.get_submodule(path))
        if isinstance(module, QATOperator) and module.weight_fake_quant is None:
            module = plain_operator(module)
        if module is not graph_module.get_submodule(path):
            graph_module.set_submodule(path, module)


def _drop_passes(graph_module: fx.GraphModule) -> None:
    """Removes modules that are the identity in inference, such as dropout, and outputs that only training uses."""
    for node in list(graph_module.graph.nodes):
        if op_class(node) == "pass" and node.all_input_nodes:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph_module.graph.erase_node(node)
        elif op_class(node) == "outputs":
            kept = node.args[: module_of(node).kept]
            (end,) = node.users
            end.args = (kept[0] if len(kept) == 1 else kept,)
            graph_module.graph.erase_node(node)


def _fold_constants(graph_module: fx.GraphModule) -> None:
    """Computes once the values that depend only on parameters (Swin's relative position bias).

    Values that would enlarge the file by more than a megabyte are left to ONNX Runtime, which computes them
    when it loads the file (on clips, Swin's bias is a thousand times as large as its table). A value that is
    not a tensor (a device, a size) is written into its readers' arguments. A list of tensors is not stored,
    but the tensors that are taken out of it are.
    """
    constant = constants(graph_module.graph)
    values: dict[fx.Node, Any] = {}
    sources: dict[fx.Node, set[fx.Node]] = {}
    run = fx.Interpreter(graph_module)
    for node in list(graph_module.graph.nodes):
        if node not in constant:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            values[node] = getattr(run, node.op)(node.target, args, kwargs)
        sources[node] = {node}.union(*(sources[n] for n in node.all_input_nodes))
        readers = [user for user in node.users if user not in constant]
        if not isinstance(values[node], Tensor):
            _write_out(node, values[node], readers)
        elif node.op != "get_attr" and readers and _is_small(values[node], sources[node], values):
            path = _store(graph_module, f"{site(node)}_folded", values[node].detach().clone())
            with graph_module.graph.inserting_after(node):
                folded = graph_module.graph.get_attr(path)
            folded.meta = {"site": site(node), "value": node.meta.get("value")}
            node.replace_all_uses_with(folded)


def _is_small(value: Tensor, sources: set[fx.Node], values: dict[fx.Node, Any]) -> bool:
    """Returns whether a value takes at most a megabyte more than the parameters that it is computed from."""
    parameters = [values[n] for n in sources if n.op == "get_attr"]
    return value.nbytes <= sum(p.nbytes for p in parameters if isinstance(p, Tensor)) + _MEGABYTE


def _write_out(node: fx.Node, value: Any, readers: list[fx.Node]) -> None:
    """Replaces `node` by its value in the arguments of `readers`, if arguments can have such a value."""
    if not isinstance(value, _WRITTEN):
        return
    for reader in readers:
        if reader.op != "output":
            reader.args, reader.kwargs = fx.map_arg(
                (reader.args, reader.kwargs), lambda n: value if n is node else n
            )


def _store(graph_module: fx.GraphModule, path: str, value: Tensor) -> str:
    """Stores a constant as a buffer and returns its path.

    The buffer belongs to the module that `path` names, or to the graph if there is no such module.
    """
    owner, _, name = path.rpartition(".")
    home = dict(graph_module.named_modules()).get(owner)
    if home is None:
        home, path = graph_module, path.replace(".", "_")
        name = path
    home.register_buffer(name, value)
    return path


def _fold_layer_scale(graph_module: fx.GraphModule) -> None:
    constant = constants(graph_module.graph)
    calls = Counter(n.target for n in graph_module.graph.nodes if n.op == "call_module")
    for node in list(graph_module.graph.nodes):
        factor = next((n for n in node.all_input_nodes if n in constant and n.op == "get_attr"), None)
        if op_class(node) != "mul" or factor is None or len(node.all_input_nodes) != 2:
            continue
        product = next(n for n in node.all_input_nodes if n is not factor)
        values: Tensor = attrgetter(str(factor.target))(graph_module).detach()
        linear = _linear_below(product, values)
        if linear is None or calls[linear.target] > 1:
            continue
        module = cast(nn.Linear, module_of(linear))
        rows = values.reshape(-1)
        fake: WeightFakeQuantize | None = getattr(module, "weight_fake_quant", None)
        weight = module.weight.detach()
        module.weight = nn.Parameter(weight * rows[:, None] if fake is None else fake.times(weight, rows))
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias.detach() * rows)
        node.replace_all_uses_with(product)
        graph_module.graph.erase_node(node)


def _linear_below(node: fx.Node, factor: Tensor) -> fx.Node | None:
    """Returns the Linear before `node` whose output channels `factor` multiplies; None if there is none.

    Permutes may come between the Linear and `node`.
    """
    long = [axis - factor.ndim for axis, size in enumerate(factor.shape) if size > 1]
    if len(long) != 1:
        return None
    axis = long[0]
    while len(node.users) == 1 and called(node) == "permute":
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        axis = cast(int, order[axis]) % len(order) - len(order)
        node = node.all_input_nodes[0]
    if axis != -1 or len(node.users) != 1 or op_class(node) != "linear":
        return None
    module: Any = module_of(node)
    quantized = getattr(module, "weight_fake_quant", None)
    fits = factor.numel() == module.out_features and (
        quantized is None or (quantized.spec.form is None and quantized.spec.granularity.separates(0))
    )
    return node if fits else None
