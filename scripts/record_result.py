"""Records the results of a recipe: `uv run scripts/record_result.py OUTPUT_FOLDER` writes recipes/results/NAME.json.

A run of the recipe in another mode (export.mode=float16, backend=weight_only) goes to results/modes/NAME.MODE.json,
with the settings that chose the mode and those given after the folder. The file is a short form of the folder's
report.json: the figures that readers compare, and what they were measured on, without paths of the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from qatkit_verify.classification import names_of
from qatkit_verify.files import write_text

# Comparisons with the converted module; in other modes, of the optimized file with the unoptimized one and with float.
_COMPARED = ("unoptimized", "optimized", "against_float")
_MEASURED = ("paired", "decoder", "stream")  # figures in addition to accuracy, if they were measured
RECIPES = Path(__file__).parent.parent / "recipes"
RESULTS = RECIPES / "results"
_PACKED, _BITS = "qatkit.quant.backends.WEIGHT_ONLY", "int4"  # the backend, and its default weights


def short(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a report.json that are recorded."""
    parity, audit, config = report["parity"], report["audit"], report["config"]
    metric, *further = (one.key for one in names_of(report).metrics)
    decided = "top1" if metric == "top1" else "decision"
    compared = [key for key in _COMPARED if parity.get(key) is not None]
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
            f"{decided}_agreement": {key: parity[key]["agreement"] for key in compared},
            "mean_steps": {key: parity[key]["mean_steps"] for key in compared},
        },
        "int8_share_of_macs": round(audit["int8_share"], 4),
        **measured,
        "shortfalls": report["shortfalls"],
        "seconds": report["timings"],
        "hardware": report["hardware"],
        "versions": report["versions"],
    }


def _without_path(model: str) -> str:
    """Returns a model's name KIND/MODEL, in which a path is shortened to the name of its folder."""
    kind, _, place = model.partition("/")
    return f"{kind}/{Path(place).name}" if place.startswith(("/", ".", "~")) else model


def place(report: dict[str, Any]) -> tuple[Path, list[str]]:
    """Returns the file for a run's record, and the settings that chose another mode than the recipe's."""
    name, config = report["name"], report["config"]
    mode = config["export"]["mode"]
    if mode != "static":
        return RESULTS / "modes" / f"{name}.{mode}.json", [f"export.mode={mode}"]
    own = "override /backend: weight_only" in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    if config["backend"]["target"] != _PACKED or own:
        return RESULTS / f"{name}.json", []
    bits, algorithms = config["backend"]["weight_dtype"], list(config["algorithm"])
    chosen = algorithms[0] if len(algorithms) == 1 else f"[{','.join(algorithms)}]" if algorithms else "none"
    settings = ["backend=weight_only", f"algorithm={chosen}"]
    settings += [f"backend.weight_dtype={bits}"] if bits else []
    return RESULTS / "modes" / f"{name}.{bits or _BITS}.json", settings


def main() -> None:
    """Writes the results of the run in the given folder, and prints the path of the file."""
    parser = argparse.ArgumentParser(description="Record the results of a recipe.")
    parser.add_argument("folder", type=Path, help="output folder of a finished run")
    parser.add_argument("settings", nargs="*", help="further settings of the run, such as a bound of verify")
    asked = parser.parse_args()
    report = json.loads((asked.folder / "report.json").read_text(encoding="utf-8"))
    path, settings = place(report)
    settings += asked.settings
    found = short(report)
    if settings:
        found = {"recipe": found.pop("recipe"), "settings": settings} | found
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
