"""Measures the accuracy of calibration methods in simulation; all use the same images.

    uv run benchmarks/calibration_methods.py recipe=vit_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--images 1000] [--calibration 512] [--methods min-max MSE]

Arguments before the options are those of train.py. No algorithm runs, and ranges of weights are not clipped. For
each method it prints top-1 on the test images, the share of images with the float model's class, and the SQNR
of the outputs against float in dB. In addition to the methods of `calibration`, "own MAE" and "own MSE"
choose, for each tensor, the one of the percentiles 99.99, 99.999 and 99.99999 with the least mean absolute or
squared error of the tensor itself, like AMD Quark's LayerWisePercentile. "layerwise" (among min-max and
percentiles) and "best of each tensor" (among all methods of `calibration`) add the error of the outputs that
are computed from the tensor. "powers of two" rounds the scales of MSE to powers of two
(backend.scale_type=pow2).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx

from qatkit import models
from qatkit.calibration.candidates import METHODS, apply, best_of_each, candidates, output_errors
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.graph.phase import inference, set_phase
from qatkit.quant import numerics
from qatkit.quant.observers import Histogram, Method, Percentile
from qatkit.quant.observers.range_methods import Ends, points_of
from qatkit.quant.spec import QuantSpec
from qatkit.run.build import data_of, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"
_PLAIN = ("algorithm=none", "calibration=mse", "trainer=cpu", "data.workers=0")
_PERCENTILES = (99.99, 99.999, 99.99999)


@dataclass(frozen=True)
class OwnError(Method):
    """The percentile with the least error of the tensor itself: MAE for power 1, MSE for power 2."""

    power: int

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        offered = [Percentile(one).range_of(histogram, spec) for one in _PERCENTILES]
        points, shares = points_of(histogram)

        def error(ends: Ends) -> float:
            low, high = (torch.tensor(end) for end in ends)
            scale, zero_point = numerics.choose_qparams(low, high, spec)
            near = numerics.fake_quantize(points, scale, zero_point, spec)
            return float((near - points).abs().pow(self.power) @ shares)

        return min(offered, key=error)


# These choose, for each tensor, the listed method with the least error by `output_errors`.
_CHOSEN = {
    "layerwise": [name for name in METHODS if name == "min-max" or "percentile" in name],
    "best of each tensor": list(METHODS),
}
_ROUNDED = "powers of two"
EVERY: dict[str, Method] = {**METHODS, "own MAE": OwnError(1), "own MSE": OwnError(2)}


def observed(config: Config, data: DataModule, count: int) -> QATModule:
    """Returns the module whose observers have histograms of all activations of `count` images."""
    module = qat_module(config, models.build(config.model, data.num_classes), data.inputs, QATModule)
    module.mixed_scales = module.mean_shifts = "report"
    module.calibrate(images for images, _ in data.calibration_batches(count, 64))
    return module


def outputs(graph: fx.GraphModule, batches: Sequence[Tensor], *, quantize: bool) -> Tensor:
    """Returns the graph's outputs for all images."""
    with inference(graph):
        set_phase(graph, observe=False, quantize=quantize)
        return torch.cat([graph(images) for images in batches])


def main() -> None:
    """Measures one recipe and prints one line per method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--calibration", type=int, default=512, help="number of calibration images")
    known = [*EVERY, *_CHOSEN, _ROUNDED]
    parser.add_argument("--methods", nargs="+", choices=known, default=known)
    asked, overrides = parser.parse_known_args()
    config = compose_config(CONF, [*overrides, *_PLAIN])
    data = data_of(config)
    batches = list(data.test_subset(asked.images, 100))
    images, labels = [x for x, _ in batches], torch.cat([y for _, y in batches])
    module = observed(config, data, asked.calibration)
    exact = outputs(module.graph, images, quantize=False)

    def told(name: str, found: Tensor) -> None:
        top, same = (100 * (found.argmax(1) == one).float().mean() for one in (labels, exact.argmax(1)))
        noise = (found - exact).double().square().sum()
        decibels = 10 * torch.log10(exact.double().square().sum() / noise) if noise else torch.inf
        print(f"{name:24} top-1 {top:.2f}  same {same:.1f} %  {decibels:.1f} dB", flush=True)

    told("float", exact)
    offered = candidates(module.graph, EVERY)
    if not _CHOSEN.keys().isdisjoint(asked.methods):
        some = [one for one, _ in data.calibration_batches(16, 16)]
        errors = output_errors(module.graph, {name: offered[name] for name in METHODS}, some)
        for name, names in _CHOSEN.items():
            offered[name] = best_of_each({one: offered[one] for one in names}, errors)
    for name in (one for one in offered if one in asked.methods):
        apply(module.graph, offered[name])
        told(name, outputs(module.graph, images, quantize=True))
    if _ROUNDED not in asked.methods:
        return
    rounded = replace(config, backend=replace(config.backend, scale_type="pow2"))
    module = observed(rounded, data, asked.calibration)
    told(_ROUNDED, outputs(module.graph, images, quantize=True))


if __name__ == "__main__":
    main()
