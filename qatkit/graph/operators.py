"""The table of operators: what each class is in PyTorch, how ranges pass through it and what it becomes in ONNX.

Other modules read this table: placement (`values`, `fixed`, `activation`), alignment (`align`), conversion
(`integer`, `many_nodes`), equalization (`homogeneous`, `pools`), ONNX Runtime's tools and the audit (`onnx`,
`kernels`, `fused`). A backend declares a rule per class (`qatkit.quant.backends`).

PyTorch's types and functions are listed by their dotted names and looked up when a graph is first read. A deployment
machine can therefore read the ONNX fields without PyTorch, and if torchvision renames a private function, only models
that use it are affected.

To add an operator, add a record here and a rule in the backends that should run it in 8 bits. An operator of your own,
or another type for a class of this table, needs no change to this file:

    register("max_pool", modules=(BlurPool,))
    register("leaky_relu6", functions=("my_package.clip",), values="new", align="table", onnx=("Clip",))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

Bounds = tuple[float | None, float | None]
VALUES = ("new", "kept", "moved")
ALIGNMENTS = ("", "sum", "product", "mean", "table", "hardsigmoid")


@dataclass(frozen=True)
class Operator:
    """The record of one operator class.

    Attributes:
        name: the name of the class in overrides (`op/NAME`) and backends.
        modules, functions, methods: what it is in PyTorch: module types, functions, names of Tensor's methods.
            Types and functions are given by dotted name or as objects.
        weighted: whether it multiplies its input by a weight that can be quantized (Conv, Linear).
        values: how the values of its output are made: "new" (computed), "kept" (a selection of the input's values) or
            "moved" (all of them, at other positions). With "kept" and "moved", input and output have one range.
        fixed: the range of its output if it is known without observing.
        scalar: whether it is an elementwise function without parameters of its own.
        activation: the bounds that it clamps to; a quantized range with these ends replaces the operator.
        binary: whether it is arithmetic with two operands, one of which may be a Python number.
        align: the method that keeps its results away from ties (`qatkit.graph.scales.align`), one of `ALIGNMENTS`.
        integer: the module that computes it like the 8-bit kernel, if that is not dequantize → operator → quantize
            (`qatkit.graph.convert.integer_modules`).
        many_nodes: whether it is several nodes in ONNX, which ONNX Runtime fuses if no other node is between them.
        homogeneous: whether f(s·x) = s·f(x) for s > 0, channel by channel.
        pools: whether it combines the values of several positions into one.
        turns: the names in `functions` and `methods` that exchange axes.
        onnx: the ONNX operators that it becomes, which can also be selected in ONNX Runtime's static quantizer.
        also: further ONNX operators of the class that have an 8-bit kernel.
        kernels: ONNX Runtime's operators that prove that it ran in 8 bits.
        fused: ONNX Runtime's float operators that contain it, with later operators merged in.
    """

    name: str
    modules: tuple[Any, ...] = ()
    functions: tuple[Any, ...] = ()
    methods: tuple[str, ...] = ()
    weighted: bool = False
    values: str = "new"
    fixed: tuple[float, float] | None = None
    scalar: bool = False
    activation: Bounds | None = None
    binary: bool = False
    align: str = ""
    integer: str = ""
    many_nodes: bool = False
    homogeneous: bool = False
    pools: bool = False
    turns: tuple[str, ...] = ()
    onnx: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, allowed in (("values", VALUES), ("align", ALIGNMENTS)):
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"{key}={getattr(self, key)!r} of operator {self.name}: expected one of {', '.join(allowed)}"
                )

    @property
    def keeps_range(self) -> bool:
        """True if one range serves input and output."""
        return self.values != "new"

    @property
    def island(self) -> bool:
        """True if it always computes in float, with quantize/dequantize pairs around it between int8 neighbours."""
        own = (self.weighted, self.keeps_range, self.activation, self.kernels, self.also, self.integer)
        return not any(own)


def _of(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _nn(*names: str) -> tuple[str, ...]:
    return _of("torch.nn", *names)


def _f(*names: str) -> tuple[str, ...]:
    return _of("torch.nn.functional", *names)


_INTEGER = "qatkit.graph.convert.integer_modules"
_MVIT = "torchvision.models.video.mvit"

_RECORDS = (
    Operator(
        "conv", weighted=True,
        modules=(
            *_nn("Conv1d", "Conv2d", "Conv3d"),
            *_of("qatkit.quant.qat_layers", "QATConv1d", "QATConv2d", "QATConv3d"),
        ),
        onnx=("Conv", "ConvTranspose"), kernels=("QLinearConv", "QLinearConvTranspose", "ConvInteger"),
        fused=("FusedConv", "NhwcFusedConv"),
    ),
    Operator(
        "linear", weighted=True, modules=(*_nn("Linear"), "qatkit.quant.qat_layers.QATLinear"),
        onnx=("Gemm", "MatMul"),
        kernels=("QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                 "MatMulNBits"),
        fused=("FusedGemm", "FusedMatMul"),
    ),
    Operator(
        "matmul", functions=("torch.matmul", "operator.matmul", "torch.bmm"), methods=("matmul", "bmm"),
    ),
    Operator(
        "add", functions=("operator.add", "operator.iadd", "torch.add"), methods=("add", "add_"), binary=True,
        align="sum", integer=f"{_INTEGER}.QuantizedAdd", onnx=("Add",), kernels=("QLinearAdd",),
    ),
    Operator(
        "mul", functions=("operator.mul", "operator.imul", "torch.mul"), methods=("mul", "mul_"), binary=True,
        align="product", integer=f"{_INTEGER}.QuantizedMul", onnx=("Mul",), kernels=("QLinearMul",),
    ),
    Operator("cat", functions=("torch.cat", "torch.concat"), align="sum", onnx=("Concat",), kernels=("QLinearConcat",)),
    Operator(
        "relu", modules=_nn("ReLU"), functions=(*_f("relu"), "torch.relu"), methods=("relu", "relu_"),
        activation=(0.0, None), scalar=True, homogeneous=True, onnx=("Relu",),
    ),
    Operator("relu6", modules=_nn("ReLU6"), functions=_f("relu6"), activation=(0.0, 6.0), scalar=True, onnx=("Clip",)),
    Operator(
        "sigmoid", modules=_nn("Sigmoid"), functions=("torch.sigmoid", *_f("sigmoid")), methods=("sigmoid",),
        fixed=(0.0, 1.0), scalar=True, align="table", onnx=("Sigmoid",), kernels=("QLinearSigmoid",),
    ),
    Operator(
        "hardsigmoid", modules=_nn("Hardsigmoid"), functions=_f("hardsigmoid"), fixed=(0.0, 1.0), scalar=True,
        align="hardsigmoid", integer=f"{_INTEGER}.QuantizedHardSigmoid",
    ),
    Operator("hardswish", modules=_nn("Hardswish"), functions=_f("hardswish"), scalar=True),
    Operator("silu", modules=_nn("SiLU"), functions=_f("silu"), scalar=True, align="table"),
    Operator("gelu", modules=_nn("GELU"), functions=_f("gelu"), scalar=True, many_nodes=True),
    Operator(
        "softmax", modules=_nn("Softmax"), functions=("torch.softmax", *_f("softmax")), methods=("softmax",),
        also=("Softmax",), kernels=("QLinearSoftmax",),
    ),
    Operator("leaky_relu", modules=_nn("LeakyReLU"), functions=_f("leaky_relu"), homogeneous=True,
             also=("LeakyRelu",), kernels=("QLinearLeakyRelu",)),
    # The slopes of a PReLU stay float.
    Operator("prelu", modules=_nn("PReLU"), functions=(*_f("prelu"), "torch.prelu"), methods=("prelu",)),
    Operator("where", functions=("torch.where",), methods=("where",), also=("Where",), kernels=("QLinearWhere",)),
    Operator(
        "max_pool", modules=_nn("MaxPool1d", "MaxPool2d", "MaxPool3d"),
        functions=_f("max_pool1d", "max_pool2d", "max_pool3d"), values="kept", homogeneous=True, pools=True,
        onnx=("MaxPool",), kernels=("NhwcMaxPool",),
    ),
    Operator("reduce_max", values="kept", also=("ReduceMax", "ReduceMin")),
    Operator(
        "avg_pool", modules=_nn("AvgPool2d", "AvgPool3d"), functions=_f("avg_pool2d", "avg_pool3d"), align="mean",
        homogeneous=True, pools=True, onnx=("AveragePool",), kernels=("QLinearAveragePool",),
    ),
    # An adaptive pool to size 1 (`qatkit.graph.nodes.op_class`); other sizes have no 8-bit kernel.
    Operator(
        "global_pool", modules=_nn("AdaptiveAvgPool2d", "AdaptiveAvgPool3d"),
        functions=_f("adaptive_avg_pool2d", "adaptive_avg_pool3d"), align="mean", homogeneous=True, pools=True,
        onnx=("GlobalAveragePool",), kernels=("QLinearGlobalAveragePool",),
    ),
    Operator(
        "shape", values="moved",
        modules=_nn("Flatten", "Unflatten", "PixelShuffle"),
        functions=(*_of("torch", "flatten", "reshape", "permute", "transpose", "swapaxes", "swapdims", "squeeze",
                        "unsqueeze", "chunk", "split", "index_select"), "operator.getitem", f"{_MVIT}._squeeze",
                   *_f("pixel_shuffle")),
        methods=("flatten", "reshape", "view", "permute", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze",
                 "chunk", "split", "unflatten", "index_select"),
        turns=("permute", "transpose", "swapaxes", "swapdims"),
        onnx=("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split"),
        also=("Gather", "Expand", "Tile", "DepthToSpace"),
    ),
    Operator(
        "pass", values="moved", homogeneous=True,
        modules=(*_nn("Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d"), "torchvision.ops.StochasticDepth",
                 "qatkit.graph.capture.training.TrainingOnly"),
        functions=_f("dropout"), methods=("contiguous", "clone", "detach"),
    ),
    Operator("batch_norm", modules=_nn("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")),
    Operator("layer_norm", modules=_nn("LayerNorm", "GroupNorm"), functions=_f("layer_norm"), many_nodes=True),
    Operator("mean", functions=("torch.mean",), methods=("mean",)),
    # Padding with zeros or repeated values; other constants and circular padding have no class
    # (`qatkit.graph.nodes.op_class`).
    Operator("pad", functions=_f("pad"), values="moved", homogeneous=True, also=("Pad",)),
    # Nearest-neighbour resizing; interpolation has no class (`qatkit.graph.nodes.op_class`).
    Operator(
        "resize", modules=_nn("Upsample", "UpsamplingNearest2d"), functions=_f("interpolate"), values="moved",
        homogeneous=True, also=("Resize",),
    ),
    Operator("einsum", functions=("torch.einsum",)),
    Operator("embedding", modules=(*_nn("Embedding"), "qatkit.quant.qat_layers.QATEmbedding")),
    Operator("lstm", modules=_nn("LSTM")),
    Operator("gru", modules=_nn("GRU")),
    Operator("rnn", modules=_nn("RNN")),
    Operator("attention", modules=_nn("MultiheadAttention")),
    Operator("dot_product_attention", functions=_f("scaled_dot_product_attention")),
    Operator(
        "window_attention",
        functions=("torchvision.models.swin_transformer.shifted_window_attention",
                   "torchvision.models.video.swin_transformer.shifted_window_attention_3d"),
    ),
    Operator("patch_merging", functions=("torchvision.models.swin_transformer._patch_merging_pad",)),
    Operator("relative_positions", functions=(f"{_MVIT}._add_rel_pos",)),
    Operator("shortcut", functions=(f"{_MVIT}._add_shortcut",)),
    Operator("outputs", modules=("qatkit.graph.nodes.Outputs",)),
)  # fmt: skip

_TABLE: dict[str, Operator] = {record.name: record for record in _RECORDS}
_LOOKUPS: list[Any] = []
_Result = TypeVar("_Result")


def lookup(function: Callable[[], _Result]) -> Callable[[], _Result]:
    """Returns a cached version of a function of the whole table; `register` clears the cache."""
    cached = functools.cache(function)
    _LOOKUPS.append(cached)
    return cached


def operator(name: str) -> Operator:
    """Returns the record of a class; an empty record for a name that the table does not know."""
    return _TABLE.get(name) or Operator(name)


def operators() -> tuple[Operator, ...]:
    """Returns the records of all classes."""
    return tuple(_TABLE.values())


def register(name: str, **facts: Any) -> Operator:
    """Adds an operator class, or further types, functions, methods and ONNX operators to an existing one.

    Args:
        name: the name of the class.
        facts: fields of `Operator`. Tuples are appended to those of an existing class. Its other fields can't be
            changed, since several modules rely on them.

    Returns:
        The new record of the class.

    Raises:
        ValueError: a field is unknown, a value is not allowed, or a field contradicts the existing class.
    """
    _check_facts(name, facts)
    present = _TABLE.get(name)
    if present is None:
        record = Operator(name, **facts)
    else:
        added: dict[str, Any] = {}
        for key, value in facts.items():
            own = getattr(present, key)
            if isinstance(own, tuple) and key not in ("fixed", "activation"):
                added[key] = (*own, *(item for item in value if item not in own))
            elif own != value:
                raise ValueError(
                    f"{key}={value!r} of operator {name}: expected {own!r}, the value in the table"
                )
        record = replace(present, **added)
    _TABLE[name] = record
    for cached in _LOOKUPS:
        cached.cache_clear()
    return record


def _check_facts(name: str, facts: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(Operator)} - {"name"}
    if unknown := sorted(facts.keys() - known):
        raise ValueError(
            f"{unknown[0]}={facts[unknown[0]]!r} of operator {name}: expected one of {', '.join(sorted(known))}"
        )
    for key, value in facts.items():
        if isinstance(getattr(Operator(name), key), tuple) and isinstance(value, str):
            raise ValueError(f"{key}={value!r} of operator {name}: expected a tuple, such as ({value!r},)")
    for member in (*facts.get("modules", ()), *facts.get("functions", ())):
        if look_up(member) is None:
            raise ValueError(
                f"{member!r} of operator {name}: expected a type or function that can be imported"
            )


@lookup
def module_classes() -> dict[Any, str]:
    """Returns the operator class by module type."""
    return _by_member("modules")


@lookup
def function_classes() -> dict[Any, str]:
    """Returns the operator class by function."""
    return _by_member("functions")


@lookup
def method_classes() -> dict[Any, str]:
    """Returns the operator class by method name."""
    return {method: record.name for record in operators() for method in record.methods}


def _by_member(kind: str) -> dict[Any, str]:
    found = {look_up(member): record.name for record in operators() for member in getattr(record, kind)}
    found.pop(None, None)
    return found


def look_up(member: Any) -> Any:
    """Returns the type or function with a dotted name; None if its package is missing or lacks this name."""
    if not isinstance(member, str):
        return member
    module, _, name = member.rpartition(".")
    if not module or module.startswith("."):
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def onnx_operators(records: Iterable[Operator], *, kernels: bool = False) -> frozenset[str]:
    """Returns the ONNX operators of the given classes; with `kernels`, ONNX Runtime's replacements for them too."""
    return frozenset(
        op
        for record in records
        for op in (*record.onnx, *record.also, *((*record.kernels, *record.fused) if kernels else ()))
    )
