"""The model card of a finished run (card.md), written from report.json for readers who do not know the run.

The card only states facts from the report: it does not invent a license, and it lists what was not measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qatkit.config.schema.model import DRAWN
from qatkit.handover.limits import limits
from qatkit_verify.bundle.ports import Port
from qatkit_verify.classification import names_of
from qatkit_verify.errors import counted
from qatkit_verify.fitting import by_sides

_WORST = 10  # largest number of classes that are listed
_GIVEN = "qatkit.one_call.given_model"
# Hugging Face's names of tasks, by our own; other tasks have none.
_TAGS = {
    "classification": "image-classification",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
    "embedding": "image-feature-extraction",
    "audio_classification": "audio-classification",
    "text_classification": "text-classification",
    "text_pairs": "sentence-similarity",
    "causal_lm": "text-generation",
}

Report = Mapping[str, Any]


def card(
    report: Report,
    labels: Sequence[str],
    snippets: str = "",
    arrays: Mapping[str, Any] | None = None,
    stream: str = "",
    requires: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
) -> str:
    """Returns the model card as Markdown, with the front matter that Hugging Face reads.

    Args:
        report: the content of report.json.
        labels: the names of the classes, in the order of the outputs; empty without labels.
        snippets: the code that loads the file, as Markdown; "" to omit it.
        arrays: the content of model.json for a model of arrays, or of preprocess.json for a model of
            recordings; None for a model of images.
        stream: the section on the file that reads recordings in chunks, as Markdown; "" to omit it.
        requires, shapes: facts about the file, as for `limits`.
    """
    found = limits(report, labels, "image" if arrays is None else "sample", requires, shapes)
    sections = (
        _head(report, labels, arrays),
        _accuracy(report, arrays),
        _by_class(report, labels, arrays),
        _calibration(report, arrays),
        _speed(report),
        _decoder(report),
        stream,
        "## Limits\n\n" + "\n".join(f"- {_plain(line)}" for line in found),
        _versions(report),
        "## Verify\n\n    qatkit-verify BUNDLE\n\nThis needs only onnxruntime and numpy. It checks the "
        "digests, the golden answers, and the speed and int8 kernels on the machine where it runs.",
        f"## Load\n\n{snippets}" if snippets else "",
    )
    return _front_matter(report, arrays) + "\n" + "\n\n".join(filter(None, sections)) + "\n"


def _front_matter(report: Report, arrays: Mapping[str, Any] | None) -> str:
    tag = _TAGS.get(names_of(report).name, "")
    if tag.startswith("image-") and arrays is not None:
        tag = ""  # classes or vectors of samples that are not images
    lines = ["library_name: onnx", *([f"pipeline_tag: {tag}"] if tag else []), "tags:", "- quantized"]
    lines += ["- int8"] if str(report["label"]).startswith("INT8") else []
    return "\n".join(["---", *lines, f"- {json.dumps(_model(report))}", "---", ""])


def _model(report: Report) -> str:
    """Returns the model's name without local paths: the stem of a file, or the name of a class or function."""
    name = str(report["model"])
    if name == _GIVEN:  # a script has passed a module to qatkit.quantize
        return str(report["name"])
    if name.endswith(".onnx") or name.startswith("onnx/"):
        return Path(name).stem
    if "//" in name or name.startswith(("/", ".", "~")):
        return Path(name).name
    return name if "/" in name else re.split("[.:]", name)[-1]


def _head(report: Report, labels: Sequence[str], arrays: Mapping[str, Any] | None) -> str:
    data, task = report["config"].get("data", {}), names_of(report)
    prepared = report["preprocessing"] or {}
    rows = [("Model", _plain(_model(report)) + f", quantized ({_plain(report['label'])})")]
    classes = "1 class" if len(labels) == 1 else f"{len(labels)} classes"
    rows.append(("Task", f"{task.description}, {classes}" if labels else task.description))
    rows.append(("Data", _plain(data.get("source", "unknown"))))
    if prepared:
        size, channels = prepared["image_size"], prepared["channels"]
        kind = "grey" if channels == 1 else prepared.get("channel_order", "RGB")
        rows.append(("Input", f"{by_sides(size)} {kind}, prepared as described in preprocess.json"))
    if arrays and "features" in arrays:
        told = f"{arrays['samples']} samples at {arrays['rate']} Hz as {arrays['features']}"
        rows.append(("Input", f"{_plain(told)}, prepared as described in preprocess.json"))
    for key, kind in (("inputs", "Input"), ("outputs", "Output")):
        rows += [(kind, _plain(Port.from_dict(one))) for one in (arrays or {}).get(key, ())]
    return f"# {_plain(report['name'])}\n\n{_table(('', ''), rows)}"


