"""Converts a prepared graph from simulation to integers.

Weights become integer buffers, biases become int32 at scale s_x·s_w (or narrower, as `backend.bias_dtype` says), and
every FakeQuantize becomes an explicit pair of quantize and dequantize. The result runs in PyTorch and is the reference
that the ONNX file is compared with.

Further requirements of ONNX Runtime (docs/onnxruntime-qdq.md) are implemented here as graph rules:

- After an operator that only moves values, its input's pair is repeated if an int8 operator reads the result.
- HardSigmoid becomes Add(x, 3) → quantize(6/255) → dequantize(1/255): its division is in the two scales.
- A Linear gets 2-D inputs (Gemm), with reshapes around it.
- Barriers (ONNX Sums with one input) keep ONNX Runtime from quantizing or fusing float operators next to quantized
  ones, and from duplicating a dequantize or Transpose before an operator that it would fuse from several
  nodes.
- Channels are padded with zeros to the multiples that kernels need (`qatkit.graph.pad_channels`).

Values in number formats stay float (`format_modules`). For a backend of another runtime (`Backend.for_onnxruntime` is
false), biases are float unless the backend has `integer_biases`, HardSigmoid is not rewritten, and no barriers are
added. For any backend, equal values are ordered as ONNX orders them (`qatkit.graph.convert.orders`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit.graph.convert.format_modules import RoundToFormat, with_rounded_weight
from qatkit.graph.convert.integer_modules import (
    Quantized,
    QuantizedEmbedding,
    QuantizeDequantize,
    QuantizedPair,
)
from qatkit.graph.convert.orders import order_as_onnx
from qatkit.graph.convert.recurrent_modules import QuantizedRecurrent
from qatkit.graph.convert.simplify import simplify
from qatkit.graph.convert.weight_only_modules import PackedEmbedding, WeightOnly
from qatkit.graph.node_arguments import BATCH_AXIS, VARYING_AXES
from qatkit.graph.nodes import facts, fused_activation, is_float_tensor, module_of, op_class, site, turns_axes
from qatkit.graph.operators import look_up
from qatkit.graph.pad_channels import pad_channels
from qatkit.graph.pads import belongs_to
from qatkit.graph.pass_result import PassResult
from qatkit.graph.quantizers import QUANTIZES, is_quantizer, quantizer_after, quantizer_of
from qatkit.graph.rows import rows_of
from qatkit.graph.scales.shifts import adjusted_scales
from qatkit.graph.sharing import large_tensors
from qatkit.graph.trace import tidy
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.formats.quantizers import FormatFakeQuantize, FormatWeightFakeQuantize
from qatkit.quant.qat_layers import QATEmbedding, QATOperator
from qatkit.quant.recurrent_layers import QATRecurrent
from qatkit.quant.scale_types import subnormal_scales
from qatkit.quant.spec import WHOLE, WIDE, QuantSpec


def convert(graph_module: fx.GraphModule) -> PassResult:
    """Returns a converted copy of a prepared graph, on the CPU in inference mode.

    `changed` in the result is the number of activation quantizers. `skipped` lists, by site, scales that
    float16 represents with fewer bits, and scales that were changed: so that tensors share one, so that
    requantization shifts stay within the backend's bounds, or so that a bias fits its type.

    Raises:
        ValueError: the input of an operator with a quantized weight has no FakeQuantize.
    """
    converted = copy.deepcopy(graph_module, _packed_here(graph_module)).cpu().eval()
    result = PassResult(converted)
    result.skipped += adjusted_scales(graph_module)
    simplify(converted)
    for node in list(converted.graph.nodes):
        order_as_onnx(node)
        if node.op == "call_module" and isinstance(module_of(node), QATOperator):
            _convert_operator(node, result)
        elif node.op == "call_module" and isinstance(module_of(node), QATEmbedding):
            kind = PackedEmbedding if converted.meta["backend"].weights_alone else QuantizedEmbedding
            table: nn.Module = kind(cast(QATEmbedding, module_of(node)))
            converted.set_submodule(str(node.target), table)
        elif node.op == "call_module" and isinstance(module_of(node), QATRecurrent):
            _convert_recurrent(node)
        elif not _for_onnxruntime(node):
            continue
        elif facts(node).many_nodes:
            _keep_from_shapes_and_pairs(node)
        elif facts(node).integer:
            _convert_arithmetic(node, look_up(facts(node).integer))
    _keep_float_readers(converted)
    _repeat_pairs(converted)
    for node in list(converted.graph.nodes):
        if is_quantizer(node):
            _tell_few_bits(node, _pair(node)[0], _spec(node), result)
            _convert_pair(node)
            result.changed += 1
    tidy(converted)
    pad_channels(converted, converted.meta["backend"].channel_multiples)
    return result


def _packed_here(graph_module: fx.GraphModule) -> dict[int, Any]:
    """Returns the memo for a deepcopy that shares large float weights, which are only read to compute the integers."""
    read = [one for one in graph_module.modules() if getattr(one, "weight_fake_quant", None) is not None]
    within = {inner for one in read for inner in one.modules()}
    others = [one for one in graph_module.modules() if one not in within]
    kept = {id(tensor) for one in others for tensor in one.parameters(recurse=False)}
    memo = {key: value for one in read for key, value in large_tensors(one).items()}
    return {key: value for key, value in memo.items() if key not in kept}


def _for_onnxruntime(node: fx.Node) -> bool:
    backend = cast(fx.GraphModule, node.graph.owning_module).meta["backend"]
    return bool(backend.for_onnxruntime)


def _convert_operator(node: fx.Node, result: PassResult) -> None:
    operator = cast(QATOperator, module_of(node))
    graph_module = cast(fx.GraphModule, node.graph.owning_module)
    if graph_module.meta["backend"].weights_alone:
        if operator.weight_fake_quant is not None:
            graph_module.set_submodule(str(node.target), WeightOnly(operator))
        return
    if isinstance(operator.weight_fake_quant, FormatWeightFakeQuantize):
        rounded = with_rounded_weight(operator, operator.weight_fake_quant)
        graph_module.set_submodule(str(node.target), rounded)
        return
    quantizer = quantizer_of(node.args[0])
    if quantizer is None:
        raise ValueError(f"the input of {site(node)} has no FakeQuantize")
    after = quantizer_after(node)
    ours = _for_onnxruntime(node)
    output_scale = None if after is None else _pair(after)[0]
    kind = _spec(quantizer).number_type
    quantized = Quantized(
        operator,
        _pair(quantizer)[0],
        output_scale,
        float_bias=not (ours or graph_module.meta["backend"].integer_biases),
        input_steps=kind.high - kind.low,
    )
    if quantized.repaired:
        lost = (
            f"outputs change by at most {quantized.lost:.1e} of the bias"
            if quantized.lost
            else "no output changes"
        )
        raised = "1 channel" if quantized.repaired == 1 else f"{quantized.repaired} channels"
        reason = f"the scale of {raised} was raised so that the bias fits int32; {lost}"
        result.skipped.append((site(node), reason))
    _tell_few_bits(node, quantized.weight_scale, quantized.spec, result)
    graph_module.set_submodule(str(node.target), quantized)
    if after is None and ours:
        _keep_activation_apart(node)
    if quantized.is_linear:
        _two_dimensional(node)


def _tell_few_bits(node: fx.Node, scale: Tensor, spec: QuantSpec, result: PassResult) -> None:
    """Reports scales that are so small that float16 represents them with fewer bits."""
    if count := subnormal_scales(scale, spec):
        some = f"{count} of {scale.numel()} scales {'is' if count == 1 else 'are'}"
        which = "the scale is" if scale.numel() == 1 else some
        reason = f"{which} below 2^-14, where float16 has fewer than 11 bits"
        result.skipped.append((site(node), reason))


def _convert_recurrent(node: fx.Node) -> None:
    """Replaces a recurrent layer; the quantizers of its outputs stay children of the new module."""
    module = cast(QATRecurrent, module_of(node))
    new = QuantizedRecurrent(module)
    for name, child in module.named_children():
        if child is not module.weight_fake_quants:
            new.add_module(name, child)
    cast(fx.GraphModule, node.graph.owning_module).set_submodule(str(node.target), new)


def _keep_activation_apart(node: fx.Node) -> None:
    """Puts a barrier between a Conv or Linear and a ReLU that stays float.

    ONNX Runtime would fuse the two in float before it looks for 8-bit kernels.
    """
    for user in [u for u in node.users if facts(u).activation]:
        with node.graph.inserting_before(user):
            user.replace_input_with(node, node.graph.call_function(torch.ops.qatkit.barrier, (node,)))


def _keep_float_readers(graph_module: fx.GraphModule) -> None:
    """Puts a barrier between a Linear with several readers and those that are, or lead to, quantizers.

    ONNX Runtime quantizes a Linear's output for all of its readers or for none.
    """
    for node in list(graph_module.graph.nodes):
        if (
            not _for_onnxruntime(node)
            or not _is_converted(node)
            or _is_convolution(node)
            or len(node.users) < 2
        ):
            continue
        for user in [u for u in node.users if _leads_to_quantizers(u)]:
            with node.graph.inserting_before(user):
                user.replace_input_with(node, node.graph.call_function(torch.ops.qatkit.barrier, (node,)))


def _leads_to_quantizers(node: fx.Node) -> bool:
    """Returns whether `node` is a quantizer, or changes a shape and is read only by quantizers."""
    if is_quantizer(node):
        return True
    return op_class(node) == "shape" and bool(node.users) and all(map(_leads_to_quantizers, node.users))


def _keep_from_shapes_and_pairs(node: fx.Node) -> None:
    """Puts a barrier between a dequantize or Transpose and a LayerNorm or GELU after it.

    ONNX Runtime would otherwise duplicate the dequantize or Transpose, since these operators read their input
    twice.
    """
    before = node.all_input_nodes[0]
    if turns_axes(before) or quantizer_of(before) is not None:
        with node.graph.inserting_before(node):
            node.replace_input_with(before, node.graph.call_function(torch.ops.qatkit.barrier, (before,)))


def _convert_arithmetic(node: fx.Node, kind: Any) -> None:
    """Makes an operator compute what its 8-bit kernel computes, if its tensors have 8 bits.

    For these operators this is not exactly dequantize → operator → quantize.
    """
    if issubclass(kind, QuantizedPair):
        _convert_two_inputs(node, kind)
    elif (quantizer := quantizer_of(node.args[0])) is None or not _spec(quantizer).any_scale:
        return  # the allowed scales do not include sixths, so it is computed in float and rounded
    elif _has_bytes(quantizer):
        node.meta["integer"] = functools.partial(kind, _pair(quantizer))


def _convert_two_inputs(node: fx.Node, kind: type[QuantizedPair]) -> None:
    """Replaces an Add or Mul of two quantized tensors by a module with the kernel's arithmetic."""
    quantizers, after = [quantizer_of(a) for a in node.args], quantizer_after(node)
    if node.kwargs or len(quantizers) != 2 or after is None or None in quantizers:
        return
    if not all(_has_bytes(cast(fx.Node, q)) for q in (*quantizers, after)):
        return  # the operator is computed in float and its result is rounded
    path, owner = site(node), cast(fx.GraphModule, node.graph.owning_module)
    owner.add_submodule(path, kind([_pair(cast(fx.Node, q)) for q in (*quantizers, after)]))
    node.op, node.target = "call_module", path


