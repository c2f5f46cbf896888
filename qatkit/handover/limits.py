"""The limits of a finished run for its model card: what was missed, left open, left in float or not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qatkit.config.schema import UNLABELLED_BOUNDS
from qatkit.config.schema.model import DRAWN
from qatkit.verify.checks.accuracy import chance_text
from qatkit_verify.classification import TOP1, names_of
from qatkit_verify.errors import counted

_LISTED = 10  # maximum number of operators that are listed
_VNNI = "vnni"

Report = Mapping[str, Any]


def limits(
    report: Report,
    labels: Sequence[str] = (),
    samples: str = "image",
    requires: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
) -> list[str]:
    """Returns the limits as sentences.

    Args:
        report: the content of report.json.
        labels: the names of the classes.
        samples: what a sample is called, in the singular.
        requires: the manifest's requirements of the file: onnxruntime, opset.
        shapes: the shape of each input of the file, with names for open sizes.
    """
    return [
        *(f"A bound was not met: {line}" for line in report["shortfalls"]),
        *_open_bounds(report),
        *_data(report, samples),
        *_doubt(report),
        *_drops(report, labels, samples),
        *_processors(report, samples),
        *_float(report),
        *_form(report, requires or {}, shapes or {}),
        *(f"Not checked: {name}." for name in ("parity", "audit") if report[name] is None),
        *map(str, report["notes"]),
    ]


def _open_bounds(report: Report) -> Iterator[str]:
    bounds = report["config"].get("verify", {})
    keys = ("max_drop",) if report["labelled"] else UNLABELLED_BOUNDS
    unset = [
        f"verify.{key}" for key in (*keys, "max_size_ratio", "min_speedup") if bounds.get(key, 0) is None
    ]
    if unset:
        yield f"These bounds were not set: {', '.join(unset)}."


def _data(report: Report, samples: str) -> Iterator[str]:
    measured = (report["accuracy"] if report["labelled"] else report["fidelity"]).get("int8")
    data = report["config"].get("data", {})
    if measured is None:
        yield f"{'Accuracy' if report['labelled'] else 'Agreement with float'} was not measured."
    elif data.get("source") == DRAWN:
        yield f"Measured on {counted(measured['images'], 'random sample')}, not on real data."
    else:
        known = "" if report["labelled"] else " without labels"
        source, tested = data.get("source", "unknown data"), counted(measured["images"], f"test {samples}")
        yield f"Measured on {tested} of {source}{known}."


def _doubt(report: Report) -> Iterator[str]:
    names, found = names_of(report), report["accuracy"].get("float") or {}
    if names.main.key == TOP1.key and found:
        text = chance_text(found[TOP1.key], found.get("class_images") or (), names.samples)
        if text:
            yield f"{text[:1].upper()}{text[1:]}."


def _drops(report: Report, labels: Sequence[str], samples: str) -> Iterator[str]:
    """Yields the largest drop of a class, and the least similar output of a file without labels."""
    int8, before = (report["accuracy"].get(key) or {} for key in ("int8", "float"))
    counts, right = int8.get("class_images") or (), before.get("class_right") or ()
    same = counts and list(counts) == list(before.get("class_images") or ())
    drops = [
        (100 * (right[i] - int8["class_right"][i]) / count, i)
        for i, count in enumerate(counts)
        if same and count
    ]
    if drops and max(drops)[0] > 0:
        drop, i = max(drops)
        name = labels[i] if i < len(labels) else i
        yield (
            f"The largest drop of a class is {drop:.1f} points in {names_of(report).main.name}: "
            f"class {name}, {counted(counts[i], f'test {samples}')}."
        )
    outputs = report.get("measured", {}).get("outputs", {}).get("outputs", ())
    known = [(one["sqnr_db"], one["name"]) for one in outputs if one.get("sqnr_db") is not None]
    if known and not report["labelled"]:
        least, name = min(known)
        yield f"The output farthest from float's is {name}, with an SQNR of {least:.1f} dB."


def _processors(report: Report, samples: str) -> Iterator[str]:
    machine = report["hardware"]
    if machine is not None:
        sets = ", ".join(machine["isa"]) or "none of the instruction sets for int8"
        vnni = "with" if any(_VNNI in one for one in machine["isa"]) else "without"
        runtimes = ", ".join(("ONNX Runtime", *report["runtimes"]))
        yield f"Checked in {runtimes} on one CPU: {machine['cpu']} ({sets}), {vnni} VNNI."
    found = report.get("measured", {}).get("saturation")
    if found is None or "layers" not in found:
        yield "Not checked: saturation on x86 CPUs without VNNI."
        return
    saturating = sum(bool(one["can_saturate"]) for one in found["layers"].values())
    if found["emulated"] is not None:
        share = 100 * found["emulated"]["agreement"]
        yield (
            f"Without VNNI, {share:.2f} % of the decisions on {counted(found['images'], f'test {samples}')} stay the "
            "same (emulated)."
        )
    elif saturating or found["others"]:
        operators = counted(saturating + len(found["others"]), "operator")
        yield f"On x86 CPUs without VNNI, {operators} may saturate; the effect on the answers was not measured."
    elif found["layers"]:
        yield "No int8 operator can saturate on x86 CPUs without VNNI; the weights prove this."


def _float(report: Report) -> Iterator[str]:
    audit = report["audit"]
    if audit is not None and audit["macs"] and audit["int8_share"] < 1:
        operators = Counter(one["op"] for one in audit["nodes"] if one["macs"] and one["precision"] != "int8")
        listed = ", ".join(f"{count} {name}" for name, count in operators.items())
        share = 100 * (1 - audit["int8_share"])
        yield f"{share:.1f} % of the multiply-accumulates are not in int8: {listed}."
    skipped = report["skipped"]
    yield from (f"Left in float or skipped: {site}: {reason}" for site, reason in skipped[:_LISTED])
    if len(skipped) > _LISTED:
        yield f"{counted(len(skipped) - _LISTED, 'more operator')} of this kind: see report.json."


def _form(
    report: Report, requires: Mapping[str, Any], shapes: Mapping[str, Sequence[int | str]]
) -> Iterator[str]:
    if report["fixed_batch"] is not None:
        yield f"The file accepts only batches of {report['fixed_batch']}."
    for name, shape in shapes.items():
        if any(isinstance(size, int) for size in shape[1:]):
            free = [size for size in shape if isinstance(size, str)]
            any_size = f", with any size for {' and '.join(free)}" if free else ""
            yield f"Input {name} accepts only the shape [{', '.join(map(str, shape))}]{any_size}."
    if requires:
        tested = report["versions"].get("onnxruntime")
        used = f"; measured with {tested}" if tested else ""
        yield f"Opset {requires['opset']} needs ONNX Runtime {requires['onnxruntime']} or newer{used}."
