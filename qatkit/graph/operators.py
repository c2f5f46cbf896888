"""One table: which operator class every node of a graph belongs to.

Placement reads classes, never types: a backend says per class what it wants (`qatkit.backends`), and the
classes of this table say how ranges travel.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torchvision
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torchvision.models import swin_transformer
from torchvision.models.video import mvit
from torchvision.models.video import swin_transformer as swin_transformer_3d

from qatkit.qat_layers import QAT_TYPES, QATConv1d, QATConv2d, QATConv3d, QATLinear, QATOperator

# The output has the values of the input, moved: one range serves both.
MOVES = frozenset({"shape", "pass"})
SAME_RANGE = MOVES | {"max_pool"}
ACTIVATIONS: dict[str, tuple[float | None, float | None]] = {"relu": (0.0, None), "relu6": (0.0, 6.0)}
# The output range is known without looking.
FIXED_RANGE = {"sigmoid": (0.0, 1.0), "hardsigmoid": (0.0, 1.0)}
WEIGHTED = frozenset({"conv", "linear"})


class Outputs(nn.Module):
    """The end of a graph with auxiliary heads: all outputs in training, the first one in inference."""

    def forward(self, main: Tensor, *auxiliary: Tensor) -> Tensor | tuple[Tensor, ...]:
        return (main, *auxiliary) if self.training else main


_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d, QATConv1d, QATConv2d, QATConv3d),
    "linear": (nn.Linear, QATLinear),
    "relu": (nn.ReLU,),
    "relu6": (nn.ReLU6,),
    "sigmoid": (nn.Sigmoid,),
    "hardsigmoid": (nn.Hardsigmoid,),
    "hardswish": (nn.Hardswish,),
    "silu": (nn.SiLU,),
    "max_pool": (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    "avg_pool": (nn.AvgPool2d, nn.AvgPool3d),
    "global_pool": (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    "shape": (nn.Flatten, nn.Unflatten, nn.PixelShuffle),
    "pass": (
        nn.Identity,
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        torchvision.ops.StochasticDepth,
    ),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "layer_norm": (nn.LayerNorm, nn.GroupNorm),
    "gelu": (nn.GELU,),
    "softmax": (nn.Softmax,),
    "attention": (nn.MultiheadAttention,),
    "outputs": (Outputs,),
}
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "add": (operator.add, operator.iadd, torch.add),
    "mul": (operator.mul, operator.imul, torch.mul),
    "cat": (torch.cat, torch.concat),
    "matmul": (torch.matmul, operator.matmul, torch.bmm),
    "relu": (F.relu, torch.relu),
    "relu6": (F.relu6,),
    "sigmoid": (torch.sigmoid, F.sigmoid),
    "hardsigmoid": (F.hardsigmoid,),
    "hardswish": (F.hardswish,),
    "silu": (F.silu,),
    "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
    "avg_pool": (F.avg_pool2d, F.avg_pool3d),
    "global_pool": (F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    "mean": (torch.mean,),
    "einsum": (torch.einsum,),
    "dot_product_attention": (F.scaled_dot_product_attention,),
    "window_attention": (
        swin_transformer.shifted_window_attention,
        swin_transformer_3d.shifted_window_attention_3d,
    ),
    "relative_positions": (mvit._add_rel_pos,),
    "shortcut": (mvit._add_shortcut,),
    "pad": (F.pad,),
    "patch_merging": (swin_transformer._patch_merging_pad,),
    "shape": (torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.swapaxes, torch.swapdims,
              torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.index_select, operator.getitem,
              mvit._squeeze),
    "pass": (F.dropout,),
    "softmax": (torch.softmax, F.softmax),
    "gelu": (F.gelu,),
    "layer_norm": (F.layer_norm,),
}  # fmt: skip
_METHODS: dict[str, tuple[str, ...]] = {
    "add": ("add", "add_"),
    "mul": ("mul", "mul_"),
    "matmul": ("matmul", "bmm"),
    "relu": ("relu", "relu_"),
    "sigmoid": ("sigmoid",),
    "softmax": ("softmax",),
    "mean": ("mean",),
    "shape": ("flatten", "reshape", "view", "permute", "transpose", "swapaxes", "swapdims", "squeeze",
              "unsqueeze", "chunk", "split", "unflatten", "index_select"),
    "pass": ("contiguous", "clone"),
}  # fmt: skip

_MODULE_CLASS = {t: name for name, types in _MODULES.items() for t in types}
_FUNCTION_CLASS = {f: name for name, functions in _FUNCTIONS.items() for f in functions}
_METHOD_CLASS = {m: name for name, methods in _METHODS.items() for m in methods}
CLASSES = frozenset({*_MODULES, *_FUNCTIONS, *_METHODS})


def module_of(node: fx.Node) -> nn.Module:
    """The module that a call_module node calls."""
    return node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]


def parameter_reads(graph: fx.Graph) -> Counter[int]:
    """How often a pass over the graph reads each parameter, by `id`: through its module, or by its name."""
    reads = Counter[int]()
    for node in graph.nodes:
        if node.op == "call_module":
            reads.update(map(id, module_of(node).parameters()))
        elif node.op == "get_attr":
            reads[id(operator.attrgetter(str(node.target))(graph.owning_module))] += 1
    return reads


def known_type(module: nn.Module) -> type[nn.Module] | None:
    """The type of the table that `module` is, or is derived from without another forward."""
    kinds = type(module).__mro__
    return next((t for t in kinds if t in _MODULE_CLASS and type(module).forward is t.forward), None)


def qat_type(module: nn.Module) -> type[QATOperator]:
    """The quantizable form of a Conv or Linear."""
    kind = known_type(module)
    assert kind is not None
    return QAT_TYPES[kind]


def op_class(node: fx.Node) -> str:
    """The class of a node's operator; "other" when the table does not know it."""
    if node.op == "call_module":
        kind = known_type(module_of(node))
        found = "other" if kind is None else _MODULE_CLASS[kind]
        return _pool_class(node) if found == "global_pool" else found
    if node.op == "call_function":
        found = _FUNCTION_CLASS.get(node.target, "other")
        return _pool_class(node) if found == "global_pool" else found
    if node.op == "call_method":
        return _METHOD_CLASS.get(str(node.target), "other")
    return node.op


def _pool_class(node: fx.Node) -> str:
    """An adaptive pool to one value is ONNX's GlobalAveragePool; to another size it has no int8 kernel."""
    if node.op == "call_module":
        size: Any = module_of(node).output_size
    else:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
    return "global_pool" if set(size if isinstance(size, (tuple, list)) else [size]) == {1} else "other"


def site(node: fx.Node) -> str:
    """The name of a node for people: its module's path, or the enclosing module's path and the operator."""
    return str(node.meta.get("site", node.name))


def is_float_tensor(value: Any) -> bool:
    """Whether an argument is a node that yields one floating-point tensor (after shape propagation)."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    return isinstance(found, Tensor) and found.is_floating_point()


def carries_float(value: Any) -> bool:
    """As `is_float_tensor`, or a tuple of such tensors (what chunk and split yield)."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return bool(parts) and all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