def _pair(quantizer: fx.Node) -> tuple[Tensor, Tensor]:
    """Returns scale and zero_point of a FakeQuantize node."""
    return cast(FakeQuantize, module_of(quantizer)).shipped()


def _spec(quantizer: fx.Node) -> QuantSpec:
    return cast(FakeQuantize, module_of(quantizer)).spec


def _has_bytes(quantizer: fx.Node) -> bool:
    """Returns whether a quantizer has 8-bit integers, the only ones that these kernels support."""
    spec = _spec(quantizer)
    return spec.form is None and not spec.wide


def _two_dimensional(node: fx.Node) -> None:
    """Flattens the leading dimensions of a Linear's input before its quantization, and restores them after."""
    shape, graph = list(node.meta["value"].shape), node.graph
    if len(shape) == 2:
        return
    free = _leading_sizes(node, shape)
    _read_rows(node)
    before = cast(fx.Node, node.args[0])
    # Reshape in float, where it costs nothing, so that the pair comes right before the Gemm.
    reader = before if is_quantizer(before) and len(before.users) == 1 else node
    _read_rows(reader)
    with graph.inserting_before(reader):
        rows = ("unsqueeze", (reader.args[0], 0)) if len(shape) == 1 else ("flatten", (reader.args[0], 0, -2))
        flat = graph.call_method(*rows)
    reader.args = (flat,)
    flat.meta = {"site": f"{site(node)}.flatten", "value": torch.empty(0, device="meta")}
    with graph.inserting_after(node):
        restored = graph.call_method("reshape", (node, tuple(free)))
    restored.meta = {"site": f"{site(node)}.reshape", "value": node.meta["value"]}
    node.replace_all_uses_with(restored, delete_user_cb=_all_but(restored))


