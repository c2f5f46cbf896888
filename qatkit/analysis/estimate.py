"""Estimates the sensitivity of all sites at once by a forward pass, and a backward pass for some of the images.

z is the first floating-point output. A small error dy at one site changes z by J·dy. The Kullback-Leibler divergence
between the softmax p of the float output and the softmax of the changed output is

    KL ~ 1/2 (J·dy)^T F (J·dy),    F = diag(p) - p·p^T        Fisher's information of the softmax

Let e be standard normal and v = sqrt(p)*e - p sum(sqrt(p)*e), with * element by element. Then E[v·v^T] = F. If g is
the gradient of v·z at the site,

    KL ~ 1/2 E[(g·dy)^2]

where g·dy is summed over the site's values for each image. The sum of (g·dy)^2 over the images is divided by the number
of rows, that is, of decisions (`qatkit.analysis.outputs`). If v itself is standard normal, E[(g·dy)^2] is the squared
error of z. dy is the error from the quantization of the site itself. For a weight, dy is the change of the operator's
output by the rounding errors of weight and bias. If an image represents others (`qatkit.analysis.drawn_images`), its v
is multiplied by the square root of its weight.

Sources: Li et al., "BRECQ", 2021, section 3.2 (the estimate by curvature); Martens, "New insights and perspectives on
the natural gradient method", 2020, section 9 (Fisher's information as the curvature of KL).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.analysis.drawn_images import DrawnImages
from qatkit.analysis.outputs import rows_of
from qatkit.analysis.switches import Switch, switches
from qatkit.analysis.walk import PreparedInterpreter
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.signature import Example, inputs_of, leaves
from qatkit.progress import Batches, shown
from qatkit.records.analysis import ONLY, SensitivityRow
from qatkit_verify.errors import ConfigError


def estimate(
    graph_module: fx.GraphModule,
    batches: Batches,
    *,
    at: Sequence[Switch] | None = None,
    of_outputs: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> list[SensitivityRow]:
    """Estimates the loss from quantizing each site on its own.

    Args:
        graph_module: a prepared graph whose ranges are set.
        batches: batches of (inputs, labels); the labels are not read.
        at: the sites (`switches`); all by default.
        of_outputs: whether the loss is the squared error of the first floating-point output, summed over classes,
            instead of the divergence in nats.
        seed: the seed of the random vectors.
        progress: whether to show a progress bar.

    Returns:
        Rows in graph order, with the direction "only" and `exact` False. They have a loss but no other metric.

    Raises:
        ConfigError: there are no images.
    """
    sites = switches(graph_module) if at is None else list(at)
    runner = _Gradients(graph_module, sites, of_outputs)
    generator = torch.Generator().manual_seed(seed)
    with inference(graph_module), _without_parameters(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        for inputs, _ in shown(batches, "sensitivity, estimated", progress):
            runner.add(inputs, generator)
    if not runner.rows:
        raise ConfigError("analysis.images", 0, "at least one sample to estimate sensitivity")
    return [
        SensitivityRow(one.site, one.kind, ONLY, None, runner.loss(one), None, exact=False) for one in sites
    ]


@contextmanager
def _without_parameters(graph_module: fx.GraphModule) -> Iterator[None]:
    """Turns off the gradients of parameters within the context, since only activations need gradients."""
    asked = [p for p in graph_module.parameters() if p.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


class _Gradients(PreparedInterpreter):
    """Sums (g·dy)^2, as defined at the top of this file, over the images for every site."""

    def __init__(self, graph_module: fx.GraphModule, sites: Sequence[Switch], of_outputs: bool) -> None:
        super().__init__(graph_module)
        self._of_outputs = of_outputs
        self._by_node = {switch.node: switch for switch in sites}
        self._drawn = DrawnImages(graph_module, sites)
        self.totals = {switch.key: 0.0 for switch in sites}
        self.rows, self._images = 0.0, 1

    def add(self, inputs: Example, generator: torch.Generator) -> None:
        """Adds one batch."""
        # Detached, so that the caller's own tensors do not get gradients.
        tensors = tuple(one.detach() for one in inputs_of(self._graph, inputs))
        tensors, weights = self._drawn.draw(tensors, generator)
        self._images = len(weights)
        with torch.enable_grad():
            outputs = [one for one in self.outputs(tensors) if one.is_floating_point()]
            rows = rows_of(outputs[0])
            p = rows.detach().softmax(1)
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
            v = noise if self._of_outputs else p.sqrt() * noise - p * (p.sqrt() * noise).sum(1, keepdim=True)
            places = len(rows) / len(weights)
            self.rows += places * float(weights.sum())
            if places.is_integer():
                v *= weights.sqrt().to(v).repeat_interleave(int(places))[:, None]
            if rows.requires_grad:
                (v * rows).sum().backward()

    def loss(self, switch: Switch) -> float:
        """Returns the estimated loss of a site, in nats or as a squared error, per row (`qatkit.analysis.outputs`)."""
        return self.totals[switch.key] / (self.rows if self._of_outputs else 2 * self.rows)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        switch = self._by_node.get(n)
        values = None if switch is None else first_float(result)
        if switch is None or values is None:
            return result
        error = self._error(n, switch, values.detach())
        if not values.requires_grad:
            values.requires_grad_()
        values.register_hook(self._listener(switch.key, error))
        return result

    def _error(self, node: fx.Node, switch: Switch, values: Tensor) -> Tensor:
        """Returns the error that quantization at a site adds to the values that its node computes."""
        operator = switch.operator
        with torch.no_grad():
            if operator is None:
                switch.turn(True)
                found = cast(Tensor, first_float(super().run_node(node)))
                switch.turn(False)
                return found.detach().sub_(values)
            weight, bias = self.weights(operator, False)
            near, near_bias = self.weights(operator, True)
            change = None if bias is None or near_bias is None else near_bias - bias
            (x,) = itertools.islice(self.fetch_args_kwargs_from_env(node)[0], 1)
            return operator.run(x.detach(), near - weight, change)

    def _listener(self, key: str, error: Tensor) -> Callable[[Tensor], None]:
        images = self._images

        def listen(gradient: Tensor | None) -> None:
            if (
                gradient is None
            ):  # no output depends on it, such as a state of a recurrent layer that nothing reads
                return
            groups = images if error.ndim and len(error) % images == 0 else 1
            product = gradient.reshape(groups, 1, -1) @ error.reshape(groups, -1, 1)
            self.totals[key] += float(product.double().square().sum())

        return listen


def first_float(value: Any) -> Tensor | None:
    """Returns the first floating-point tensor of a node's result; None if there is none."""
    found = (one for _, one in leaves(value) if isinstance(one, Tensor) and one.is_floating_point())
    return next(found, None)
