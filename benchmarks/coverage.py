"""Takes every torchvision model through the whole chain and writes docs/coverage.md.

    uv run benchmarks/coverage.py [--models resnet18 swin_t] [--task classification segmentation video]
    uv run --group benchmark benchmarks/coverage.py --all [--models odd "timm/*vit*" hf/bert] [--jobs 2]

Each model is built with random weights (scaled as in `latency.py`), prepared, calibrated, checked for
gradients in one training step, converted, exported as opset-13 QDQ and run in ONNX Runtime, with
optimizations off and on, on 256 inputs (8 for segmentation and video). The last Linear of a classifier is
replaced by one that distinguishes these inputs, since the two largest of 1,000 random logits are so close
that their order says nothing about a file. Inputs are small where the architecture allows it, since the
checks do not depend on the size. Two models with more than 600 M parameters have fewer blocks. Speeds come
from `placement.py --record` on an idle machine. The result of each model is stored in docs/coverage.json at
once, so a stopped run continues with the missing models (`--again` measures all of them).

`--all` uses another list: about 600 models of timm, Hugging Face, segmentation_models_pytorch and our own (`zoo/`).
Each is measured in its own process. The results are written to docs/models.md and docs/models/.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import torch
import torchvision
from latency import sane
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit import models
from qatkit.config.schema import ModelConfig, ScheduleConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.quant.backends import FBGEMM
from qatkit.records.results import Audit, Parity
from qatkit.train.module import QATModule
from qatkit.verify.audit import audit
from qatkit.verify.parity import parity
from qatkit_verify.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
RECORD, PAGE = DOCS / "coverage.json", DOCS / "coverage.md"
MODELS_RECORD = DOCS / "models.json"  # the results of --all
TASKS = ("classification", "segmentation", "video")
PARITY_IMAGES, FEW_IMAGES, BATCH = 256, 8, 8
# The float file is written, for the size ratio, only below this number of parameters: protobuf is limited to 2 GB.
FLOAT_LIMIT = 450_000_000
SIZES = {"inception_v3": 299, "vit_h_14": 56, "s3d": 224, "mvit": 224}
FRAMES = {"s3d": 16, "mvit": 16}
_SPEED = ("float / INT8", "float / placed", "static / placed", "noise")
KERNELS = {"vnni": "VNNI", "avx2": "only AVX2"}  # kernels of ONNX Runtime
SHALLOW = {"vit_h_14": "4 of 32 encoder layers", "regnet_y_128gf": "at most 2 blocks a stage"}


def build(name: str, task: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Returns a model and the shape of one input, [C, H, W] or [C, T, H, W]."""
    torch.manual_seed(0)
    size = next((value for key, value in SIZES.items() if name.startswith(key)), 64)
    if task != "classification":
        options: dict[str, Any] = {"weights_backbone": None} if task == "segmentation" else {}
        model = torchvision.models.get_model(name, weights=None, **options)
        frames = next((value for key, value in FRAMES.items() if name.startswith(key)), 8)
        return model, (3, size, size) if task == "segmentation" else (3, frames, size, size)
    options = {"image_size": size} if name.startswith("vit_") else {}
    if name == "maxvit_t":
        size, options = 224, {"input_size": (224, 224)}
    if name in ("googlenet", "inception_v3"):
        options = {"init_weights": False}
    model = models.build(ModelConfig(name=name, kwargs=options))
    if name == "vit_h_14":
        encoder = model.get_submodule("encoder")
        layers = cast(nn.Sequential, encoder.get_submodule("layers"))
        encoder.set_submodule("layers", layers[:4])
    if name == "regnet_y_128gf":
        for stage in model.get_submodule("trunk_output").children():
            for block in list(dict(stage.named_children()))[2:]:
                delattr(stage, block)
    return model, (3, size, size)