def _leading_sizes(node: fx.Node, shape: Sequence[int]) -> list[Any]:
    """Returns the shape to restore: -1 for the batch axis, nodes for other free axes, else numbers.

    If the batch size is fixed, one of the free axes gets the -1, or the first axis if no axis is free.
    """
    sizes: list[Any] = list(shape)
    sizes[node.meta.get(BATCH_AXIS, 0)] = -1
    varying = [axis for axis in node.meta.get(VARYING_AXES, ()) if axis != node.meta.get(BATCH_AXIS)]
    if BATCH_AXIS not in node.meta and varying:  # the batch size is fixed
        sizes = list(shape)
        sizes[varying.pop()] = -1
    for axis in varying:
        with node.graph.inserting_before(node):
            sizes[axis] = node.graph.call_method("size", (node.args[0], axis))
        sizes[axis].meta = {"site": f"{site(node)}.size", "value": shape[axis]}
    return sizes


def _read_rows(reader: fx.Node) -> None:
    """Bypasses reshapes before `reader` that keep the last axis, and erases those without other readers."""
    before = cast(fx.Node, reader.args[0])
    rows = rows_of(before)
    reader.args = (rows,)
    while before is not rows and not before.users:
        dead, before = before, before.all_input_nodes[0]
        dead.graph.erase_node(dead)


