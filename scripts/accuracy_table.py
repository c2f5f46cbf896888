"""Writes docs/accuracy.md: the recorded results of every recipe, and a table of models by mode.

Run it with `uv run scripts/accuracy_table.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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

This page is written by `uv run scripts/accuracy_table.py` from recipes/results/; do not edit it.

## Recipes

- Each row is the result of one command, which is the first line of the header of recipes/NAME.yaml. The header also
  says which data the command needs, and whether the recorded run used other settings.
- Accuracy is measured on the ONNX files in ONNX Runtime, on all test samples. "change" is INT8 minus float. If they
  are known, two standard errors of the paired difference follow.
- "speed" is the median latency of the float file divided by that of the INT8 file, at batch size 1, in interleaved
  rounds. The 10th and 90th percentiles over the rounds are in brackets. The figure is uncertain on a shared machine,
  and different on another CPU.
- "size" is the size of the INT8 file divided by that of the float file.

"""
_COLUMNS = (
    "recipe", "model", "metric", "float", "INT8", "dynamic int8", "change", "speed", "size",
    "int8 share of MACs", "test samples", "CPU, threads",
)  # fmt: skip

_MODES_HEAD = """
## Models in each mode

- A cell contains the accuracy, in brackets the change from float in the same run, and then "speed" and "size" as
  above. `-` means that it was not measured.
- PTQ and QAT are the INT8 files of the recipes above. The other columns are the PTQ recipe in other modes:
  "dynamic int8" is `export.mode=dynamic`, "float16" is `export.mode=float16`, and "weight-only int4" is
  `backend=weight_only algorithm=gptq`.
- Compare the speeds in a row only if they were measured on the same machine, which is listed below the table. The
  machines are shared, which makes speeds uncertain.

"""
_COMMANDS = """
These are the command, the CPU and the number of threads of each cell. The header of the recipe gives its data and
checkpoint.

"""
_MODES = {"dynamic int8": "dynamic", "float16": "float16", "weight-only int4": "int4"}
# Model -> the results of its columns that are not at modes/PTQ.MODE.
_MODELS = {
    "MobileNetV2, CIFAR-10": {"PTQ": "mobilenet_v2_cifar10_ptq", "QAT": "mobilenet_v2_cifar10_qat"},
    "ResNet-18, CIFAR-10": {"PTQ": "resnet18_cifar10_ptq", "QAT": "resnet18_cifar10_qat"},
    "ResNet-50, ImageNet": {"PTQ": "resnet50_ptq", "QAT": "resnet50_qat"},
    "EfficientNet-Lite0, ImageNet's samples": {
        "PTQ": "efficientnet_lite0_ptq",
        "QAT": "efficientnet_lite0_qat",
    },
    "ViT, CIFAR-10": {"PTQ": "vit_cifar10_ptq", "QAT": "vit_cifar10_qat"},
    "SSDlite-MobileNetV3, blood cells": {"PTQ": "ssdlite_bccd_ptq", "QAT": "ssdlite_bccd_qat"},
    "YOLOX-Nano, blood cells": {"PTQ": "yolox_nano_bccd_ptq", "QAT": "yolox_nano_bccd_qat"},
    "U-Net, CamVid": {"PTQ": "unet_camvid_ptq", "QAT": "unet_camvid_qat"},
    "LR-ASPP, CamVid": {"PTQ": "lraspp_camvid_ptq", "QAT": "lraspp_camvid_qat"},
    "DS-CNN, spoken digits": {"PTQ": "dscnn_spoken_digits_ptq", "QAT": "dscnn_spoken_digits_qat"},
    "all-MiniLM-L6-v2, SICK": {"PTQ": "text_embedding_ptq", "weight-only int4": "minilm_sick_ptq"},
}


def page() -> str:
    """Returns the text of docs/accuracy.md."""
    every = sorted(RECIPES.glob("results/*.json")) + sorted(RECIPES.glob("results/modes/*.json"))
    found = {
        path.relative_to(RECIPES / "results").with_suffix("").as_posix(): json.loads(
            path.read_text(encoding="utf-8")
        )
        for path in every
    }
    rows = [_row(result) for name, result in found.items() if "/" not in name]
    return _HEAD + _table(_COLUMNS, rows) + modes(found)