def inputs(count: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns noise at several spatial scales, so that different inputs give different classes."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, shape[0], *(4 for _ in shape[1:]), generator=generator)
    level = torch.randn(count, shape[0], *(1 for _ in shape[1:]), generator=generator)
    fine = torch.randn(count, *shape, generator=generator)
    return F.interpolate(coarse, shape[1:]) + level + 0.5 * fine


def tell_apart(model: nn.Module, batches: list[Tensor]) -> bool:
    """Sets the rows of the last Linear so that image i of `batches` gets class i.

    The remaining rows have random directions; all rows have length 1. Returns False, and changes nothing, if the
    model does not end with a Linear.
    """
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_hook(lambda m, x, y: calls.append((m, x[0], y))) for m in linears]
    features = []
    with torch.no_grad():
        for batch in batches:
            calls.clear()
            output = model(batch)
            if not calls or calls[-1][2] is not output:
                break
            features.append(calls[-1][1])
    for handle in handles:
        handle.remove()
    if len(features) < len(batches):
        return False
    found, (head, _, _) = torch.cat(features), calls[-1]
    assert isinstance(head, nn.Linear)
    rows = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
    rows[: len(found)] = (found - found.mean(0))[: head.out_features]
    rows /= rows.norm(dim=1, keepdim=True)
    head.weight, head.bias = nn.Parameter(rows), nn.Parameter(-rows @ found.mean(0))
    return True


def gradients(module: QATModule, images: Tensor) -> list[str]:
    """Returns the parameters without a finite, non-zero gradient in one step with fake quantization.

    Stochastic depth is off: in a small batch it may drop a block for every image.
    """
    module.train()
    for part in module.modules():
        if isinstance(part, torchvision.ops.StochasticDepth):
            part.p = 0.0
    outputs = module(images)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((part.float() ** 2).mean() * (i + 1) for i, part in enumerate(parts)).backward()
    found = [
        name
        for name, p in module.graph.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all() or not p.grad.any())
    ]
    module.zero_grad(set_to_none=True)
    module.eval()
    return found


def unused(model: nn.Module, images: Tensor) -> set[str]:
    """Returns the parameters on which the float model's loss does not depend.

    For example, the head of MViT reads only the class token, which does not depend on the positions of the
    patches in the last block.
    """
    (model(images) ** 2).mean().backward()
    found = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    model.zero_grad(set_to_none=True)
    return found


