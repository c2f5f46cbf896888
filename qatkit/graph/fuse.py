"""Fuses each BatchNorm into the Conv or Linear before it.

    bn(op(x))  →  op'(x)         batch_norm="fold": folded now, training continues with the folded weight
    bn(op(x))  →  QATop(x)       "freeze" / "train": the BatchNorm stays a child of the operator, and the
                                 weight is quantized as it will be after folding (`qatkit.quant.qat_layers`)
    bn(x)         →  op(x)       no operator to fuse into (DenseNet): with `depthwise`, a 1x1 convolution of its own

A BatchNorm can't be folded into a weight that is computed or that another operator reads too. In these cases, "fold"
acts as "freeze". Before fusing, weights outside of torch.nn's modules get a module (`qatkit.graph.weights.lift`).

In-place operators become their out-of-place forms, since the backward pass of the fake quantization that `prepare_qat`
inserts before them needs the original value. A view becomes a reshape.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, fx, nn

from qatkit.config.fields import limit_of
from qatkit.config.schema import ScheduleConfig
from qatkit.graph.nodes import facts, module_of, op_class, parameter_reads, qat_type, site
from qatkit.graph.norms import BatchNorm
from qatkit.graph.pads import open_pads
from qatkit.graph.pass_result import PassResult
from qatkit.graph.signature import Example
from qatkit.graph.trace import propagate, tidy, trace
from qatkit.graph.weights.branches import merge_branches
from qatkit.graph.weights.lift import lift_weights
from qatkit.quant.computed_weights import Computed
from qatkit.quant.qat_layers import QATConv2d, fold_batch_norm

_STATISTICS = (
    "BatchNorms of merged branches keep their statistics; schedule.batch_norm=train updates only the others"
)
_OUT_OF_PLACE = {operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub}


def fuse(
    model: nn.Module,
    example: Example,
    batch_norm: str = "fold",
    *,
    depthwise: bool = False,
    branches: str = "train",
) -> PassResult:
    """Records the graph of a copy of `model` and fuses its BatchNorms; a recorded graph is changed in place.

    Args:
        model: the float model, or its graph.
        example: an example input with the real shapes.
        batch_norm: "fold", "freeze" or "train".
        depthwise: whether a BatchNorm2d that can't be fused becomes a depthwise convolution, which has an int8 kernel.
        branches: "train" or "merged" (`qatkit.graph.weights.branches`).

    Returns:
        The graph; the total number of fused BatchNorms, convolutions merged from branches, and products with a
        weight that got a module; the BatchNorms and products left unchanged, each with the reason.

    Raises:
        ConfigError: `batch_norm` or `branches` is unknown, or the graph can't be recorded.
    """
    limit_of(ScheduleConfig, "batch_norm").check("schedule.batch_norm", batch_norm)
    limit_of(ScheduleConfig, "branches").check("schedule.branches", branches)
    graph_module = trace(model, example)
    _normalize(graph_module)
    open_pads(graph_module)
    propagate(graph_module, example)
    merged = merge_branches(graph_module, fold=batch_norm == "fold", merged=branches == "merged")
    if merged.changed and batch_norm == "train":
        graph_module.meta["notes"] = [*graph_module.meta["notes"], ("schedule.batch_norm", _STATISTICS)]
    result = lift_weights(graph_module)
    result.changed += merged.changed
    if result.changed:
        propagate(graph_module, example)
    reads = parameter_reads(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        if op_class(node) != "batch_norm":
            continue
        reason = _why_not(node)
        if reason and depthwise and _alone(node):
            _to_convolution(node, batch_norm)
            result.changed += 1
        elif reason:
            result.skipped.append((site(node), reason))
        else:
            _fuse_pair(node, batch_norm, reads)
            result.changed += 1
    tidy(graph_module)
    return result


def _why_not(node: fx.Node) -> str | None:
    """Returns why a BatchNorm is not fused; None if it can be."""
    before = node.all_input_nodes[0]
    if not facts(before).weighted:
        return "its input is not the output of a Conv or Linear"
    if op_class(before) == "linear" and getattr(before.meta.get("value"), "ndim", None) != 2:
        return "it follows a Linear whose output is not known to be two-dimensional"
    if len(before.users) > 1:
        return f"the output of {site(before)} has other readers"
    if sum(n.op == "call_module" and n.target == before.target for n in node.graph.nodes) > 1:
        return f"{site(before)} is called more than once"
    if cast(nn.BatchNorm2d, module_of(node)).num_features != cast(Tensor, module_of(before).weight).shape[0]:
        return f"it does not normalize the output channels of {site(before)}"
    if cast(nn.BatchNorm2d, module_of(node)).running_var is None:
        return "it has no running statistics"
    return None


def _fuse_pair(node: fx.Node, batch_norm: str, reads: Mapping[int, int]) -> None:
    before = node.all_input_nodes[0]
    module, bn = module_of(before), module_of(node)
    owner = node.graph.owning_module
    assert owner is not None
    # The operator keeps a BatchNorm whose tensors other nodes read (DBB pads with its BatchNorm's output for
    # zeros).
    readers = [
        n for n in node.graph.nodes if n.op == "get_attr" and str(n.target).startswith(f"{node.target}.")
    ]
    if batch_norm == "fold" and not readers and not _alive(module, reads):
        module.weight, module.bias = _folded(
            cast(Tensor, module.weight), cast("Tensor | None", module.bias), bn
        )
    else:
        fused = qat_type(module).from_float(module, bn, frozen=batch_norm != "train")
        owner.set_submodule(str(before.target), fused.train(module.training))
    for reader in readers:
        reader.target = f"{before.target}.bn{str(reader.target).removeprefix(str(node.target))}"
    node.replace_all_uses_with(before)
    node.graph.erase_node(node)
    if not any(n.op == "call_module" and n.target == node.target for n in before.graph.nodes):
        # If a kept BatchNorm stayed at its old path too, its old parent would set it to training mode again.
        owner.delete_submodule(str(node.target))
        _keep_children(owner, str(node.target), bn)


def _folded(weight: Tensor, bias: Tensor | None, norm: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns the parameters after folding `norm` into `weight` and `bias`.

    A result that depends only on frozen parameters is frozen.
    """
    with torch.no_grad():
        folded = fold_batch_norm(weight, bias, norm)
    scale, shift = (getattr(norm, name) for name in ("weight", "bias"))
    sources = (weight, scale), (weight if bias is None else bias, scale, shift)
    first, second = (
        nn.Parameter(value, any(one is not None and one.requires_grad for one in given))
        for value, given in zip(folded, sources, strict=True)
    )
    return first, second


