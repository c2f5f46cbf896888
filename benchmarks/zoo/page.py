"""Makes the texts of docs/models.md and docs/models/ from the results of each model of the list."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from zoo import GROUPS

Rows = dict[str, Any]
TITLES = {
    "timm": "timm",
    "hf": "Hugging Face",
    "smp": "segmentation_models_pytorch",
    "vision": "torchvision without its classifiers",
    "einops": "Transformers written with einops",
    "odd": "Our own",
}
STATUSES = ("through", "refused", "wrong", "traceback", "killed")
LOW = 0.95  # share of int8 below which a model's float operators are listed
WITHIN = 1.0  # dB by which a model may be below its twin


def pages(rows: Rows) -> dict[str, str]:
    """Returns the pages by path: models.md with the summary, and models/GROUP.md with the rows of each group."""
    found = {group: _of(group, rows) for group in GROUPS}
    links = [f"- [{TITLES[group]}](models/{group}.md)" for group in GROUPS if found[group]]
    written = {"models.md": ["# Models of benchmarks", "", _INTRODUCTION, "", *_summary(rows), "", *links]}
    for group, own in found.items():
        if own:
            top = [
                f"# {TITLES[group]}",
                "",
                "The columns are described in [Models of benchmarks](../models.md).",
                "",
            ]
            written[f"models/{group}.md"] = [*top, *_table(own), *_refusals(own), *_low(own)]
    return {path: "\n".join(lines) + "\n" for path, lines in written.items()}


_INTRODUCTION = (
    "Written by `uv run --group benchmark benchmarks/coverage.py --all`; do not edit. Random weights (spread so that "
    "every part counts), fbgemm, opset 13 unless a row names another one. Each model is captured with every axis "
    "dynamic that it leaves dynamic. Its graph is compared with the model itself (batches of 1, 2 and 3, other values; "
    "in training mode too if the model is random there), calibrated with 16 inputs, trained for a step, converted, "
    "exported, and run in ONNX Runtime on 16 other inputs.\n\n"
    "- SNR: the outputs of the INT8 file against those of the float model, for the worst output; the part that the "
    "outputs for all inputs have in common is left out.\n"
    "- Twin: the SNR of the same model with its functional parts written as modules.\n"
    "- Parity: equal decisions (argmax, or integers) of the file and the converted module, without / with "
    "optimizations.\n"
    "- Capture and export: CPU seconds with one thread (the INT8 file).\n"
    '- Other sizes: the number of other sizes of the axes in brackets at which both files were compared too; "-" in '
    "rows that were measured before this comparison existed."
)


def _of(group: str, rows: Rows) -> Rows:
    """Returns the rows of a group."""
    return {name: row for name, row in rows.items() if name.startswith(f"{group}/")}


def _summary(rows: Rows) -> list[str]:
    lines = [
        "| | models | " + " | ".join(STATUSES) + " | int8 share ≥ 95 % |",
        "|" + "---|" * (len(STATUSES) + 3),
    ]
    for group in (*GROUPS, ""):
        found = [row for name, row in rows.items() if not group or name.startswith(f"{group}/")]
        if found:
            count = Counter(row["status"] for row in found)
            high = sum(row.get("int8_share", 0) >= LOW for row in found if row["status"] == "through")
            cells = [TITLES.get(group, "all"), str(len(found)), *(str(count[s]) for s in STATUSES), str(high)]
            lines.append("| " + " | ".join(cells) + " |")
    twins = [row["snr"] - row["twin_snr"] for row in rows.values() if _has_twin(row)]
    if twins:
        near = sum(difference >= -WITHIN for difference in twins)
        lines += ["", f"{near} of {len(twins)} models with a twin are less than {WITHIN:.0f} dB worse than it "
                  f"(worst {min(twins):+.1f} dB, median {statistics.median(twins):+.2f} dB)."]  # fmt: skip
    return lines


def _has_twin(row: Rows) -> bool:
    return row.get("snr") is not None and row.get("twin_snr") is not None


def _table(rows: Rows) -> list[str]:
    head = ("model", "k params", "nodes", "int8 MACs", "SNR dB", "twin dB", "parity off / on %", "size", "capture s",
            "export s", "other sizes", "no gradient")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in sorted(rows.items()):
        if row["status"] not in ("through", "wrong"):
            continue
        opset = f" (opset {row['opset']})" if row.get("opset", 13) != 13 else ""
        if "snr" not in row:
            lines.append(f"| {_short(name)} | " + " | ".join(["-"] * (len(head) - 1)) + " |")
            continue
        cells = (_short(name) + opset, f"{row['parameters'] / 1e3:.0f}", str(row["nodes"]), _share(row),
                 _number(row["snr"]), _number(row.get("twin_snr")),
                 " / ".join(f"{100 * p:.1f}" for p in row["parity"]), f"{row['size_ratio']:.3f}",
                 f"{row['capture_seconds']:.1f}", _number(row.get("export_seconds")), _sizes(row),
                 ", ".join(row["no_gradient"][:2]) or "none")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _sizes(row: Rows) -> str:
    if "free_axes" not in row:
        return "-"
    return f"{row['sizes']} ({', '.join(row['free_axes'])})" if row["free_axes"] else "fixed"


def _share(row: Rows) -> str:
    return f"{100 * row['int8_share']:.1f} %" if row["macs"] else "no MACs"


def _short(name: str) -> str:
    return name.partition("/")[2]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _refusals(rows: Rows) -> list[str]:
    """Returns a table of the models that did not go through, with their errors."""
    lines = []
    for status in STATUSES[1:]:
        for name, row in sorted(rows.items()):
            if row["status"] == status:
                said = row.get("error") or "; ".join(row["wrong"])
                expected = (
                    f" (expected: {row['expected']})" if row.get("expected") and status == "refused" else ""
                )
                lines.append(f"| {_short(name)} | {status}{expected} | {said.replace('|', '/')[:600]} |")
    return ["", "| model | status | message |", "|---|---|---|", *lines] if lines else []


def _low(rows: Rows) -> list[str]:
    """Returns a table of the models with a low int8 share, with their float operators and the reasons."""
    lines = []
    for name, row in sorted(rows.items()):
        if row.get("macs") and row.get("int8_share", 1) < LOW:
            why = "; ".join(f"{reason} ({count})" for reason, count in row["floats"].items())
            lines.append(f"| {_short(name)} | {_share(row)} | {why.replace('|', '/')} |")
    return (
        ["", "| model below 95 % | int8 MACs | float operators and reasons |", "|---|---|---|", *lines]
        if lines
        else []
    )
