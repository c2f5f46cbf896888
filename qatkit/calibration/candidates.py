"""Computes candidate ranges for each tensor in one pass over the images, and chooses the best one.

Every method computes its range from the same histogram. The error of a range is measured at the outputs of the
operators that read the tensor. A Conv or Linear is linear, so its relative output error follows from the error of its
input:

    |W·(q(x) - x)|² / |W·x|²

For any other operator, the error is |q(x) - x|² / |x|². A few images are enough to estimate how an operator responds to
an error, but not to estimate the tails that a range clips. Therefore |q(x) - x|² / |x|² over all images, computed from
the histogram, is added (for its benefit see docs/decisions/0013-calibration-contest.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.calibration.limits import set_limits
from qatkit.graph.nodes import module_of
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import QUANTIZES, fake_quantizers, is_quantizer
from qatkit.graph.scales.align import align
from qatkit.graph.signature import Example, inputs_of
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import MSE, Distribution, Entropy, HistogramObserver, MinMax, Percentile
from qatkit.quant.observers.range_methods import Ends, Method, chosen_range
from qatkit.quant.observers.squared_error import relative_error
from qatkit.quant.qat_layers import QATOperator

METHODS: dict[str, Method] = {
    "min-max": MinMax(),
    "percentile 99.9": Percentile(99.9),
    "percentile 99.99": Percentile(99.99),
    "percentile 99.999": Percentile(99.999),
    "entropy": Entropy(),
    "MSE": MSE(),
    "distribution": Distribution(),
}
# The name for the choice of the method with the smallest output error for each tensor.
MIXED = "best of each tensor"
Ranges = dict[str, Ends]


def candidates(graph_module: fx.GraphModule, methods: Mapping[str, Method] = METHODS) -> dict[str, Ranges]:
    """Returns the range of each tensor whose histogram has seen images, by method and by site."""
    observed = {
        name: (q, q.observer)
        for name, q in fake_quantizers(graph_module).items()
        if isinstance(q.observer, HistogramObserver) and q.observer.seen
    }
    return {
        title: {name: chosen_range(method, o.histogram, q.spec) for name, (q, o) in observed.items()}
        for title, method in methods.items()
    }


def apply(graph_module: fx.GraphModule, ranges: Ranges) -> None:
    """Sets the ranges of tensors by site, their limits, and the scales that follow from them."""
    for name, quantizer in fake_quantizers(graph_module).items():
        if name in ranges and quantizer.observer is not None:
            low, high = ranges[name]
            quantizer.observer.low.fill_(low)
            quantizer.observer.high.fill_(high)
    set_limits(graph_module)
    align(graph_module)


def output_errors(
    graph_module: fx.GraphModule, offered: Mapping[str, Ranges], batches: Iterable[Example]
) -> dict[str, dict[str, float]]:
    """Returns the error of each range (as defined above), averaged over the batches, by method and by site.

    Args:
        graph_module: the calibrated graph, with histograms.
        offered: the ranges from `candidates`.
        batches: batches of inputs as for `calibrate`; a few images are enough.
    """
    scorer = _Scorer(graph_module, offered)
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        for batch in batches:
            scorer.run(*inputs_of(graph_module, batch))
    return {
        title: {
            name: math.fsum(scorer.errors[name, title]) / len(scorer.errors[name, title]) for name in ranges
        }
        for title, ranges in offered.items()
    }


def best_of_each(offered: Mapping[str, Ranges], errors: Mapping[str, Mapping[str, float]]) -> Ranges:
    """Returns the range with the smallest output error for each tensor; in a tie, that of the first method."""
    first = next(iter(offered.values()))
    chosen = {name: min(offered, key=lambda title: errors[title][name]) for name in first}
    return {name: offered[title][name] for name, title in chosen.items()}


class _Scorer(fx.Interpreter):
    """An interpreter that runs the float graph and tries every range at every quantizer."""

    def __init__(self, graph_module: fx.GraphModule, offered: Mapping[str, Ranges]) -> None:
        super().__init__(graph_module)
        self.offered = offered
        self.errors: dict[tuple[str, str], list[float]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = str(n.meta.get(QUANTIZES))
        if is_quantizer(n) and name in next(iter(self.offered.values())):
            self._try_all(n, name, result)
        return result

    def _try_all(self, node: fx.Node, name: str, x: Tensor) -> None:
        quantizer = cast(FakeQuantize, module_of(node))
        spec, observer = quantizer.spec, cast(HistogramObserver, quantizer.observer)
        operators = [_linear_part(user) for user in node.users]
        references = [_energy(operator(x)) for operator in operators]
        known: dict[Ends, float] = {}
        for title, ranges in self.offered.items():
            ends = ranges[name]
            if ends not in known:
                low, high = torch.tensor(ends)
                scale, zero_point = quantizer.qparams(low, high)
                error = numerics.fake_quantize(x, scale, zero_point, spec) - x
                known[ends] = relative_error(observer.histogram, ends, spec) + sum(
                    _energy(operator(error)) / max(reference, 1e-30)
                    for operator, reference in zip(operators, references, strict=True)
                )
            self.errors[name, title].append(known[ends])


def _linear_part(reader: fx.Node) -> Any:
    """Returns the function from input error to output error: a Conv or Linear without bias, or the identity."""
    module = module_of(reader) if reader.op == "call_module" else None
    if isinstance(module, QATOperator):
        weight, _ = module.effective()
        return lambda x: module.run(x, weight, None)
    return lambda x: x


def _energy(x: Tensor) -> float:
    return float(x.float().square().sum())