def _alive(module: nn.Module, reads: Mapping[int, int]) -> bool:
    """Returns whether a module's weight or bias is computed or read elsewhere, which prevents folding into it."""
    return isinstance(module, Computed) or any(reads[id(p)] > 1 for p in module.parameters())


def _keep_children(owner: fx.GraphModule, path: str, norm: nn.Module) -> bool:
    """Keeps child modules of `norm`, such as an activation, at their paths; returns whether it has any."""
    children = dict(norm.named_children())
    norm._modules.clear()
    if children:
        owner.get_submodule(path.rpartition(".")[0]).add_module(
            path.rpartition(".")[2], nn.ModuleDict(children).train(norm.training)
        )
    return bool(children)


def _alone(node: fx.Node) -> bool:
    """Returns whether a BatchNorm has running statistics, normalizes images and is called only once."""
    module = module_of(node)
    calls = sum(n.op == "call_module" and n.target == node.target for n in node.graph.nodes)
    if not isinstance(module, nn.BatchNorm2d) or module.running_var is None or calls != 1:
        return False
    return not isinstance(module, BatchNorm) or getattr(node.meta.get("value"), "ndim", None) == 4


def _to_convolution(node: fx.Node, batch_norm: str) -> None:
    """Replaces bn(x) by a depthwise 1x1 convolution of x.

    Unless `batch_norm` is "fold", the BatchNorm stays a child of the convolution, whose weights are 1 and not trained.
    """
    bn = cast(nn.BatchNorm2d, module_of(node))
    conv: nn.Module = nn.Conv2d(
        bn.num_features, bn.num_features, 1, groups=bn.num_features, bias=batch_norm == "fold"
    )
    conv.weight = nn.Parameter(torch.ones(bn.num_features, 1, 1, 1), requires_grad=False)
    if batch_norm == "fold":
        conv.weight, conv.bias = _folded(cast(Tensor, conv.weight), None, bn)
    else:
        conv = QATConv2d.from_float(conv, bn, frozen=batch_norm == "freeze")
    owner = cast(fx.GraphModule, node.graph.owning_module)
    if _keep_children(owner, str(node.target), bn):
        node.target = f"{node.target}.norm"
        owner.add_submodule(node.target, conv.train(bn.training))
    else:
        owner.set_submodule(str(node.target), conv.train(bn.training))


def _normalize(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if "input" in node.kwargs and not node.args and op_class(node) != "other":
            # All passes expect the input, which is the first argument of torch's operators, as a positional one.
            node.args = (node.kwargs["input"],)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "input"}
        if node.op == "call_module" and getattr(module_of(node), "inplace", False):
            module_of(node).inplace = False  # type: ignore[assignment]
        elif node.op == "call_function":
            node.target = _OUT_OF_PLACE.get(node.target, node.target)
            if node.kwargs.get("inplace"):
                node.kwargs = {**node.kwargs, "inplace": False}
        elif node.op == "call_method" and node.target in ("add_", "mul_", "sub_", "relu_"):
            node.target = node.target.rstrip("_")
        elif node.op == "call_method" and node.target == "view" and _to_a_shape(node):
            node.target = "reshape"  # after other passes, its input may no longer be contiguous


def _to_a_shape(node: fx.Node) -> bool:
    return not any(isinstance(a, torch.dtype) for a in node.args)
