"""Measures the cost of a training step with fake quantization, relative to a step of the float model.

    uv run benchmarks/qat_step.py [--models resnet18 vit] [--steps 30] [--batch 64] [--threads 2] [--compile] [--pt2e]
                                 [--channels-last] [--device cuda] [--bf16]

A step is the forward pass, the loss, the backward pass and SGD. The models take turns, step by step, in one process:

    float       the torchvision model in train mode with BatchNorm, as in ordinary fine-tuning
    observing   qatkit's prepared model, BatchNorm folded, ranges still being observed (the first half of
                fine-tuning by default)
    frozen      the same with fixed ranges (the second half)
    lsq         scales of weights and activations are learned (quantizer=lsq), and aligned before each step
    pt2e        with --pt2e: torchao's prepare_qat_pt2e with its X86InductorQuantizer, ranges still being observed

With --compile all variants are compiled by torch.compile, as with trainer.compile=true, and ratios are relative to the
compiled float model. With --channels-last all weights are in the channels_last memory format, as with
trainer.channels_last. With --device cuda the models train on the GPU, and a step ends when the GPU has finished; --bf16
uses autocast to bfloat16, as in trainer=gpu_bf16. Ratios are taken within each round, then summarized. "kept" is the
memory of all tensors that the forward pass saves for the backward pass, each storage counted once; it limits the batch
size. It is not measured with --compile.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from qatkit.run.allocator import keep_freed_memory
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule

VIT = "torchvision.models.vision_transformer.VisionTransformer"
VIT_SIZES = {"image_size": 32, "patch_size": 4, "num_layers": 6, "num_heads": 3, "hidden_dim": 192,
             "mlp_dim": 768}  # fmt: skip
# The model and the side of its square input in pixels, by name.
MODELS = {
    "resnet18": (ModelConfig(name="resnet18"), 64),
    "mobilenet_v2": (ModelConfig(name="mobilenet_v2"), 64),
    "vit": (ModelConfig(name=VIT, kwargs=VIT_SIZES), 32),
    "resnet50": (ModelConfig(name="resnet50"), 224),
    "vit_b_16": (ModelConfig(name="vit_b_16"), 224),
}
SMALL = ("resnet18", "mobilenet_v2", "vit")
CLASSES, WARMUP = 10, 3
VARIANTS = ("float", "observing", "frozen", "lsq")
PT2E = "pt2e"
LSQ = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)

Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """The settings with which all variants are trained.

    Attributes:
        batch: images per step.
        compiled: whether torch.compile compiles the models.
        channels_last: whether the weights are in the channels_last memory format.
        device: "cpu" or "cuda".
        bf16: whether the forward pass runs under autocast to bfloat16.
    """

    batch: int
    compiled: bool
    channels_last: bool
    device: str
    bf16: bool


def make_steps(
    name: str, variants: Sequence[str], setting: Setting
) -> tuple[dict[str, Step], dict[str, Callable[[], Tensor]]]:
    """Returns, by variant, the training steps and the forward passes with the loss."""
    torch.manual_seed(0)
    config, size = MODELS[name]
    images = torch.randn(setting.batch, 3, size, size)
    inputs, labels = images.to(setting.device), torch.randint(CLASSES, (setting.batch,)).to(setting.device)
    schedule = ScheduleConfig()
    model = models.build(config, CLASSES)
    losses: dict[str, Callable[[], Tensor]] = {}
    steps: dict[str, Step] = {}

    def add(variant: str, trained: nn.Module, before: Step = lambda: None) -> None:
        trained = trained.to(setting.device)
        if setting.channels_last:
            trained = cast(Any, trained).to(memory_format=torch.channels_last)
        if setting.compiled:
            trained.compile(dynamic=False)
        losses[variant] = _loss(trained, inputs, labels, bf16=setting.bf16)
        steps[variant] = _step(trained, losses[variant], schedule, before)

    if PT2E in variants:
        add(PT2E, pt2e(model, images))
    for variant in [one for one in variants if one not in ("float", PT2E)]:
        module = QATModule(model, images, schedule, quantizers=LSQ if variant == "lsq" else Quantizers())
        module.calibrate([images])
        module.to(setting.device)
        module.begin()
        module.train()
        add(variant, module.graph, partial(module.set_phase, 0.0 if variant == "observing" else 1.0))
    add("float", model.train())
    return steps, losses


def pt2e(model: nn.Module, images: Tensor) -> nn.Module:
    """Returns the model as torchao trains it: exported to ATen operators, prepared for QAT, in training mode."""
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    exported = torch.export.export(copy.deepcopy(model).train(), (images,), strict=True).module()
    prepared: nn.Module = prepare_qat_pt2e(exported, quantizer)
    return cast(nn.Module, move_exported_model_to_train(prepared))


def _loss(model: nn.Module, images: Tensor, labels: Tensor, *, bf16: bool) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            logits = model(images)
        return F.cross_entropy(logits.float(), labels)

    return loss


def _step(
    model: nn.Module, loss: Callable[[], Tensor], schedule: ScheduleConfig, before: Step = lambda: None
) -> Step:
    optimizer = make_optimizer(model, schedule, schedule.lr)

    def step() -> None:
        before()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Returns the bytes that one forward pass saves for its backward pass; every storage counts once."""
    # The tensors are kept alive until the end, so that no address is freed and used again for another storage.
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def rounds(steps: Sequence[Step], count: int) -> NDArray[np.float64]:
    """Returns milliseconds [count, steps]; each round runs every step once, after `WARMUP` untimed rounds."""
    # With one thread, CPU time is measured, because other work on the machine does not affect it.
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time_ns if alone else time.perf_counter_ns
    times = np.zeros((WARMUP + count, len(steps)))
    for row in times:
        for column, step in enumerate(steps):
            start = clock()
            step()
            row[column] = (clock() - start) / 1e6
    return times[WARMUP:]