def modes(results: Mapping[str, dict[str, Any]]) -> str:
    """Returns the section of models by mode.

    Args:
        results: the results by their path in recipes/results, without the extension.
    """
    columns = ("PTQ", "QAT", *_MODES)
    rows, commands = [], []
    for model, own in _MODELS.items():
        names = {column: f"modes/{own['PTQ']}.{mode}" for column, mode in _MODES.items()} | own
        found = {column: results[name] for column, name in names.items() if name in results}
        if "dynamic int8" not in found and "dynamic" in found.get("PTQ", {}).get("latency_ms", ()):
            found["dynamic int8"] = _beside(found["PTQ"])
        if not found:
            continue
        first = next(iter(found.values()))
        metric = _metric(first)
        float_score = f"{first[metric]['float']:.2f}"
        cells = [_cell(found[column]) if column in found else "-" for column in columns]
        rows.append([model, _title(metric), float_score, *cells])
        commands.append(
            f"- {model}\n" + "".join(_command(one, found[one]) for one in columns if one in found)
        )
    table = _table(("model", "metric", "float", *columns), rows)
    return _MODES_HEAD + table + _COMMANDS + "".join(commands)


def _beside(result: dict[str, Any]) -> dict[str, Any]:
    """Returns `result` with the figures of the dynamic INT8 file, which verify.dynamic=true also measures."""
    metric, times, sizes = _metric(result), result["latency_ms"], result["bytes"]
    return result | {
        metric: {"float": result[metric]["float"], "int8": result[metric]["dynamic"]},
        "speedup": {"ratio": times["float"] / times["dynamic"]},
        "size_ratio": sizes["dynamic"] / sizes["float"],
        "settings": ["verify.dynamic=true"],
    }


def _cell(result: dict[str, Any]) -> str:
    scores = result[_metric(result)]
    change = scores["int8"] - scores["float"]
    return (
        f"{scores['int8']:.2f} ({change:+.2f}), {result['speedup']['ratio']:.2f}, {result['size_ratio']:.3f}"
    )


def _command(column: str, result: dict[str, Any]) -> str:
    settings = " ".join([f"recipe={result['recipe']}", *result.get("settings", ())])
    return f"  - {column}: `uv run train.py {settings}`, {_machine(result['hardware'])}\n"


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    every = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


def _metric(result: dict[str, Any]) -> str:
    """Returns the key of the main metric, which is the first one of the float model."""
    return next(key for key, value in result.items() if isinstance(value, dict) and "float" in value)


def _title(metric: str) -> str:
    return _TITLES.get(metric, metric.replace("_", " "))


def _machine(hardware: dict[str, Any]) -> str:
    return f"{hardware['cpu']}{_isa(hardware)}, {hardware['threads']}"


def _row(result: dict[str, Any]) -> list[str]:
    metric = _metric(result)
    scores, speed = result[metric], result["speedup"]
    paired = result.get("paired")
    spread = f" ± {paired['interval']:.2f}" if paired else ""
    return [
        f"`{result['recipe']}`",
        result["model"],
        _title(metric),
        f"{scores['float']:.2f}",
        f"{scores['int8']:.2f}",
        f"{scores['dynamic']:.2f}" if "dynamic" in scores else "-",
        f"{scores['int8'] - scores['float']:+.2f}{spread}",
        f"{speed['ratio']:.2f} ({speed['ratio_p10']:.2f} to {speed['ratio_p90']:.2f})",
        f"{result['size_ratio']:.3f}",
        f"{100 * result['int8_share_of_macs']:.1f} %",
        f"{result['images']:,}",
        _machine(result["hardware"]),
    ]


def _isa(hardware: dict[str, Any]) -> str:
    """Returns the instruction sets that int8 kernels use, as " (VNNI, AMX)"; "" if none is known."""
    known = {"avx512_vnni": "VNNI", "avx_vnni": "VNNI", "amx_int8": "AMX"}
    found = dict.fromkeys(known[one] for one in hardware.get("isa", ()) if one in known)
    return f" ({', '.join(found)})" if found else ""


if __name__ == "__main__":
    write_text(PAGE, page())
