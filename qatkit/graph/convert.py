"""Convert: from simulation to integers.

Weights become int8 buffers, biases int32 at scale s_x·s_w, and every FakeQuantize an explicit pair of
quantize and dequantize. The result runs in PyTorch and is the reference that the ONNX file is held against.
What ONNX Runtime wants beside that is written down here as graph rules, from docs/onnxruntime-qdq.md:

- an operator that only moves values gets the same pair again after it, if an int8 operator reads it;
- HardSigmoid becomes Add(x, 3) → quantize(6/255) → dequantize(1/255): its division is in the two scales;
- a Linear sees 2-D inputs (Gemm), with the reshapes around it;
- a float operator between a dequantize and a quantize, or behind a dequantize where ONNX Runtime would
  otherwise miss a fusion, is set apart by a barrier (an ONNX Sum with one input).
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit import numerics
from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.ops import FIXED_RANGE, SAME_RANGE, WEIGHTED, is_float_tensor, module_of, op_class, site
from qatkit.graph.result import PassResult
from qatkit.graph.trace import tidy
from qatkit.operators import QATOperator
from qatkit.spec import QuantSpec

_INT32_MAX = 2**31 - 1


@torch.library.custom_op("qatkit::barrier", mutates_args=())
def barrier(x: Tensor) -> Tensor:
    """The identity, exported as a single-input Sum, which ONNX Runtime's QDQ fusions do not look through."""
    return x.clone()


