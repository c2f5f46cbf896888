"""Runs a graph several times, each time with one node changed, and computes the common part only once.

    walk      x ── a ── b ── c ── d ── outputs          one run of the whole graph
    branch              └ b' ─ c ── d ── outputs        computes b differently, and repeats only what follows

Quantized weights are computed once for all runs. Only one batch and one branch are in memory at a time, with the values
that the rest of the run needs. Memory therefore depends on the size of a batch, but not on the number of images or
sites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qatkit.analysis.switches import Switch
from qatkit.graph.signature import Example, inputs_of, on, output_leaves
from qatkit.quant.qat_layers import QATOperator

Weights = tuple[Tensor, Tensor | None]


class PreparedInterpreter(fx.Interpreter):
    """Runs a prepared graph in inference mode; quantizers that are turned on quantize.

    Args:
        graph_module: a prepared graph; its weights must not change while the interpreter is used.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self._graph = graph_module
        every = graph_module.graph.nodes
        # A placeholder may come after a quantizer.
        self._inputs = [node for node in every if node.op == "placeholder"]
        self._nodes = [node for node in every if node.op != "placeholder"]
        self._made: dict[tuple[int, bool], Weights] = {}
        first = next(graph_module.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device

    def outputs(self, batch: Example) -> tuple[Tensor, ...]:
        """Returns all outputs of one run."""
        return self.walk(batch, (), lambda switch, found: None)

    def walk(
        self,
        batch: Example,
        at: Sequence[Switch],
        see: Callable[[Switch, tuple[Tensor, ...]], None],
        *,
        branch_on: bool = True,
    ) -> tuple[Tensor, ...]:
        """Runs the graph once, with a branch to the outputs at each of the switches.

        Args:
            batch: the inputs.
            at: the switches; a branch turns its switch to `branch_on` for one node, and restores it afterwards.
            see: a function that is called with each switch and the outputs of its branch.
            branch_on: whether the branches turn their switch on (True) or off (False).

        Returns:
            The outputs without a branch.
        """
        self.env = dict(zip(self._inputs, on(self._device, inputs_of(self._graph, batch)), strict=True))
        by_node = {switch.node: switch for switch in at}
        result: Any = None
        for place, node in enumerate(self._nodes):
            if node in by_node:
                see(by_node[node], self._branch(place, by_node[node], branch_on))
            result = self._step(node)
        return output_leaves(result)[1]

    def _branch(self, place: int, switch: Switch, branch_on: bool) -> tuple[Tensor, ...]:
        kept, self.env = self.env, dict(self.env)
        before = [quantizer.enabled for quantizer in switch.quantizers]
        switch.turn(branch_on)
        try:
            result = self._step(self._nodes[place])
        finally:
            for quantizer, enabled in zip(switch.quantizers, before, strict=True):
                quantizer.enabled = enabled
        for node in self._nodes[place + 1 :]:
            result = self._step(node)
        self.env = kept
        return output_leaves(result)[1]

    def _step(self, node: fx.Node) -> Any:
        """Computes the value of a node and drops operands that no later node reads."""
        self.env[node] = result = self.run_node(node)
        for done in self.user_to_last_uses.get(node, ()):
            self.env.pop(done, None)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._graph.get_submodule(str(target))
        if not isinstance(module, QATOperator):
            return module(*args, **kwargs)
        return module.run(args[0] if args else next(iter(kwargs.values())), *self.weights(module))

    def weights(self, module: QATOperator, quantized: bool | None = None) -> Weights:
        """Returns the weight and bias that an operator uses in inference, cached.

        Args:
            module: the operator.
            quantized: whether to quantize them; None if the state of the quantizer decides.
        """
        quantizer = module.weight_fake_quant
        wanted = bool(quantizer is not None and quantizer.enabled) if quantized is None else quantized
        key = (id(module), wanted)
        if key not in self._made:
            with torch.no_grad():
                weight, bias = module.effective()
                if wanted and quantizer is not None:
                    before, quantizer.enabled = quantizer.enabled, True
                    weight, bias = quantizer(weight, bias)
                    quantizer.enabled = before
            self._made[key] = (weight.detach(), None if bias is None else bias.detach())
        return self._made[key]
