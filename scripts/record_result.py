"""Keeps what a recipe gave: `uv run scripts/record_result.py OUTPUT_FOLDER` writes recipes/results/NAME.json.

The short form of the folder's report.json: what a reader compares, and on what it was measured. Paths of the
machine stay out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qatkit_verify.classification import names_of
from qatkit_verify.files import write_text

_MEASURED = ("paired", "decoder", "stream")  # beside accuracy, of whatever measured them
RESULTS = Path(__file__).parent.parent / "recipes" / "results"


def short(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of a report.json."""
    parity, audit, config = report["parity"], report["audit"], report["config"]
    metric, *further = (one.key for one in names_of(report).metrics)
    decided = "top1" if metric == "top1" else "decision"
    measured = {key: report["measured"][key] for key in _MEASURED if key in report["measured"]}
    return {
        "recipe": report["name"],
        "model": _without_path(report["model"]),
        metric: {name: round(found[metric], 2) for name, found in report["accuracy"].items()},
        **{
            one: {name: round(found[one], 2) for name, found in report["accuracy"].items()} for one in further
        },
        "images": report["accuracy"]["int8"]["images"],
        "fine_tuning": {
            key: config["schedule"][key] for key in ("epochs", "max_steps", "optimizer", "lr", "float_epochs")
        }
        | {"batch_size": config["data"]["batch_size"], "train_images": config["data"]["train_images"]},
        "curves": {
            one["stage"]: [[round(row["epoch"], 2), round(row[metric], 2)] for row in one["epochs"]]
            for one in report.get("curves", ())
        },
        "latency_ms": {name: round(found["median_ms"], 3) for name, found in report["latency"].items()},
        "speedup": {
            key: round(report["latency"]["int8"][key], 2) for key in ("ratio", "ratio_p10", "ratio_p90")
        },
        "bytes": report["sizes"],
        "size_ratio": round(report["size_ratio"], 3),
        "parity": {
            "images": parity["images"],
            f"{decided}_agreement": {key: parity[key]["agreement"] for key in ("unoptimized", "optimized")},
            "mean_steps": {key: parity[key]["mean_steps"] for key in ("unoptimized", "optimized")},
        },
        "int8_share_of_macs": round(audit["int8_share"], 4),
        **measured,
        "shortfalls": report["shortfalls"],
        "seconds": report["timings"],
        "hardware": report["hardware"],
        "versions": report["versions"],
    }


def _without_path(model: str) -> str:
    """A model's name; of a folder of Hugging Face's what it is called."""
    kind, _, place = model.partition("/")
    return f"{kind}/{Path(place).name}" if place.startswith(("/", ".", "~")) else model


def main() -> None:
    """Writes one file."""
    parser = argparse.ArgumentParser(description="Keep what a recipe gave.")
    parser.add_argument("folder", type=Path, help="output folder of a finished run")
    report = json.loads((parser.parse_args().folder / "report.json").read_text(encoding="utf-8"))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{report['name']}.json"
    write_text(path, json.dumps(short(report), indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
