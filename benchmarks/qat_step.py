"""What does a training step with fake quantization cost, against the float model's own?

    uv run benchmarks/qat_step.py [--models resnet18 vit] [--steps 30] [--batch 64] [--threads 2] [--compile] [--pt2e]
                                 [--channels-last]

One step is forward, loss, backward and SGD. The models take turns, step by step, in one process:

    float       the torchvision model in train mode with its BatchNorm, as one fine-tunes it
    observing   qatkit's prepared model, BatchNorm folded, ranges still being observed (the first half of a
                fine-tuning by default)
    frozen      the same with fixed ranges (the second half)
    lsq         scales of weights and activations are learned (quantizer=lsq), and aligned before each step

    pt2e        with --pt2e: torchao's prepare_qat_pt2e with its X86InductorQuantizer, ranges still being observed

With --compile all of them go through torch.compile, as trainer.compile=true does it, and the ratio is to the compiled
float model. With --channels-last the weights of all of them have their channels innermost, as trainer.channels_last
lays them out. A ratio is taken within each round, then summarized. "kept" is the memory of all tensors that the forward
pass saves for the backward pass, each storage once: what decides the largest batch that fits (not with --compile).
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit import models, report
from qatkit.config.schema import ModelConfig, ScheduleConfig
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.run.loop.fit import keep_freed_memory
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule

VIT = "torchvision.models.vision_transformer.VisionTransformer"
VIT_SIZES = {"image_size": 32, "patch_size": 4, "num_layers": 6, "num_heads": 3, "hidden_dim": 192,
             "mlp_dim": 768}  # fmt: skip
# Name: the model and the pixels of its square input.
MODELS = {
    "resnet18": (ModelConfig(name="resnet18"), 64),
    "mobilenet_v2": (ModelConfig(name="mobilenet_v2"), 64),
    "vit": (ModelConfig(name=VIT, kwargs=VIT_SIZES), 32),
}
CLASSES, WARMUP = 10, 3
VARIANTS = ("float", "observing", "frozen", "lsq")
PT2E = "pt2e"
LSQ = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)

Step = Callable[[], None]


def make_steps(
    name: str, batch: int, variants: Sequence[str], *, compiled: bool, channels_last: bool
) -> tuple[dict[str, Step], dict[str, Callable[[], Tensor]]]:
    """For each variant its training step, and its forward pass with the loss alone."""
    torch.manual_seed(0)
    config, size = MODELS[name]
    images, labels = torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,))
    schedule = ScheduleConfig()
    model = models.build(config, CLASSES)
    losses: dict[str, Callable[[], Tensor]] = {}
    steps: dict[str, Step] = {}

    def add(variant: str, trained: nn.Module, before: Step = lambda: None) -> None:
        if channels_last:
            trained = cast(Any, trained).to(memory_format=torch.channels_last)
        if compiled:
            trained.compile(dynamic=False)
        losses[variant] = _loss(trained, images, labels)
        steps[variant] = _step(trained, losses[variant], schedule, before)

    if PT2E in variants:
        add(PT2E, pt2e(model, images))
    for variant in [one for one in variants if one not in ("float", PT2E)]:
        module = QATModule(model, images, schedule, quantizers=LSQ if variant == "lsq" else Quantizers())
        module.calibrate([images])
        module.begin()
        module.train()
        add(variant, module.graph, partial(module.set_phase, 0.0 if variant == "observing" else 1.0))
    add("float", model.train())
    return steps, losses


def pt2e(model: nn.Module, images: Tensor) -> nn.Module:
    """The model as torchao trains it: exported to ATen operators, with its quantizers, in training mode."""
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    exported = torch.export.export(copy.deepcopy(model).train(), (images,), strict=True).module()
    prepared: nn.Module = prepare_qat_pt2e(exported, quantizer)
    return cast(nn.Module, move_exported_model_to_train(prepared))


def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(images), labels)


def _step(
    model: nn.Module, loss: Callable[[], Tensor], schedule: ScheduleConfig, before: Step = lambda: None
) -> Step:
    optimizer = make_optimizer(model, schedule, schedule.lr)

    def step() -> None:
        before()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that one forward pass saves for its backward pass, a storage that is saved twice counted once."""
    # The tensors are held until the end, so that no freed address is taken for another storage.
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def rounds(steps: Sequence[Step], count: int) -> NDArray[np.float64]:
    """Milliseconds [count, steps]: every step once a round, after `WARMUP` rounds."""
    # Of one thread the CPU's time, which what else the machine does leaves as it is.
    clock = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    times = np.zeros((WARMUP + count, len(steps)))
    for row in times:
        for column, step in enumerate(steps):
            start = clock()
            step()
            row[column] = (clock() - start) / 1e6
    return times[WARMUP:]


def measure(
    name: str, count: int, batch: int, variants: Sequence[str], *, compiled: bool, channels_last: bool
) -> list[str]:
    """Lines of the table for one model."""
    steps, losses = make_steps(name, batch, variants, compiled=compiled, channels_last=channels_last)
    times = rounds([steps[variant] for variant in variants], count)
    lines = []
    for column, variant in enumerate(variants):
        low, median, high = np.percentile(times[:, column], (10, 50, 90))
        low_ratio, ratio, high_ratio = np.percentile(times[:, column] / times[:, 0], (10, 50, 90))
        lines.append(
            f"{name:13} {variant:10} {median:8.1f} [{low:.1f}-{high:.1f}]".ljust(50)
            + f"{ratio:.2f} [{low_ratio:.2f}-{high_ratio:.2f}]".ljust(20)
            + ("" if compiled else f"{kept_bytes(losses[variant]) / 1e6:8.1f}")
        )
    return lines


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(description="Time of a QAT step against the float model's own step.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=30, help="timed rounds")
    parser.add_argument("--batch", type=int, default=64, help="images a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="all of them by torch.compile")
    parser.add_argument("--channels-last", action="store_true", help="weights with their channels innermost")
    parser.add_argument("--pt2e", action="store_true", help="torchao's as well, where it is installed")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS[1:]), choices=list(VARIANTS[1:]))
    args = parser.parse_args()
    variants = ["float", *args.variants, *([PT2E] if args.pt2e else [])]
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as in qatkit's own training; it speeds up the float step as well
    print(
        f"{'model':13} {'variant':10}   ms a step [p10-p90]".ljust(50)
        + "ratio [p10-p90]".ljust(20)
        + " kept MB"
    )
    for name in args.models:
        lines = measure(
            name, args.steps, args.batch, variants, compiled=args.compile, channels_last=args.channels_last
        )
        print("\n".join(lines), flush=True)
    hardware = report.this_hardware(args.threads)
    how = (", compiled" if args.compile else "") + (", channels innermost" if args.channels_last else "")
    print(
        f"\nbatch {args.batch}, {args.steps} interleaved rounds, {args.threads} threads{how}, {hardware.cpu}"
    )
    print(", ".join(f"{name} {version}" for name, version in report.installed_versions().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
