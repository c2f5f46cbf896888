"""Converts a float ONNX file to a smaller one: the dynamic, static, float16 and weight-only modes.

ONNX Runtime's own tools do most of the work. The code here works around their limits:

- Constructs on which the tools fail are rewritten first (`qatkit.export.for_ort_tools`).
- Dynamic quantization has only one scale for all filters of a Conv (`qatkit.export.levelled_filters`).
- Each weight in the new file is compared with the float weight, and operators with wrong weights stay float
  (`qatkit.export.write_mode_file`).

Every function writes its file atomically, after the checker and ONNX Runtime have accepted it. The same float file
always gives the same bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from qatkit.export.float16 import float16
from qatkit.export.float_ranges import nodes_of_infinity
from qatkit.export.for_ort_tools import (
    for_tools,
    own_weights,
    prepared,
    weight_rank,
)
from qatkit.export.guarded_weights import guard_matrices, range_overrides
from qatkit.export.hidden_names import hide_ends, restore_ends
from qatkit.export.int8_tables import quantize_tables
from qatkit.export.int8_weights import quantize_recurrent, quantize_weights
from qatkit.export.left_float import LeftFloat, left_float
from qatkit.export.levelled_filters import is_depthwise, levelled, scaled_back
from qatkit.export.quiet import quiet
from qatkit.export.write_mode_file import exact_weights, without_wrong_weights, write_mode_file
from qatkit.graph.operators import operator
from qatkit.quant.backends import Backend, OpRule
from qatkit.quant.spec import QuantSpec
from qatkit.verify.graph_view import operand, stored
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import by_name

__all__ = ["dynamic", "float16", "static", "weight_only"]

_TYPES = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}


def dynamic(source: Path, target: Path, *, reduce_range: bool | str = "auto") -> LeftFloat:
    """Quantizes weights to int8 per channel, and activations to uint8 with ranges measured in every inference.

    Conv, MatMul and Gemm become ConvInteger and MatMulInteger after a DynamicQuantizeLinear. Two kinds of operators
    stay float: a depthwise Conv, which has few weights and for which ConvInteger has only a slow general kernel, and a
    MatMul whose weight is not a matrix. LSTM, GRU and RNN compute in float, with int8 weights in the file. Rows of
    embedding tables are dequantized when they are read.

    Args:
        source: a float file of opset 13 or higher.
        target: the file to write.
        reduce_range: whether weights have a reduced range, for x86 CPUs without VNNI (`Backend.reduced`). With "auto",
            only matrices whose sums of products could saturate get larger scales.

    Returns:
        The operators that stay float.

    Raises:
        ValueError: a weight is not finite, or the checker or ONNX Runtime refuses the file.
    """
    model = prepared(source)
    own_weights(model, each_gemm=True)
    exact = exact_weights(model)
    changed, hidden = levelled(model), hide_ends(model)
    # With per-channel scales, MatMulInteger accepts only matrices as weights.
    left = [str(node.name) for node in model.graph if is_depthwise(node) or weight_rank(node) not in (0, 2)]
    others = [
        str(node.name) for node in model.graph if node.domain
    ]  # operators of other domains, which the tool could take for those of ONNX

    def made(wrong: Collection[str]) -> ir.Model:
        products = [
            f"{name}_MatMul" for name in wrong
        ]  # the tool turns a Gemm into a MatMul and an Add first
        quantized = _run_tool(
            partial(
                quantize_dynamic,
                for_tools(model),
                op_types_to_quantize=["Conv", "MatMul"],
                per_channel=True,
                reduce_range=reduce_range is True,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=[*left, *others, *wrong, *products],
            )
        )
        restore_ends(quantized, hidden)
        scaled_back(quantized, changed)
        quantize_recurrent(quantized, wrong)
        quantize_tables(quantized, wrong)
        if reduce_range == "auto":
            guard_matrices(quantized, model)
        return quantized

    quantized, wrong = without_wrong_weights(made, exact)
    write_mode_file(quantized, target)
    return left_float("dynamic", quantized, on_purpose=left, wrong=wrong)


def static(source: Path, target: Path, batches: Iterable[Any], backend: Backend) -> LeftFloat:
    """Inserts QDQ pairs with ONNX Runtime's quantizer, with ranges from the minimum to the maximum.

    Operators that the backend's rules leave float stay float, such as normalizations and the residual stream of a
    transformer. With `Backend.every_operator`, everything that the tool can quantize is quantized.

    Args:
        source: a float file of opset 13 or higher.
        target: the file to write.
        batches: batches of inputs (`qatkit_verify.feeds`), which are iterated several times.
        backend: the number types and the operators to quantize.

    Returns:
        The operators that stay float because the quantizer would handle them or their weights wrongly, or because they
        read or compute infinities or NaN.

    Raises:
        ConfigError: the backend's types are neither int8 nor uint8, or per-channel weights are asymmetric.
        ValueError: a weight is not finite, or the checker or ONNX Runtime refuses the file.
    """
    activation, weight = backend.activation, backend.weight
    activation_type = _type_of(activation, f"backend={backend.name}: activation")
    weight_type = _type_of(weight, f"backend={backend.name}: weight")
    if weight.granularity.separates(0) and not weight.symmetric:
        allowed = "true with mode=static, because ONNX Runtime's tool makes per-channel weights symmetric"
        raise ConfigError(f"backend={backend.name}: weight.symmetric", False, allowed)
    model = prepared(source)
    own_weights(model)
    exact, hidden = exact_weights(model), hide_ends(model)
    odd = [str(node.name) for node in model.graph if _misread(node)]
    infinite = nodes_of_infinity(model, list(islice(batches, 1)))
    odd += [str(node.name) for node in infinite if node.name not in odd]
    names = [str(value.name) for value in model.graph.inputs]
    rules = {kind: rule for kind, rule in backend.rules.items() if rule.when != "shortcut"}
    kinds = {name: rule for kind, rule in rules.items() for name in operator(kind).onnx}

    def made(wrong: Collection[str]) -> ir.Model:
        left = [*odd, *wrong]
        quantized = _run_tool(
            partial(
                quantize_static,
                for_tools(model),
                calibration_data_reader=_Reader(names, hidden, batches),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=None if backend.every_operator else list(kinds),
                nodes_to_exclude=left + ([] if backend.every_operator else _left_float(model, kinds, left)),
                per_channel=weight.granularity.separates(0),
                reduce_range=weight.reduce_range,
                activation_type=activation_type,
                weight_type=weight_type,
                extra_options=_static_options(model, backend, kinds),
            )
        )
        restore_ends(quantized, hidden)
        if backend.for_onnxruntime:
            quantize_recurrent(quantized, wrong)
        return quantized

    quantized, wrong = without_wrong_weights(made, exact)
    write_mode_file(quantized, target)
    return left_float("static", quantized, on_purpose=odd, wrong=wrong)


def _static_options(model: ir.Model, backend: Backend, kinds: Mapping[str, OpRule]) -> dict[str, Any]:
    """Returns the settings that the static quantizer accepts as extra options instead of parameters."""
    weight, single = backend.weight, _one_scale(model)
    per_channel = weight.granularity.separates(0)
    wider = range_overrides(model, per_channel=per_channel, single=single) if weight.guards_pairs else {}
    return {
        "ActivationSymmetric": backend.activation.symmetric,
        "WeightSymmetric": weight.symmetric,
        "QuantizeBias": backend.for_onnxruntime and weight.bias_dtype != "float",
        "OpTypesToExcludeOutputQuantization": [name for name, rule in kinds.items() if not rule.output],
        # An entry without an axis means one scale for the tensor.
        "TensorQuantOverrides": {name: [{"symmetric": weight.symmetric}] for name in single} | wider,
    }


def weight_only(source: Path, target: Path) -> LeftFloat:
    """Quantizes weights to int8; activations stay float.

    Quantization is symmetric, with a scale per output channel (`qatkit.export.int8_weights`) or per row of an
    embedding table (`qatkit.export.int8_tables`).

    Args:
        source: the float file.
        target: the file to write.

    Returns:
        The operators whose weights stay float because their int8 weights would be wrong.

    Raises:
        ValueError: a weight is not finite, or the checker or ONNX Runtime refuses the file.
    """
    model = prepared(source)

    def made(wrong: Collection[str]) -> ir.Model:
        quantized = model.clone()
        quantize_weights(quantized, wrong)
        quantize_tables(quantized, wrong)
        return quantized

    quantized, wrong = without_wrong_weights(made, exact_weights(model))
    write_mode_file(quantized, target)
    return left_float("weight_only", quantized, wrong=wrong)


def _left_float(model: ir.Model, kinds: Mapping[str, OpRule], odd: Iterable[str]) -> list[str]:
    """Returns the operators with a float input that the rules quantize only if all inputs are quantized.

    The operators in `odd` stay float, so their outputs are float.
    """
    int8, left, excluded = set(model.graph.initializers.values()), [], set(odd)
    for node in model.graph:
        rule = kinds.get(node.op_type)
        if rule is None or node.name in excluded:
            continue
        if rule.when == "inputs" and not int8.issuperset(value for value in node.inputs if value is not None):
            left.append(str(node.name))
        elif rule.output:
            int8.update(node.outputs)
    return left


def _one_scale(model: ir.Model) -> list[str]:
    """Returns the names of weights that get one scale instead of per-channel scales.

    There are two kinds. In the weight [in, out/groups, ...] of a ConvTranspose with groups, the tool would treat axis 1
    as all output channels. For stacks of matrices, MatMul's 8-bit kernel supports no per-channel scales.
    """
    found = [
        node.inputs[1]
        for node in model.graph
        if (node.op_type == "ConvTranspose" and _groups(node) > 1) or weight_rank(node) > 2
    ]
    return [str(value.name) for value in dict.fromkeys(found) if value is not None]


def _misread(node: ir.Node) -> bool:
    """Returns whether the static quantizer would quantize a node wrongly.

    Such nodes are a MatMul whose weight is the first factor or a vector, and a Gemm with a bias whose beta is not 1 or
    whose constant bias is not a vector.
    """
    if node.op_type == "MatMul":
        return weight_rank(node) == 1 or stored(node.inputs[0]) is not None
    if node.op_type != "Gemm" or operand(node, 2) is None:
        return False
    bias = stored(operand(node, 2))
    return node.attributes.get_float("beta", 1.0) != 1 or (bias is not None and len(bias.shape) != 1)


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """A reader of batches for ONNX Runtime's calibration.

    Args:
        names: the names of the model's inputs.
        hidden: the original names of renamed inputs, which the batches use, by their names in the model.
        batches: batches of inputs (`qatkit_verify.feeds`).
    """

    def __init__(self, names: Sequence[str], hidden: Mapping[str, str], batches: Iterable[Any]) -> None:
        self._names = {hidden.get(name, name): name for name in names}
        self._batches = iter(batches)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        found = by_name(list(self._names), batch)
        return {self._names[name]: np.ascontiguousarray(value) for name, value in found.items()}


def _type_of(spec: QuantSpec, key: str) -> QuantType:
    if spec.dtype not in _TYPES:
        raise ConfigError(f"{key}.dtype", spec.dtype, f"one of {', '.join(_TYPES)} with mode=static")
    return _TYPES[spec.dtype]


def _run_tool(tool: Callable[[Path], Any]) -> ir.Model:
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "model.onnx"
        tool(path)
        return ir.from_proto(onnx.load(str(path)))


def _groups(node: ir.Node) -> int:
    return node.attributes.get_int("group", 1)
