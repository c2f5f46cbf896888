"""Measures the accuracy of lists of algorithms without training, in simulation, on the same images.

    uv run benchmarks/algorithms.py recipe=vit_cifar10_w4a4_qat schedule=calibrate_only quantizer=fake_quantize
        data.root=DIR model.checkpoint=FILE --kinds none adaround shift_channels+smooth_quant
        [--images 2000] [--batch 100] [--threads 1]

A kind is a list of options of the group algorithm, joined by +, with further settings after commas
(`block_reconstruction,algorithm.block_reconstruction.steps=200`). The other arguments are those of train.py. For each
kind it prints top-1, the difference from the first kind's top-1 with its standard error (paired over images), the
share of images with the float model's class, and the SQNR (dB) and KL divergence (nats) of the outputs against float.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from guarded_weights import decibel, logits
from torch import Tensor

from qatkit import models
from qatkit.algorithms.base import CALIBRATED, OBSERVED, algorithms_of
from qatkit.algorithms.blocks.journal import working
from qatkit.choose.ranges import calibrate_module
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.run.allocator import keep_freed_memory
from qatkit.run.build import data_of, example_batch, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"


def settings_of(kind: str) -> list[str]:
    """Returns the overrides of train.py for a kind."""
    options, *settings = kind.split(",")
    return [f"algorithm=[{options.replace('+', ',')}]", *settings]


def quantized(config: Config, data: DataModule) -> QATModule:
    """Returns the calibrated module of a configuration, with its algorithms applied."""
    model = models.build(config.model, data.num_classes).eval()
    module = qat_module(config, model, data.inputs, QATModule)
    module.eval()

    def call(stage: str, hook: Callable[..., None]) -> None:
        for name, algorithm in algorithms_of(config.algorithm).items():
            if algorithm.stage == stage:
                indices = data.calibration_indices(algorithm.images, f"algorithm.{name}.images")
                seen = data.image_batches(indices, config.calibration.batch_size)
                hook((images for images, _ in seen), [algorithm])

    with working(progress=config.trainer.progress, seed=config.seed, file=None):
        call(OBSERVED, module.adjust)
        calibrate_module(module, data, config, example_batch(config, data.inputs))
        call(CALIBRATED, module.correct)
    module.eval()
    module.ready_to_convert()
    return module


def divergence(exact: Tensor, found: Tensor) -> float:
    """Returns KL(softmax(exact) || softmax(found)), in nats per image."""
    p = exact.log_softmax(1)
    return float((p.exp() * (p - found.log_softmax(1))).sum(1).mean())


def measure(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Prints the accuracy of the float model, then one line per kind."""
    more = ["trainer=cpu", "trainer.progress=false", "verify.control=false"]
    made = [compose_config(CONF, [*overrides, *more, *settings_of(kind)]) for kind in args.kinds]
    data = data_of(made[0])
    test = list(data.test_subset(args.images, args.batch))
    labels = torch.cat([torch.as_tensor(these) for _, these in test])
    images, exact, first = [batch for batch, _ in test], None, None
    for kind, config in zip(args.kinds, made, strict=True):
        graph = quantized(config, data).graph
        # The first kind's algorithms may shift and scale channels, which does not change the float function.
        if exact is None:
            exact = logits(graph, images, quantize=False)
            print(f"float: top-1 {100 * float((exact.argmax(1) == labels).double().mean()):.2f} "
                  f"of {len(labels)} images", flush=True)  # fmt: skip
        found = logits(graph, images, quantize=True)
        right = (found.argmax(1) == labels).double()
        first = right if first is None else first
        gain = 100 * (right - first)
        print(
            f"{kind}: top-1 {100 * float(right.mean()):.2f}, "
            f"{float(gain.mean()):+.2f} ± {float(gain.std()) / len(gain) ** 0.5:.2f}, "
            f"same {100 * float((found.argmax(1) == exact.argmax(1)).double().mean()):.2f}, "
            f"{decibel(exact, found):.2f} dB, KL {divergence(exact, found):.5f}",
            flush=True,
        )


def main() -> int:
    """Measures all kinds with one recipe."""
    parser = argparse.ArgumentParser(
        description="Measures the accuracy of each list of algorithms without training."
    )
    parser.add_argument("--kinds", nargs="+", default=["none"])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    measure(args, overrides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