def _all_but(*kept: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda user: user not in kept


def _is_int8_reader(node: fx.Node) -> bool:
    """Returns whether a reader of a dequantized tensor computes in 8 bits, or passes values on to one that does."""
    if _is_converted(node):
        return True
    if facts(node).keeps_range:
        return any(_is_int8_reader(user) for user in node.users)
    backend = cast(fx.GraphModule, node.graph.owning_module).meta["backend"]
    last = fused_activation(node, backend.fuses) or node
    return any(is_quantizer(u) for u in last.users)


def _repeat_pairs(graph_module: fx.GraphModule) -> None:
    """Repeats a quantizer after the value-moving operators behind it that have an int8 reader.

    They run in 8 bits only if the same quantization precedes and follows them.
    """
    for node in list(graph_module.graph.nodes):
        if not facts(node).keeps_range or not isinstance(node.meta.get("value"), Tensor):
            continue
        quantizer = quantizer_of(node)
        inside = [u for u in node.users if _is_convolution(u) and belongs_to(node, u)]
        others = [u for u in node.users if u not in inside]
        if quantizer is None or not any(_is_int8_reader(user) for user in others):
            continue
        if isinstance(module_of(quantizer), FormatFakeQuantize):  # its values are moved in float
            continue
        with graph_module.graph.inserting_after(node):
            again = graph_module.graph.call_module(str(quantizer.target), (node,))
        again.meta = {"site": f"{site(node)}_quant", QUANTIZES: site(node), "value": node.meta["value"]}
        node.replace_all_uses_with(again, delete_user_cb=_all_but(again, *inside))


def _is_converted(node: fx.Node) -> bool:
    """Returns whether a node is a converted Conv or Linear with integer weights and a quantized input."""
    return node.op == "call_module" and isinstance(module_of(node), Quantized)


def _is_convolution(node: fx.Node) -> bool:
    return _is_converted(node) and not cast(Quantized, module_of(node)).is_linear


def _convert_pair(node: fx.Node) -> None:
    graph_module = cast(fx.GraphModule, node.graph.owning_module)
    fake = module_of(node)
    before = cast(fx.Node, node.args[0])
    if not isinstance(fake, FakeQuantize):
        return
    if isinstance(fake, FormatFakeQuantize):
        graph_module.set_submodule(str(node.target), RoundToFormat(fake))
        return
    scale, zero_point = fake.shipped()
    arithmetic = before.meta.get("integer")
    if arithmetic is not None and fake.spec.dtype in WHOLE:
        module: nn.Module = arithmetic(scale, zero_point)
        node.args = (before.args[0],)
    else:
        ends = None if fake.spec.dtype in (*WHOLE, *WIDE) else fake.spec.type_range
        module = QuantizeDequantize(scale, zero_point, ends)
        if _for_onnxruntime(node) and _would_be_fused(before):
            with node.graph.inserting_before(node):
                node.args = (node.graph.call_function(torch.ops.qatkit.barrier, (before,)),)
    graph_module.set_submodule(str(node.target), module)


def _would_be_fused(node: fx.Node) -> bool:
    """Returns whether ONNX Runtime would quantize a float Conv or Linear because `node` is quantized after it.

    Activations and value-moving operators may lie in between, since ONNX Runtime's optimizer moves the
    quantize after `node` up through them.
    """
    while facts(node).keeps_range or facts(node).activation:
        node = node.all_input_nodes[0]
    return node.op == "call_module" and facts(node).weighted and is_float_tensor(node)