def measure(name: str, task: str) -> dict[str, Any]:
    """Takes one model through the chain and returns its row."""
    model, shape = build(name, task)
    count = sum(p.numel() for p in model.parameters())
    batch = BATCH if task != "video" else 4
    model = sane(model, [inputs(batch, shape, seed) for seed in (0, 1)])
    images = PARITY_IMAGES if task == "classification" else FEW_IMAGES
    seen = [inputs(batch, shape, 100 + i) for i in range(images // batch)]
    told_apart = task == "classification" and tell_apart(model, seen)
    module = QATModule(model, inputs(2, shape, 0), ScheduleConfig(batch_norm="freeze"))
    module.calibrate([inputs(batch, shape, seed) for seed in (0, 1)])
    without = gradients(module, inputs(2, shape, 2))
    without = sorted(set(without) - (unused(model, inputs(2, shape, 2)) if without else set()))
    converted = module.convert()
    with tempfile.TemporaryDirectory() as folder:
        path, float_path = Path(folder) / "int8.onnx", Path(folder) / "float.onnx"
        start = time.monotonic()
        export_onnx(converted.graph, inputs(2, shape, 0), path)
        seconds = time.monotonic() - start
        ratio = None
        if count < FLOAT_LIMIT:
            export_onnx(float_baseline(model, inputs(2, shape, 0)), inputs(2, shape, 0), float_path)
            ratio = path.stat().st_size / float_path.stat().st_size
        agreed = parity(converted.graph, path, iter(seen), threads=1)
        audited = audit(path, options=FBGEMM.session_options, allow_float=[s for s, _ in module.skipped])
    return {
        "task": task,
        "input": "x".join(map(str, shape)) + (f", {SHALLOW[name]}" if name in SHALLOW else ""),
        "parameters": count,
        "nodes": len(audited.nodes),
        "int8_share": audited.int8_share,
        "parity": _parity(agreed),
        "told_apart": told_apart,
        "size_ratio": ratio,
        "export_seconds": seconds,
        "no_gradient": without,
        "problems": list(audited.problems),
        "islands": islands(audited),
    }


def _parity(parity: Parity) -> dict[str, Any]:
    both = [one for one in (parity.unoptimized, parity.optimized) if one is not None]
    return {
        "images": parity.images,
        "agreement": [one.agreement for one in both],
        "mean_steps": [one.mean_steps for one in both],
    }


def islands(audit: Audit) -> dict[str, int]:
    """Returns the number of float nodes by operator and reason, without nodes that ONNX Runtime inserted."""
    found = [n for n in audit.nodes if n.precision == "float" and n.reason and "inserted by" not in n.reason]
    return dict(Counter(f"{n.op}: {n.reason.split(' (it ')[0]}" for n in found).most_common())


def page(rows: dict[str, Any]) -> str:
    """Returns the text of docs/coverage.md."""
    lines = [
        "# Coverage",
        "",
        "Written by `uv run benchmarks/coverage.py`; do not edit. Random weights, fbgemm, opset 13, "
        f"{PARITY_IMAGES} inputs ({FEW_IMAGES} for segmentation and video). Parity is the top-1 agreement of the "
        "converted module with ONNX Runtime, optimizations off / on; mean steps is the mean difference of their "
        "outputs in quantization steps. The last Linear of a classifier distinguishes the inputs (*: it has random "
        "weights).",
        "",
        *_speeds(rows),
    ]
    for task in TASKS:
        chosen = {name: row for name, row in rows.items() if row["task"] == task}
        if chosen:
            passed = sum("error" not in row for row in chosen.values())
            lines += [f"## {task.capitalize()}: {passed} of {len(chosen)}", "", *_table(chosen), ""]
            lines += _reasons(chosen)
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: dict[str, Any]) -> list[str]:
    head = ("model", "input", "M params", "nodes", "int8 MACs", "parity off / on %", "mean steps off / on",
            "size", "export s", "no gradient")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in sorted(rows):
        row = rows[name]
        if "error" in row:
            lines.append(
                f"| {name} | " + " | ".join(["failed: " + row["error"], *[""] * (len(head) - 2)]) + " |"
            )
            continue
        parity, ratio = row["parity"], row["size_ratio"]
        cells = (name, row["input"], f"{row['parameters'] / 1e6:.1f}", str(row["nodes"]),
                 f"{100 * row['int8_share']:.1f} %",
                 " / ".join(f"{100 * a:.1f}" for a in parity["agreement"])
                 + ("" if row.get("told_apart") else " *"),
                 " / ".join(f"{s:.3f}" for s in parity["mean_steps"]),
                 "-" if ratio is None else f"{ratio:.3f}", f"{row['export_seconds']:.0f}",
                 ", ".join(row["no_gradient"]) or "none")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _speeds(rows: dict[str, Any]) -> list[str]:
    """Returns the lines of the section about speed, from `placement.py --record`; [] if it timed no model."""
    timed = {name: row["speed"] for name, row in sorted(rows.items()) if "speed" in row}
    if not timed:
        return []
    machines = [
        f"{title}: {', '.join(sorted({one[key]['machine'] for one in timed.values() if key in one}))}"
        for key, title in KERNELS.items()
        if any(key in one for one in timed.values())
    ]
    head = ["model", *(f"{title}: {column}" for title in KERNELS.values() for column in _SPEED)]
    return [
        f"## Speed: {len(timed)} models",
        "",
        "Ratios of times: the float file over the INT8 file placed by the backend's table, the float file over the "
        "INT8 file with `placement=measured` (placed), and the faster of quantize_static's two files over the placed "
        "file. Measured at 224x224 (inception_v3: 299x299), batch 1, 2 threads, on an idle machine; the time of a file "
        "is its least time of three interleaved sessions. Noise is the median difference of such a ratio between "
        f"sessions. {'; '.join(machines)}.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *(
            f"| {name} | " + " | ".join(cell for key in KERNELS for cell in _speed(found.get(key))) + " |"
            for name, found in timed.items()
        ),
        "",
    ]


