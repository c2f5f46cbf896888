"""What a node of the graph is: its module, its operator class, its name for people, what it yields."""

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

OWNER = "owner"  # in a node's meta: the path of the module that is one operator of a file, inside of which it runs


class Outputs(nn.Module):
    """The end of a graph with outputs for training alone (auxiliary heads): all in training, else the first ones.

    Args:
        kept: number of outputs in inference.
    """

    def __init__(self, kept: int = 1) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, *outputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.training:
            return outputs
        return outputs[0] if self.kept == 1 else outputs[: self.kept]


def results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Returns the nodes whose values a graph yields in inference, in order, each once."""
    ends = next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes
    if len(ends) == 1 and ends[0].op == "call_module" and isinstance(module := module_of(ends[0]), Outputs):
        ends = [node for node in ends[0].args[: module.kept] if isinstance(node, fx.Node)]
    return tuple(dict.fromkeys(ends))


def outputs_in_inference(model: nn.Module, outputs: Any) -> int | None:
    """Returns how many outputs of a model, its first ones, a file has; None: all of them.

    A model says so by an attribute `inference_outputs`, torchvision's models by their auxiliary heads; a run marks
    names by `auxiliary_outputs`, which count where a model has them behind "out".

    Args:
        outputs: as the model yields them, or the names of the outputs of its graph.
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
    """Whether a classifier calls auxiliary heads, in training alone, as torchvision's GoogLeNet and Inception do."""
    return bool(getattr(model, "aux_logits", False))


def module_of(node: fx.Node) -> nn.Module:
    """The module that a call_module node calls."""
    return node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]


def is_opaque(module: nn.Module) -> bool:
    """Whether a module is of a type with `opaque = True`: torch does not compute it, for its `reason`, so it is float
    and no gradient passes it.
    """
    return bool(getattr(module, "opaque", False))


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
    known = operators.module_classes()
    kinds: list[Any] = [kind for kind in type(module).__mro__ if kind in known]
    return next((kind for kind in kinds if type(module).forward is kind.forward), None)


def qat_type(module: nn.Module) -> type[QATOperator]:
    """The quantizable form of a Conv or Linear."""
    kind = known_type(module)
    assert kind is not None
    plain = QAT_TYPES[kind]
    return cast("type[QATOperator]", COMPUTED[plain]) if isinstance(module, Computed) else plain


def op_class(node: fx.Node) -> str:
    """The class of a node's operator; "other" when the table does not know it."""
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
    """What the table says of a node's operator."""
    return operators.operator(op_class(node))


def fused_activation(node: fx.Node, fuses: Mapping[str, tuple[str, ...]]) -> fx.Node | None:
    """Returns the activation that alone reads `node` and that a backend computes with it (`Backend.fuses`)."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    fused = fuses.get(op_class(node), ())
    return reader if reader is not None and op_class(reader) in fused else None


def _pool_class(node: fx.Node) -> str:
    """An adaptive pool to one value is ONNX's GlobalAveragePool; to another size it has no int8 kernel."""
    if node.op == "call_module":
        size: Any = module_of(node).output_size
    else:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
    return "global_pool" if set(size if isinstance(size, (tuple, list)) else [size]) == {1} else "other"


def _max_pool_class(node: fx.Node) -> str:
    """One that yields the places of its values, too, has no int8 kernel."""
    given = module_of(node) if node.op == "call_module" else None
    places = getattr(given, "return_indices", False) or node.kwargs.get("return_indices", False)
    return "other" if places else "max_pool"


def _pad_class(node: fx.Node) -> str:
    """A padding with zeros, or with values that are there; anything else brings a value of its own, or no ONNX Pad."""
    given = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | node.kwargs
    mode, value = given.get("mode", "constant"), given.get("value")
    if mode == "constant":
        return "pad" if value is None or (isinstance(value, (int, float)) and value == 0) else "other"
    return "pad" if mode in ("reflect", "replicate") else "other"


def _resize_class(node: fx.Node) -> str:
    """One that repeats values keeps their bytes; one that interpolates computes in float."""
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
    """The name of the function or method that a node calls."""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))


def turns_axes(node: fx.Node) -> bool:
    """Whether it exchanges axes: in ONNX, a Transpose."""
    return node.op in ("call_function", "call_method") and called(node) in facts(node).turns


def site(node: fx.Node) -> str:
    """The name of a node for people: its module's path, or the enclosing module's path and the operator."""
    return str(node.meta.get("site", node.name))


def owner(node: fx.Node) -> str:
    """The path of the one operator of a file that a node was recorded in; "" of any other."""
    return str(node.meta.get(OWNER, ""))


def is_depthwise(module: nn.Module) -> bool:
    """Whether each output channel of a convolution reads one input channel of its own."""
    channels = getattr(module, "in_channels", 0)
    return 1 < channels == getattr(module, "out_channels", 0) == getattr(module, "groups", 0)


def is_float_tensor(value: Any) -> bool:
    """Whether an argument is a node that yields one floating-point tensor (after shape propagation)."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    return isinstance(found, Tensor) and found.is_floating_point()


def carries_float(value: Any) -> bool:
    """As `is_float_tensor`, or a tuple of such tensors (what chunk and split yield)."""
    found = value.meta.get("value") if isinstance(value, fx.Node) else None
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return bool(parts) and all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