def _accuracy(report: Report, arrays: Mapping[str, Any] | None) -> str:
    task, samples = names_of(report), "pictures" if arrays is None else "samples"
    if not report["labelled"]:
        agreeing = [
            (key, f"{100 * one['agreement']:.2f}", f"{one['images']:,}")
            for key, one in report["fidelity"].items()
        ]
        head = ("", task.same, samples)
        return (
            f"## Agreement with float\n\nNo labels were available.\n\n{_table(head, agreeing)}"
            if agreeing
            else ""
        )
    found = report["accuracy"]
    names = (("float", "float"), ("int8", report["label"]))
    rows = [
        (_plain(name), *(_figure(one.get(metric.key)) for metric in task.metrics), f"{one['images']:,}")
        for key, name in names
        if (one := found.get(key)) is not None
    ]  # fmt: skip
    if not rows:
        return ""
    lost = ""
    if len(rows) == len(names):
        points = found["int8"][task.main.key] - found["float"][task.main.key]
        lost = f"\n\n{_plain(report['label'])} against float: {points:+.2f} {task.main.points} in {task.main.name}."
    tested = "test images" if arrays is None else "test samples"
    heads = ("", *(metric.title for metric in task.metrics), tested)
    return f"## Accuracy\n\n{_table(heads, rows)}{lost}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _by_class(report: Report, labels: Sequence[str], arrays: Mapping[str, Any] | None) -> str:
    int8, before = report["accuracy"].get("int8") or {}, report["accuracy"].get("float") or {}
    images = int8.get("class_images") or ()
    if len(images) < 3:
        return ""
    shares = sorted((100 * int8["class_right"][i] / one, i) for i, one in enumerate(images) if one)
    right, total = before.get("class_right") or (), before.get("class_images") or ()
    rows = [
        (_plain(labels[i] if i < len(labels) else str(i)), f"{share:.1f}",
         f"{100 * right[i] / total[i]:.1f}" if right and total[i] else "-", f"{images[i]:,}")
        for share, i in shares[:_WORST]
    ]  # fmt: skip
    metric = names_of(report).main
    tested = "test images" if arrays is None else "test samples"
    said = f"The worst {len(rows)} of {len(shares)} classes with {tested}; report.json has all of them."
    if len(rows) == len(shares):
        every = f"All {len(rows)} classes" if len(shares) == len(images) else f"The classes with {tested}"
        said = f"{every}, the worst first."
    head = ("class", f"{_plain(report['label'])} {metric.title}", f"float {metric.title}", tested)
    return f"## By class\n\n{said}\n\n{_table(head, rows)}"


def _calibration(report: Report, arrays: Mapping[str, Any] | None) -> str:
    settings = report["config"].get("calibration")
    if not settings:
        return ""
    count, samples = settings.get("images"), "image" if arrays is None else "sample"
    samples += "" if count == 1 else "s"
    drawn = report["config"].get("data", {}).get("source") == DRAWN
    kind = (
        f"random {samples}, not from real data" if drawn or settings.get("random") else f"training {samples}"
    )
    return f"## Calibration\n\nRanges come from at most {count} {kind}."


def _speed(report: Report) -> str:
    rows = [
        (
            name,
            f"{one['float']['median_ms']:.2f}" if "float" in one else "-",
            f"{one['int8']['median_ms']:.2f}",
        )
        for name, one in (("ONNX Runtime", report["latency"]), *_others(report))
        if "int8" in one
    ]
    if not rows:
        return ""
    hardware, timed = report["hardware"] or {}, report["latency"].get("int8", {})
    threads = counted(timed.get("threads", 0), "thread")
    said = f"Batch {timed.get('batch')}, {threads}, {_plain(hardware.get('cpu', 'unknown CPU'))}."
    head = ("runtime", "float ms", f"{_plain(report['label'])} ms")
    return f"## Speed\n\n{said}\n\n{_table(head, rows)}"


def _others(report: Report) -> list[tuple[str, Mapping[str, Any]]]:
    return [(_plain(name), one["latency"]) for name, one in report["runtimes"].items()]


def _decoder(report: Report) -> str:
    """Returns the section on the file that computes one token at a time; "" if there is none."""
    found = report.get("measured", {}).get("decoder")
    if found is None:
        return ""
    generated, equal = found["greedy"]
    return (
        "## Decoder\n\n`decoder/model.onnx` reads the keys and values of earlier tokens and returns those of all. It"
        " predicts the same next token as `model.onnx` for"
        f" {100 * found['agreement']:.2f} % of {found['tokens']:,} tokens"
        f" and {equal} of {generated} tokens of a greedy text, at {found['tokens_per_second']:.1f} tokens per second."
        '\n\n    pip install onnxruntime numpy tokenizers\n    python decoder/generate.py "Once upon a time" --tokens'
        " 200\n\nonnxruntime-genai runs the folder unchanged."
    )


def _versions(report: Report) -> str:
    rows = [(_plain(name), _plain(version)) for name, version in report["versions"].items()]
    return f"## Versions\n\n{_table(('', ''), rows)}" if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _plain(text: object) -> str:
    """Returns text of a run as one line, with characters of Markdown and HTML escaped."""
    line = " ".join(str(text).split())
    for sign in "\\`*_[]<>|#":
        line = line.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return line