def _speed(found: dict[str, Any] | None) -> tuple[str, ...]:
    """Returns the cells of the `_SPEED` columns for one model and one kind of kernels."""
    if found is None:
        return ("-",) * len(_SPEED)
    ratios = (found[key] for key in ("float_over_table", "float_over_placed", "static_over_placed"))
    return (*(f"{one:.2f}" for one in ratios), f"{100 * found['noise']:.1f} %")


def _reasons(rows: dict[str, Any]) -> list[str]:
    """Returns a table that counts the float operators of a task's models by reason; [] if there are none."""
    total: Counter[str] = Counter()
    where: dict[str, list[str]] = {}
    for name, row in rows.items():
        for reason, count in row.get("islands", {}).items():
            total[reason] += count
            where.setdefault(reason, []).append(name)
    lines = ["| float operator | reason | nodes | models |", "|---|---|---|---|"]
    for reason, count in total.most_common():
        op, _, why = reason.partition(": ")
        names = where[reason]
        shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"| {op} | {why} | {count} | {shown} |")
    return [*lines, ""] if total else []


def the_list(args: argparse.Namespace) -> int:
    """Measures the models of `zoo/`; returns 1 if one fails unexpectedly, is killed or computes wrong values."""
    from zoo.page import pages as model_pages
    from zoo.run import chosen, run

    record = args.record or MODELS_RECORD
    wanted = chosen(args.models or ())
    rows = run(wanted, record, jobs=args.jobs, limit=args.limit, again=args.again)
    if record == MODELS_RECORD:
        (DOCS / "models").mkdir(exist_ok=True)
        for name, text in model_pages(rows).items():
            write_text(DOCS / name, text)
        print(DOCS / "models.md")
    return int(any(rows[entry.name]["status"] not in ("through", "refused") for entry in wanted))


def main() -> int:
    """Measures the requested models, writes the page, and returns 1 if a model failed."""
    parser = argparse.ArgumentParser(
        description="Takes torchvision's models through the whole chain and writes docs/coverage.md."
    )
    parser.add_argument("--models", nargs="+", help="names (default: all models of the tasks)")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["classification"])
    parser.add_argument("--again", action="store_true", help="measure recorded models again")
    parser.add_argument("--record", type=Path, help="where to store the figures (default: docs/)")
    parser.add_argument(
        "--all", action="store_true", help="use the list of zoo/ instead; --models may contain patterns"
    )
    parser.add_argument("--jobs", type=int, default=1, help="with --all: number of models at a time")
    parser.add_argument(
        "--limit", type=float, default=300, help="with --all: time limit of one model, in seconds"
    )
    args = parser.parse_args()
    if args.all:
        return the_list(args)
    record = args.record or RECORD
    packages = {"classification": torchvision.models, "segmentation": torchvision.models.segmentation,
                "video": torchvision.models.video}  # fmt: skip
    wanted = {n: t for t in args.task for n in torchvision.models.list_models(module=packages[t])
              if not args.models or n in args.models}  # fmt: skip
    rows = json.loads(record.read_text()) if record.is_file() else {}
    for i, (name, task) in enumerate(wanted.items()):
        known = rows.get(name, {})
        if not args.again and "task" in known and "error" not in known:
            continue
        start = time.monotonic()
        print(f"[{i + 1}/{len(wanted)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        rows[name] = rows.get(name, {})
        try:
            rows[name] |= measure(name, task)
            rows[name].pop("error", None)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            rows[name] |= {"task": task, "error": f"{type(error).__name__}: {first}"[:200]}
        said = rows[name].get("error") or "passed"
        print(f"{said}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        write_text(record, json.dumps(rows, indent=1, sort_keys=True) + "\n")
        gc.collect()
    if record == RECORD:
        write_text(PAGE, page(rows))
        print(PAGE)
    return int(any("error" in rows[name] for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
