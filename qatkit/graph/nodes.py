"""Properties of a graph's nodes: module, operator class, display name and type of the output."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, fx, nn

from qatkit.graph import operators
from qatkit.graph.operators import Operator
from qatkit.quant.computed_weights import COMPUTED, Computed
from qatkit.quant.qat_layers import QAT_TYPES, QATOperator

OWNER = "owner"  # key in a node's meta: the path of the enclosing module that becomes one ONNX operator


class Outputs(nn.Module):
    """The end of a graph with training-only outputs (auxiliary heads).

    In training it returns all outputs, in inference only the first `kept`.

    Args:
        kept: the number of outputs in inference.
    """

    def __init__(self, kept: int = 1) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, *outputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.training:
            return outputs
        return outputs[0] if self.kept == 1 else outputs[: self.kept]


def results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Returns the nodes whose values a graph outputs in inference, in order and without duplicates."""
    ends = next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes
    if len(ends) == 1 and ends[0].op == "call_module" and isinstance(module := module_of(ends[0]), Outputs):
        ends = [node for node in ends[0].args[: module.kept] if isinstance(node, fx.Node)]
    return tuple(dict.fromkeys(ends))


def outputs_in_inference(model: nn.Module, outputs: Any) -> int | None:
    """Returns how many of a model's outputs, counted from the first, are exported; None for all of them.

    A model declares this by an attribute `inference_outputs`. torchvision's models are recognized by their
    auxiliary heads, and segmentation models by a dict of just the outputs "out" and "aux". An attribute
    `auxiliary_outputs` has names of auxiliary outputs (`qatkit.run.auxiliary_outputs`); they are left out if
    another output has the name "out".

    Args:
        model: the model.
        outputs: the outputs that the model returned, or the names of the outputs of its graph.
    """
    declared: int | None = getattr(model, "inference_outputs", None)
    if declared is not None:
        return declared
    if getattr(model, "aux_classifier", None) is not None or classifies_in_training(model):
        return 1
    if isinstance(outputs, Mapping) and set(outputs) == {"out", "aux"}:  # segmentation
        return 1
    names = [one for one in outputs if isinstance(one, str)] if isinstance(outputs, (Mapping, tuple)) else []
    main = [name for name in names if name not in getattr(model, "auxiliary_outputs", ())]
    return len(main) if len(main) < len(names) and "out" in main else None


def classifies_in_training(model: nn.Module) -> bool:
    """Returns whether a classifier has auxiliary heads only in training, like torchvision's GoogLeNet and Inception."""
    return bool(getattr(model, "aux_logits", False))


def module_of(node: fx.Node) -> nn.Module:
    """Returns the module that a call_module node calls."""
    return node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]


def is_opaque(module: nn.Module) -> bool:
    """Returns whether the type of a module declares `opaque = True`.

    Such a module is computed by something other than PyTorch (such as ONNX Runtime); its attribute `reason`
    says why. It stays float, and no gradient passes through it.
    """
    return bool(getattr(module, "opaque", False))


def parameter_reads(graph: fx.Graph) -> Counter[int]:
    """Returns how often the graph reads each parameter in one pass, through its module or by name; keyed by `id`."""
    reads = Counter[int]()
    for node in graph.nodes:
        if node.op == "call_module":
            reads.update(map(id, module_of(node).parameters()))
        elif node.op == "get_attr":
            reads[id(operator.attrgetter(str(node.target))(graph.owning_module))] += 1
    return reads


def known_type(module: nn.Module) -> type[nn.Module] | None:
    """Returns the type in the operator table whose forward `module` has; None if there is none."""
    known = operators.module_classes()
    kinds: list[Any] = [kind for kind in type(module).__mro__ if kind in known]
    return next((kind for kind in kinds if type(module).forward is kind.forward), None)


def qat_type(module: nn.Module) -> type[QATOperator]:
    """Returns the quantizable type for a Conv or Linear."""
    kind = known_type(module)
    assert kind is not None
    plain = QAT_TYPES[kind]
    return cast("type[QATOperator]", COMPUTED[plain]) if isinstance(module, Computed) else plain


