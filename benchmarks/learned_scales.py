"""Compares learned scales at low bit widths: fine-tunes the same float model with each quantizer, seed by seed.

    uv run benchmarks/learned_scales.py recipe=resnet18_cifar10_w4a8_qat data.root=DIR model.checkpoint=FILE
        [--kinds fake_quantize lsq lsq,schedule.scale_lr=0.003] [--seeds 3] [--steps 60] [--batch 64]
        [--images 2000 | --held-out 2000] [--file]

A kind is an option of the group quantizer, with further settings after commas; the other arguments are those of
train.py. `fake_quantize,quantizer.weight=learned_scales.MinMaxWeightFakeQuantize` is plain QAT like torch.ao's
default. All runs take the same number of steps on the same batches, in an order that depends on the seed. Accuracy is
measured on test images (`--images`) or, to choose settings, on held-out training images (`--held-out`): in simulation,
or with `--file` for the exported file in ONNX Runtime. It prints each run, then the mean and standard deviation over
the seeds for each kind.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from qatkit import models
from qatkit.choose.ranges import calibrate_module
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.learning import oscillating
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit.report.oscillation_text import figures, line
from qatkit.run.allocator import keep_freed_memory
from qatkit.run.build import data_of, example_batch, qat_module
from qatkit.train.learner import make_optimizer, rate_factor
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import accuracy, module_accuracy
from qatkit_verify.session import open_session

CONF = Path(__file__).resolve().parent.parent / "conf"
Images = list[tuple[Tensor, Tensor]]


class MinMaxWeightFakeQuantize(WeightFakeQuantize):
    """A weight quantizer with min-max ranges, like PerChannelMinMaxObserver: it clips nothing."""

    def clip_to_least_error(self, weight: Tensor) -> None:
        return None


def trained(config: Config, data: DataModule, seed: int, batches: Images) -> QATModule:
    """Returns a module trained for one step on each of `batches`, in an order drawn from `seed`."""
    model = models.build(config.model, data.num_classes).eval()
    module = qat_module(config, model, data.inputs, QATModule)
    calibrate_module(module, data, config, example_batch(config, data.inputs))
    module.begin()
    module.train()
    schedule = config.schedule
    optimizer = make_optimizer(module.graph, schedule, schedule.lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.manual_seed(seed)
    for step, index in enumerate(torch.randperm(len(batches)).tolist()):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rate_factor(step, len(batches), schedule)
        progress = step / len(batches)
        module.set_phase(progress)
        module.follow_oscillation(progress)
        optimizer.zero_grad()
        loss = module.loss(*batches[index])
        if schedule.oscillation == "dampen":
            loss = loss + module.dampening(progress)
        loss.backward()
        optimizer.step()
    module.eval()
    module.ready_to_convert()
    return module


def top1(module: QATModule, config: Config, data: DataModule, test: Images, in_file: bool) -> float:
    """Returns top-1 in percent, in simulation or, with `in_file`, of the exported file in ONNX Runtime."""
    if not in_file:
        return module_accuracy(module.graph, test).score
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(module.convert().graph, example_batch(config, data.inputs), path)
        return accuracy(open_session(path, threads=torch.get_num_threads()), test).score


def measure(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Prints one line per run, then one per kind."""
    more = ["trainer=cpu", "trainer.progress=false", f"data.batch_size={args.batch}", "verify.control=false"]
    more += [f"data.train_images={args.steps * args.batch + args.held_out}", "schedule.max_steps=null"]
    if args.held_out:
        more += ["verify.every=1", f"verify.held_out={args.held_out}"]
    first = compose_config(CONF, [*overrides, *more])
    data = data_of(first)
    judges = data.image_batches(data.held_out, 100) if args.held_out else data.test_subset(args.images, 100)
    batches, test = list(data.train_dataloader()), list(judges)
    model = models.build(first.model, data.num_classes).eval()
    count = args.held_out or args.images
    print(f"{first.name}: float {module_accuracy(model, test).score:.2f} of {count} images, "
          f"{len(batches)} steps of {args.batch}", flush=True)  # fmt: skip
    found: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    for seed in range(args.seeds):
        for kind in args.kinds:
            chosen = compose_config(CONF, [*overrides, *more, *_settings(kind)])
            module = trained(replace(chosen, seed=seed), data, seed, batches)
            found[kind].append(top1(module, chosen, data, test, args.file))
            jumps = oscillating(module.graph)
            told = (
                f"; {line(figures([asdict(one) for one in jumps]), chosen.schedule.oscillation)}"
                if jumps
                else ""
            )
            print(f"  {kind:40} seed {seed}  {found[kind][-1]:.2f}{told}", flush=True)
    for kind, values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{kind:42} {statistics.mean(values):.2f} ± {spread:.2f}")


def _settings(kind: str) -> list[str]:
    option, *settings = kind.split(",")
    return [f"quantizer={option}", *settings]


def main() -> int:
    """Measures all kinds with one recipe."""
    parser = argparse.ArgumentParser(
        description="Measures the accuracy after fine-tuning with each kind of quantizer."
    )
    parser.add_argument("--kinds", nargs="+", default=["fake_quantize", "lsq"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        help="number of held-out training images to measure on, instead of test images",
    )
    parser.add_argument("--file", action="store_true", help="measure the exported file in ONNX Runtime")
    parser.add_argument("--threads", type=int, default=1)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    measure(args, overrides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
