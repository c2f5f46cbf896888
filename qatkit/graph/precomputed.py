"""A prepared graph for inference on many images: all values that do not depend on the images are computed once.

    prepared   x ── Conv(fold(w, BatchNorm) ── round) ── quantize     computes the weight again for each batch
    settled    x ── Conv(final w), quantized in place                 computes the same values

On the CPU the weights of convolutions are stored with the channels last, so that convolutions return their results in
this order too. oneDNN's own order of channels would have to be converted before and after each quantizer. Figures:
decision 41.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit.graph.convert.integer_modules import Settings
from qatkit.graph.nodes import module_of
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATEmbedding, QATOperator, with_the_same_parameters
from qatkit.quant.recurrent_layers import QATRecurrent


class _Operator(nn.Module):
    """A Conv or Linear with the current quantized weight and the bias of a prepared operator."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, operator: QATOperator) -> None:
        super().__init__()
        with torch.no_grad():
            weight, bias = operator.quantized(*operator.effective())
        self.settings = Settings(operator)
        if weight.ndim == 4 and weight.device.type == "cpu":
            weight = weight.contiguous(memory_format=torch.channels_last)
        self.steps: tuple[float, int, int] | None = None
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        made = self.settings.infer(x, self.weight, self.bias)
        return made if self.steps is None else numerics.to_steps(made, *self.steps, in_place=True)

    def take(self, quantizer: FakeQuantize) -> None:
        """Makes the operator quantize its output with `quantizer`."""
        zero, (low, high) = int(quantizer.zero_point), quantizer.spec.type_range
        self.steps = (float(quantizer.scale), low - zero, high - zero)


def settled_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy for inference in which the weights are quantized and BatchNorms are folded into them.

    Everything else is shared with the original. The copy is valid until the original is trained, loaded or moved.
    """
    graph = fx.Graph()
    graph.output(cast(Any, graph.graph_copy(graph_module.graph, {})))
    copy = fx.GraphModule(graph_module, graph)
    graph = copy.graph
    copy.meta = graph_module.meta
    operators = [
        n for n in copy.graph.nodes if n.op == "call_module" and isinstance(module_of(n), QATOperator)
    ]
    for number, node in enumerate(operators):
        made = _Operator(cast(QATOperator, module_of(node)))
        node.target = (
            f"settled_{number}"  # a new path, since parents of the old path may belong to the original
        )
        copy.add_module(node.target, made)
        reader = next(iter(node.users), None)
        if len(node.users) == 1 and reader is not None and _quantizes_plainly(reader):
            made.take(cast(FakeQuantize, module_of(reader)))
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)
    others = [
        n
        for n in graph.nodes
        if n.op == "call_module" and isinstance(module_of(n), (QATRecurrent, QATEmbedding))
    ]
    for number, node in enumerate(others):
        plain = _plain(cast("QATRecurrent | QATEmbedding", module_of(node)))
        node.target = f"settled_layer_{number}"
        copy.add_module(node.target, plain)
    copy.recompile()
    return copy


def _plain(layer: QATRecurrent | QATEmbedding) -> nn.Module:
    """Returns the layer as torch's own type, with its current quantized weights."""
    base: Any = next(t for t in type(layer).__mro__ if t.__module__.startswith("torch.nn"))
    plain: nn.Module = with_the_same_parameters(layer, base)
    plain._modules.clear()
    with torch.no_grad():
        if isinstance(layer, QATEmbedding):
            values = {"weight": layer.weight_fake_quant(layer.weight)[0]}
        else:
            values = dict(zip(layer._flat_weights_names, layer._flat_weights, strict=True))
    plain._parameters |= {name: nn.Parameter(value.detach()) for name, value in values.items()}
    if isinstance(plain, nn.RNNBase):
        plain._init_flat_weights()
    return plain


def _quantizes_plainly(node: fx.Node) -> bool:
    """Returns whether a node only quantizes, on the CPU and by the unchanged forward of FakeQuantize."""
    fake = module_of(node) if node.op == "call_module" else None
    if not isinstance(fake, FakeQuantize) or type(fake).forward is not FakeQuantize.forward:
        return False
    return fake.enabled and not fake.observing and fake.scale.device.type == "cpu"
