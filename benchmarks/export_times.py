"""Measures the CPU seconds of capturing and exporting torchvision's classifiers, for one or two checkouts.

    uv run benchmarks/export_times.py [--models resnet18 swin_t] [--against DIR] [--record FILE]

Each model is built as in `coverage.py` (random weights, small inputs), captured and prepared for QAT, calibrated and
exported on one thread, in its own process. With `--against` it is then measured again with the qatkit of another
checkout. Models that are already in FILE are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torchvision

from qatkit_verify.files import write_text

HERE = Path(__file__).parent
_STEPS = ("capture", "export")


def measure(name: str) -> dict[str, float]:
    """Returns the CPU seconds of preparing a model for QAT and of exporting it."""
    import torch
    from coverage import build, inputs
    from latency import sane

    from qatkit.config.schema import ScheduleConfig
    from qatkit.export.torch_to_onnx import export_onnx
    from qatkit.train.module import QATModule

    torch.set_num_threads(1)
    model, shape = build(name, "classification")
    batches = [inputs(4, shape, seed) for seed in (0, 1)]
    model = sane(model, batches)
    with tempfile.TemporaryDirectory() as folder:
        # The first export of a process imports modules and fills tables, so another model is exported first.
        export_onnx(torch.nn.Linear(2, 2), torch.zeros(2, 2), Path(folder) / "first.onnx")
        start = time.process_time()
        module = QATModule(model, batches[0][:2], ScheduleConfig(batch_norm="freeze"))
        captured = time.process_time() - start
        module.calibrate(batches)
        converted = module.convert().graph
        start = time.process_time()
        export_onnx(converted, batches[0][:2], Path(folder) / "int8.onnx")
        return {"capture": captured, "export": time.process_time() - start}


def measured_apart(name: str, checkout: Path) -> dict[str, float]:
    """Runs `measure` with the qatkit of a checkout, in its own process."""
    paths = [str(checkout), str(checkout / "packages" / "verify"), str(HERE)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--measure", name]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    row: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Parses the arguments, measures, and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = torchvision.models.list_models(torchvision.models)
    parser.add_argument("--models", nargs="+", default=known, choices=known, metavar="NAME")
    parser.add_argument("--against", type=Path, help="folder of another checkout to measure too")
    parser.add_argument("--record", type=Path, help="JSON file for the results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure)))
        return
    rows = json.loads(asked.record.read_text()) if asked.record and asked.record.is_file() else {}
    checkouts = {"after": HERE.parent} | ({"before": asked.against} if asked.against else {})
    for name in asked.models:
        row = rows.setdefault(name, {})
        for run in [run for run in checkouts if run not in row]:
            row[run] = measured_apart(name, checkouts[run])
            print(name, run, row[run], file=sys.stderr, flush=True)
            if asked.record:
                write_text(asked.record, json.dumps(rows, indent=1) + "\n")
    print("\n".join(table({name: rows[name] for name in asked.models})))


def table(rows: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Returns the lines of the table: seconds of both steps, in the other checkout ("before") and in this one."""
    runs = [run for run in ("before", "after") if all(run in row for row in rows.values())]
    columns = [f"{step} {run}" for step in _STEPS for run in runs]
    lines = ["| model | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, row in rows.items():
        cells = [f"{row[run][step]:.1f}" for step in _STEPS for run in runs]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    sums = [f"{sum(row[run][step] for row in rows.values()):.0f}" for step in _STEPS for run in runs]
    return [*lines, f"| sum of {len(rows)} | " + " | ".join(sums) + " |"]


if __name__ == "__main__":
    main()