def op_class(node: fx.Node) -> str:
    """Returns the operator class of a node; "other" if the table does not know the operator or this form of it.

    For nodes that call nothing, such as inputs, this is the node's `op`.
    """
    if node.op == "call_module":
        kind = known_type(module_of(node))
        found = "other" if kind is None else operators.module_classes()[kind]
    elif node.op == "call_function":
        found = operators.function_classes().get(node.target, "other")
    elif node.op == "call_method":
        return operators.method_classes().get(str(node.target), "other")
    else:
        return node.op
    special = _SPECIAL.get(found)
    return found if special is None else special(node)


def facts(node: fx.Node) -> Operator:
    """Returns the table's record of a node's operator."""
    return operators.operator(op_class(node))


def fused_activation(node: fx.Node, fuses: Mapping[str, tuple[str, ...]]) -> fx.Node | None:
    """Returns the activation that is the only reader of `node` and that a backend fuses with it (`Backend.fuses`)."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    fused = fuses.get(op_class(node), ())
    return reader if reader is not None and op_class(reader) in fused else None


def _pool_class(node: fx.Node) -> str:
    """Returns "global_pool" for an adaptive pool to size 1 (ONNX's GlobalAveragePool), else "other".

    Adaptive pools to other sizes have no int8 kernel.
    """
    if node.op == "call_module":
        size: Any = module_of(node).output_size
    else:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
    return "global_pool" if set(size if isinstance(size, (tuple, list)) else [size]) == {1} else "other"


def _max_pool_class(node: fx.Node) -> str:
    """Returns "max_pool", or "other" for a pool that also returns indices, which has no int8 kernel."""
    given = module_of(node) if node.op == "call_module" else None
    places = getattr(given, "return_indices", False) or node.kwargs.get("return_indices", False)
    return "other" if places else "max_pool"


def _pad_class(node: fx.Node) -> str:
    """Returns "pad" for a padding with zeros or with existing values, else "other".

    Any other padding adds new values, or ONNX's Pad does not support it.
    """
    given = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | node.kwargs
    mode, value = given.get("mode", "constant"), given.get("value")
    if mode == "constant":
        return "pad" if value is None or (isinstance(value, (int, float)) and value == 0) else "other"
    return "pad" if mode in ("reflect", "replicate") else "other"


def _resize_class(node: fx.Node) -> str:
    """Returns "resize" for nearest-neighbour resizing, which moves bytes, and "other" for interpolation."""
    if node.op == "call_module":
        mode = getattr(module_of(node), "mode", "nearest")
    else:
        mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("mode", "nearest")
    return "resize" if mode == "nearest" else "other"


_SPECIAL = {
    "global_pool": _pool_class,
    "pad": _pad_class,
    "max_pool": _max_pool_class,
    "resize": _resize_class,
}


def called(node: fx.Node) -> str:
    """Returns the name of the function or method that a node calls."""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))


def turns_axes(node: fx.Node) -> bool:
    """Returns whether a node exchanges axes (a Transpose in ONNX)."""
    return node.op in ("call_function", "call_method") and called(node) in facts(node).turns


def site(node: fx.Node) -> str:
    """Returns a node's display name: its module's path, or the enclosing module's path and the operator."""
    return str(node.meta.get("site", node.name))


def owner(node: fx.Node) -> str:
    """Returns the path of the one-operator module in which a node was recorded; "" if there is none."""
    return str(node.meta.get(OWNER, ""))


def is_depthwise(module: nn.Module) -> bool:
    """Returns whether a module is a convolution in which each output channel reads its own single input channel."""
    channels = getattr(module, "in_channels", 0)
    return 1 < channels == getattr(module, "out_channels", 0) == getattr(module, "groups", 0)


def is_float_tensor(value: Any) -> bool:
    """Returns whether an argument is a node with one floating-point tensor as output (after shape propagation)."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    return isinstance(found, Tensor) and found.is_floating_point()


def carries_float(value: Any) -> bool:
    """Returns whether a node's output is a floating-point tensor or a tuple of them (as from chunk and split)."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return bool(parts) and all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
