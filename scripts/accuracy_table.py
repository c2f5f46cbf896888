"""Writes docs/accuracy.md: what every recipe with recorded results gave (`uv run scripts/accuracy_table.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qatkit_verify.files import write_text

_ROOT = Path(__file__).parent.parent
RECIPES, PAGE = _ROOT / "recipes", _ROOT / "docs" / "accuracy.md"
_TITLES = {
    "top1": "top-1 %", "miou": "mIoU %", "map": "mAP %", "mae": "MAE", "perplexity": "perplexity",
    "spearman": "Spearman, x 100", "mean_f1": "mean F1 %",
}  # fmt: skip
_HEAD = """# Accuracy, speed and size

Written by `uv run scripts/accuracy_table.py` from recipes/results/*.json; do not edit.

- Each row is one command, the first line of recipes/NAME.yaml, whose header says which data it needs, and which
  settings were others where a run was.
- Accuracy is that of the ONNX files in ONNX Runtime on all test samples. "change" is INT8 minus float, with two
  standard errors over the same samples where they are known.
- "speed" is float's median latency over INT8's, batch 1, in interleaved rounds, with the 10th and 90th percentile over
  rounds. A machine that is shared makes it uncertain, and another CPU makes it another number.

"""
_COLUMNS = (
    "recipe", "model", "metric", "float", "INT8", "dynamic int8", "change", "speed", "size",
    "int8 share of the work", "test samples", "CPU, threads",
)  # fmt: skip


def page() -> str:
    """Returns the page."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECIPES.glob("results/*.json"))]
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *map(_row, found)]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(result: dict[str, Any]) -> list[str]:
    metric = next(key for key, value in result.items() if isinstance(value, dict) and "float" in value)
    scores, speed, hardware = result[metric], result["speedup"], result["hardware"]
    paired = result.get("paired")
    spread = f" ± {paired['interval']:.2f}" if paired else ""
    return [
        f"`{result['recipe']}`",
        result["model"],
        _TITLES.get(metric, metric.replace("_", " ")),
        f"{scores['float']:.2f}",
        f"{scores['int8']:.2f}",
        f"{scores['dynamic']:.2f}" if "dynamic" in scores else "-",
        f"{scores['int8'] - scores['float']:+.2f}{spread}",
        f"{speed['ratio']:.2f} ({speed['ratio_p10']:.2f} to {speed['ratio_p90']:.2f})",
        f"{result['size_ratio']:.3f}",
        f"{100 * result['int8_share_of_macs']:.1f} %",
        f"{result['images']:,}",
        f"{hardware['cpu']}{_isa(hardware)}, {hardware['threads']}",
    ]


def _isa(hardware: dict[str, Any]) -> str:
    """Returns the instructions that int8 kernels run by, in words."""
    known = {"avx512_vnni": "VNNI", "avx_vnni": "VNNI", "amx_int8": "AMX"}
    found = dict.fromkeys(known[one] for one in hardware.get("isa", ()) if one in known)
    return f" ({', '.join(found)})" if found else ""


if __name__ == "__main__":
    write_text(PAGE, page())