@barrier.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class QuantizeDequantize(nn.Module):
    """x → quantize → dequantize with fixed parameters; `scale_ratio` divides the second scale (HardSigmoid)."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, zero_point: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.ops.qatkit.quantize(x, self.scale, self.zero_point)
        return cast(Tensor, torch.ops.qatkit.dequantize(q, self.scale, self.zero_point, 0))


class QuantizedHardSigmoid(nn.Module):
    """hardsigmoid(x) = clamp(x + 3, 0, 6) / 6, quantized to 0..255 as x + 3 at 6/255 and read back at 1/255."""

    def __init__(self, scale: Tensor, zero_point: Tensor) -> None:
        super().__init__()
        info = torch.iinfo(zero_point.dtype)
        self.register_buffer("three", torch.tensor(info.max, dtype=zero_point.dtype))
        self.register_buffer("three_scale", torch.tensor(3.0 / (info.max - info.min)))
        self.register_buffer("three_zero_point", torch.tensor(info.min, dtype=zero_point.dtype))
        self.register_buffer("sum_scale", scale * 6)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def forward(self, x: Tensor) -> Tensor:
        dequantize = torch.ops.qatkit.dequantize
        three = dequantize(self.three, self.three_scale, self.three_zero_point, 0)
        q = torch.ops.qatkit.quantize(x + three, self.sum_scale, self.zero_point)
        return cast(Tensor, dequantize(q, self.scale, self.zero_point, 0))


class Quantized(nn.Module):
    """A Conv or Linear whose weight is int8 and whose bias is int32.

    Called, it does what an int8 kernel does: sums of integers, exact in float32 up to 2²⁴, then one
    multiplication by s_x·s_w (/ s_y). While it is exported it spells out dequantize → operator instead.

    Buffers: weight int8, weight_scale [] or [out], bias int32 [out], bias_scale of weight_scale's shape.

    Args:
        input_scale: of the FakeQuantize before it, [].
        output_scale: of the FakeQuantize after it, []; None when the output stays float.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor
    bias: Tensor | None
    bias_scale: Tensor
    bias_zero_point: Tensor
    input_scale: Tensor
    output_scale: Tensor | None

    def __init__(self, operator: QATOperator, input_scale: Tensor, output_scale: Tensor | None) -> None:
        super().__init__()
        assert operator.weight_fake_quant is not None
        self.register_buffer("input_scale", input_scale.clone())
        self.register_buffer("output_scale", None if output_scale is None else output_scale.clone())
        spec = operator.weight_fake_quant.spec
        weight, bias = (None if t is None else t.detach().float() for t in operator.effective())
        assert weight is not None
        scale = operator.weight_fake_quant.scale(weight)
        scale, self.repaired = _avoid_overflow(scale, bias, input_scale)
        self.plain, self.is_linear = _Plain(operator), isinstance(operator, nn.Linear)
        self.register_buffer("weight", _to_integers(weight, scale, spec))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_zero_point", torch.zeros_like(scale, dtype=spec.torch_dtype))
        self.register_buffer("bias", None)
        if bias is not None:
            bias_scale = scale * input_scale
            self.register_buffer("bias", torch.round(bias.double() / bias_scale.double()).to(torch.int32))
            self.register_buffer("bias_scale", bias_scale)
            self.register_buffer("bias_zero_point", torch.zeros_like(bias_scale, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return self._explicit(x) if torch.compiler.is_exporting() else self._integer(x)

    def _integer(self, x: Tensor) -> Tensor:
        integers = torch.round(x / self.input_scale)
        total = self.plain(
            integers, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )
        channel = -1 if self.is_linear else 1
        scale = self.weight_scale * self.input_scale
        if self.output_scale is None:
            return total * numerics.along(scale, channel, total.ndim)
        # Rounded here, by the one product that ONNX Runtime multiplies with; the pair after it clamps.
        steps = torch.round(total * numerics.along(scale / self.output_scale, channel, total.ndim))
        return steps * self.output_scale

    def _explicit(self, x: Tensor) -> Tensor:
        dequantize = torch.ops.qatkit.dequantize
        weight = dequantize(self.weight, self.weight_scale, self.weight_zero_point, 0)
        bias = None
        if self.bias is not None:
            bias = dequantize(self.bias, self.bias_scale, self.bias_zero_point, 0)
        return self.plain(x, weight, bias)


class _Plain:
    """The operator's settings without its parameters; no Module, so it adds nothing to names or state."""

    def __init__(self, operator: QATOperator) -> None:
        self.bare = copy.copy(operator)
        self.bare._parameters, self.bare._modules = {"weight": None, "bias": None}, {}
        self.bare.bn = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.bare.run(x, weight, bias)


def convert(graph_module: fx.GraphModule) -> PassResult:
    """A converted copy of a prepared graph, on the CPU in inference mode; `skipped` tells what was repaired."""
    converted = copy.deepcopy(graph_module).cpu().eval()
    result = PassResult(converted)
    _drop_passes(converted)
    for node in list(converted.graph.nodes):
        if node.op == "call_module" and isinstance(module_of(node), QATOperator):
            _convert_operator(node, result)
    _repeat_pairs(converted)
    for node in list(converted.graph.nodes):
        if node.op == "call_module" and isinstance(module_of(node), FakeQuantize):
            _convert_pair(node)
            result.changed += 1
    tidy(converted)
    return result


def _to_integers(weight: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    q = torch.round(weight / numerics.along(scale, 0, weight.ndim))
    return q.clamp(spec.quant_min, spec.quant_max).to(spec.torch_dtype)


def _avoid_overflow(scale: Tensor, bias: Tensor | None, input_scale: Tensor) -> tuple[Tensor, int]:
    """Raises the scale of channels whose bias would not fit int32 (near-dead channels, so nothing is lost)."""
    if bias is None:
        return scale, 0
    needed = bias.abs().double() / (input_scale.double() * (_INT32_MAX // 2))
    needed = needed.max() if scale.ndim == 0 else needed
    too_small = scale.double() < needed
    return torch.where(too_small, needed.to(scale.dtype), scale), int(too_small.sum())


def _drop_passes(graph_module: fx.GraphModule) -> None:
    """Dropout and its like are the identity in inference."""
    for node in list(graph_module.graph.nodes):
        if op_class(node) == "pass" and node.all_input_nodes:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph_module.graph.erase_node(node)


def _quantizer_of(node: Any) -> fx.Node | None:
    """The FakeQuantize node whose range the value of `node` has, looking back through value-moving operators."""
    while isinstance(node, fx.Node):
        if node.op == "call_module" and isinstance(module_of(node), FakeQuantize):
            return node
        if op_class(node) not in SAME_RANGE:
            return None
        node = node.all_input_nodes[0]
    return None


def _convert_operator(node: fx.Node, result: PassResult) -> None:
    operator = cast(QATOperator, module_of(node))
    graph_module = cast(fx.GraphModule, node.graph.owning_module)
    if operator.weight_fake_quant is None:
        graph_module.set_submodule(str(node.target), _plain_operator(operator))
        return
    quantizer = _quantizer_of(node.args[0])
    if quantizer is None:
        raise ValueError(f"{site(node)}: its input carries no FakeQuantize")
    after = next(iter(node.users)) if len(node.users) == 1 else None
    fused = after is not None and after.op == "call_module" and isinstance(module_of(after), FakeQuantize)
    quantized = Quantized(operator, _scale(quantizer), _scale(cast(fx.Node, after)) if fused else None)
    if quantized.repaired:
        result.skipped.append(
            (site(node), f"scale of {quantized.repaired} near-dead channels raised (int32 bias)")
        )
    # A module called at several places has one bias scale per place, so every place gets its own.
    target = _free_target(node)
    graph_module.add_submodule(target, quantized)
    node.target = target
    if quantized.is_linear:
        _two_dimensional(node)


def _scale(quantizer: fx.Node) -> Tensor:
    return cast(FakeQuantize, module_of(quantizer)).scale


def _free_target(node: fx.Node) -> str:
    calls = [n for n in node.graph.nodes if n.op == "call_module" and n.target == node.target]
    return str(node.target) if len(calls) == 1 else f"{node.target}_{calls.index(node)}_{node.name}"


def _plain_operator(operator: QATOperator) -> nn.Module:
    """A float operator that was left out of quantization: its BatchNorm folded, its own type again."""
    weight, bias = operator.effective()
    base = next(t for t in type(operator).__mro__ if t.__module__.startswith("torch.nn"))
    plain = cast(nn.Module, base.__new__(base))
    plain.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in operator.__dict__.items()}
    plain._modules.clear()
    plain.weight = nn.Parameter(weight.detach())
    plain.bias = None if bias is None else nn.Parameter(bias.detach())
    return plain


def _two_dimensional(node: fx.Node) -> None:
    """Flattens the leading dimensions of a Linear's input before its quantization, and restores them after."""
    quantizer = cast(fx.Node, node.args[0])
    shape = list(node.meta["value"].shape)
    if len(shape) == 2:
        return
    graph = node.graph
    own = quantizer.op == "call_module" and isinstance(module_of(quantizer), FakeQuantize)
    if own and len(quantizer.users) == 1:
        # Reshape in float, where it costs nothing, so that the pair stands right before the Gemm.
        with graph.inserting_before(quantizer):
            flat = graph.call_method("flatten", (quantizer.args[0], 0, -2))
        quantizer.args = (flat,)
    else:
        with graph.inserting_before(node):
            flat = graph.call_method("flatten", (quantizer, 0, -2))
        node.args = (flat,)
    flat.meta = {"site": f"{site(node)}.flatten", "value": torch.empty(0, device="meta")}
    with graph.inserting_after(node):
        restored = graph.call_method("reshape", (node, (-1, *shape[1:])))
    restored.meta = {"site": f"{site(node)}.reshape", "value": node.meta["value"]}
    node.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)


def _is_int8_reader(node: fx.Node) -> bool:
    """Whether a reader of a dequantized tensor computes in 8 bits, or hands it to one that does."""
    if node.op == "call_module" and isinstance(module_of(node), Quantized):
        return True
    if op_class(node) in SAME_RANGE:
        return any(_is_int8_reader(user) for user in node.users)
    return any(u.op == "call_module" and isinstance(module_of(u), FakeQuantize) for u in node.users)


def _repeat_pairs(graph_module: fx.GraphModule) -> None:
    """Value-moving operators run in 8 bits when the same quantization follows them."""
    for node in list(graph_module.graph.nodes):
        if op_class(node) not in SAME_RANGE or not isinstance(node.meta.get("value"), Tensor):
            continue
        quantizer = _quantizer_of(node)
        if quantizer is None or not any(_is_int8_reader(user) for user in node.users):
            continue
        with graph_module.graph.inserting_after(node):
            again = graph_module.graph.call_module(str(quantizer.target), (node,))
        again.meta = {"site": f"{site(node)}_quant", "value": node.meta["value"]}
        node.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)


def _convert_pair(node: fx.Node) -> None:
    graph_module = cast(fx.GraphModule, node.graph.owning_module)
    fake = module_of(node)
    before = cast(fx.Node, node.args[0])
    if not isinstance(fake, FakeQuantize):
        return
    scale = fake.scale.detach().clone()
    zero_point = fake.zero_point.detach().to(fake.spec.torch_dtype)
    if op_class(before) == "hardsigmoid" and fake.bounds == FIXED_RANGE["hardsigmoid"]:
        module: nn.Module = QuantizedHardSigmoid(scale, zero_point)
        node.args = (before.args[0],)
    else:
        module = QuantizeDequantize(scale, zero_point)
        if _would_be_fused(before):
            with node.graph.inserting_before(node):
                node.args = (node.graph.call_function(torch.ops.qatkit.barrier, (before,)),)
    for call in [n for n in node.graph.nodes if n.op == "call_module" and n.target == node.target]:
        call.meta["scale_of"] = str(node.target)
    graph_module.set_submodule(str(node.target), module)


def _would_be_fused(node: fx.Node) -> bool:
    """A float Conv or Linear right before a quantize: ONNX Runtime would quantize its weight on its own."""
    return node.op == "call_module" and op_class(node) in WEIGHTED and is_float_tensor(node)
