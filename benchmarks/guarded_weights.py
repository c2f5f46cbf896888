"""Measures how much accuracy three remedies against saturation on x86 without VNNI cost, relative to plain 8 bits.

    uv run benchmarks/guarded_weights.py                                        # 20 torchvision models, random weights
    uv run benchmarks/guarded_weights.py recipe=resnet18_cifar10_ptq data.root=DIR model.checkpoint=FILE [--images 2000]

    bit      7 bits for every weight (backend.reduce_range=true)
    pairs    per channel, the smallest scale at which no sum of two products overflows 16 bits
             (backend.reduce_range=auto)
    fitted   8-bit scales; pairs of weights that can overflow 16 bits are changed to the nearest that cannot

With a recipe, ranges are set by MSE, and each remedy is tried on `--images` test images with weights rounded
to nearest and, except for `fitted`, also with moment rounding. It prints the SQNR of the logits against float
in dB, the same with only the weights quantized, and top-1; without a recipe, only the SQNR of each model. All
figures are those of the simulation, which equals ONNX Runtime with VNNI and, with the three remedies, also
without it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from coverage import build, inputs, tell_apart
from latency import sane
from torch import Tensor, fx

from qatkit import models
from qatkit.algorithms import MomentRounding
from qatkit.choose.ranges import calibrate_module
from qatkit.config.compose import compose_config
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import quantized_weights
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.numerics import weight_scale
from qatkit.quant.qat_layers import QATOperator
from qatkit.run.build import data_of, example_batch, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"
RANDOM = (
    *("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "vgg11", "alexnet", "googlenet", "densenet121"),
    *("squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0"),
    *("efficientnet_b0", "regnet_y_400mf", "regnet_x_400mf", "convnext_tiny", "vit_b_32", "swin_t"),
)  # fmt: skip
REMEDIES: dict[str, bool | str] = {"8 bits": False, "bit": True, "pairs": "auto", "fitted": "auto"}
Row = dict[str, tuple[float, float, float | None]]


def keep_scales(graph: fx.GraphModule) -> None:
    """Sets the scales of plain 8 bits, so that `fitted` changes only the pairs of weights that overflow."""
    for _, operator, fake in quantized_weights(graph):
        weight = cast(QATOperator, operator).effective()[0].detach()
        fake.fix(weight_scale(weight, replace(fake.spec, pairs=False)))


def decibel(exact: Tensor, found: Tensor) -> float:
    """Returns the SQNR of `found` in dB; the mean of each row of `exact` does not count as signal."""
    signal = (exact - exact.mean(1, keepdim=True)).square().sum()
    return 10 * math.log10(float(signal / (found - exact).square().sum()))


def logits(
    graph: fx.GraphModule, batches: Iterable[Tensor], *, quantize: bool, weights_alone: bool = False
) -> Tensor:
    """Returns the logits [images, classes] of a prepared graph; `weights_alone` keeps activations float."""
    with inference(graph):
        set_phase(graph, observe=False, quantize=quantize)
        for module in graph.modules() if weights_alone else ():
            if isinstance(module, FakeQuantize):
                module.enabled = False
        return torch.cat([graph(images).double() for images in batches])


def measured(
    graph: fx.GraphModule, batches: list[Tensor], labels: Tensor | None
) -> tuple[float, float, float | None]:
    """Returns the SQNR of the logits, the SQNR with only the weights quantized, and top-1 in percent."""
    exact = logits(graph, batches, quantize=False)
    found = logits(graph, batches, quantize=True)
    alone = logits(graph, batches, quantize=True, weights_alone=True)
    top1 = None if labels is None else 100 * float((found.argmax(1) == labels).double().mean())
    return decibel(exact, found), decibel(exact, alone), top1


def random_model(name: str) -> Row:
    """Returns the figures of each remedy for a torchvision model with random weights."""
    model, shape = build(name, "classification")
    sane(model, [torch.randn(8, *shape)])
    model.eval()
    images = inputs(64, shape, seed=1)
    tell_apart(model, list(images.split(16)))

    def made(backend: Backend) -> QATModule:
        module = QATModule(model, images[:2], backend=backend)
        module.calibrate(list(images[:32].split(16)))
        return module

    return row(made, list(images[32:].split(16)), None, None)


def row(
    made: Callable[[Backend], QATModule],
    batches: list[Tensor],
    labels: Tensor | None,
    moments: Callable[[], Iterable[Tensor]] | None,
) -> Row:
    """Returns the figures of each remedy, by name, for one model.

    Args:
        made: returns the calibrated module for a backend.
        batches: test images.
        labels: their labels, if they have any.
        moments: returns the images for moment rounding; None leaves it out.
    """
    found: Row = {}
    for name, choice in REMEDIES.items():
        module = made(FBGEMM.reduced(choice))
        if name == "fitted":
            keep_scales(module.graph)
        found[name] = measured(module.graph, batches, labels)
        if moments is not None and name != "fitted":
            MomentRounding()(module.graph, moments())
            found[f"{name}, moments"] = measured(module.graph, batches, labels)
    return found


def of_recipe(overrides: list[str], count: int) -> Row:
    """Returns the figures of each remedy for the model, images and settings of a train.py command line."""
    plain = ["algorithm=none", "calibration=mse", "data.workers=0", "trainer.progress=false"]
    config = compose_config(CONF, [*overrides, *plain])
    data = data_of(config)
    model = models.build(config.model, data.num_classes).eval()

    def made(backend: Backend) -> QATModule:
        chosen = "auto" if backend.weight.pairs else backend.weight.reduce_range
        asked = replace(config, backend=replace(config.backend, reduce_range=chosen))
        module = qat_module(asked, model, data.inputs, QATModule)
        calibrate_module(module, data, asked, example_batch(asked, data.inputs))
        return module

    pairs = list(data.test_subset(min(count, data.test_count), 50))
    labels = torch.cat([torch.as_tensor(these) for _, these in pairs])
    seen = data.image_batches(data.calibration_indices(64), 64)
    return row(made, [images for images, _ in pairs], labels, lambda: (images for images, _ in seen))


def main(arguments: list[str]) -> None:
    """Measures one recipe, or all torchvision models with random weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", help="arguments of train.py (default: models with random weights)"
    )
    parser.add_argument("--images", type=int, default=2000, help="number of test images, with a recipe")
    parser.add_argument(
        "--models", nargs="+", default=list(RANDOM), help="torchvision models with random weights"
    )
    asked = parser.parse_args(arguments)
    if asked.overrides:
        for name, (total, alone, top1) in of_recipe(asked.overrides, asked.images).items():
            print(
                f"{name:18} {total:6.2f} dB   weights only {alone:6.2f} dB   top-1 {top1:.2f} %", flush=True
            )
        return
    lost = dict[str, list[float]]()
    print(
        f"{'':22}"
        + "".join(f"{name:>9}" for name in REMEDIES)
        + "   SQNR of the logits in dB, random weights"
    )
    for name in asked.models:
        found = random_model(name)
        print(f"{name:22}" + "".join(f"{found[one][0]:9.2f}" for one in REMEDIES), flush=True)
        for one in REMEDIES:
            lost.setdefault(one, []).append(found["8 bits"][0] - found[one][0])
    print(f"{'median loss':22}" + "".join(f"{statistics.median(lost[one]):9.2f}" for one in REMEDIES))
    print(f"{'largest loss':22}" + "".join(f"{max(lost[one]):9.2f}" for one in REMEDIES))


if __name__ == "__main__":
    main(sys.argv[1:])