def measure(name: str, count: int, variants: Sequence[str], setting: Setting) -> list[str]:
    """Returns the lines of the table for one model."""
    steps, losses = make_steps(name, variants, setting)
    times = rounds([steps[variant] for variant in variants], count)
    lines = []
    for column, variant in enumerate(variants):
        low, median, high = np.percentile(times[:, column], (10, 50, 90))
        low_ratio, ratio, high_ratio = np.percentile(times[:, column] / times[:, 0], (10, 50, 90))
        lines.append(
            f"{name:13} {variant:10} {median:8.1f} [{low:.1f}-{high:.1f}]".ljust(50)
            + f"{ratio:.2f} [{low_ratio:.2f}-{high_ratio:.2f}]".ljust(20)
            + ("" if setting.compiled else f"{kept_bytes(losses[variant]) / 1e6:8.1f}")
        )
    return lines


def main() -> int:
    """Times all models and prints the table."""
    parser = argparse.ArgumentParser(
        description="Measures the time of a QAT step relative to a step of the float model."
    )
    parser.add_argument("--models", nargs="+", default=list(SMALL), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=30, help="timed rounds")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="compile all variants with torch.compile")
    parser.add_argument("--channels-last", action="store_true", help="use the channels_last memory format")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--bf16", action="store_true", help="use autocast to bfloat16")
    parser.add_argument(
        "--pt2e", action="store_true", help="also measure torchao's PT2E flow (needs torchao)"
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS[1:]), choices=list(VARIANTS[1:]))
    args = parser.parse_args()
    variants = ["float", *args.variants, *([PT2E] if args.pt2e else [])]
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as in a run of qatkit; it speeds up the float step as well
    print(
        f"{'model':13} {'variant':10}   ms per step [p10-p90]".ljust(50)
        + "ratio [p10-p90]".ljust(20)
        + " kept MB"
    )
    setting = Setting(args.batch, args.compile, args.channels_last, args.device, args.bf16)
    for name in args.models:
        lines = measure(name, args.steps, variants, setting)
        print("\n".join(lines), flush=True)
    processor = report.this_hardware(args.threads).cpu
    if args.device == "cuda":
        processor = torch.cuda.get_device_name()
    how = (", compiled" if args.compile else "") + (", channels_last" if args.channels_last else "")
    how += ", bfloat16" if args.bf16 else ""
    print(f"\nbatch {args.batch}, {args.steps} interleaved rounds, {args.threads} threads{how}, {processor}")
    print(", ".join(f"{name} {version}" for name, version in report.installed_versions().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
