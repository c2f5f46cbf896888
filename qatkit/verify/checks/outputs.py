"""Measures how close each output is to the float file's: SQNR, cosine and L2 distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Subject


class OutputsCheck(Check):
    """SQNR, cosine similarity and L2 distance of each output against the float file's; no bounds.

    They are measured on `verify.parity_images` test samples if `verify.outputs` is set. Without labels they
    are also measured for a task in which every output counts.
    """

    name = "outputs"

    def measure(self, subject: Subject, results: Results) -> Results:
        if not (subject.settings.outputs or (subject.task.every_output and not subject.labelled)):
            return results
        from qatkit.verify.accuracy import all_cores
        from qatkit.verify.fidelity import OutputDistance, SampleDistance
        from qatkit_verify.feeds import rows
        from qatkit_verify.session import open_session, run_outputs

        exact, judged = (
            open_session(subject.files[name], threads=all_cores(), options=subject.options)
            for name in ("float", "int8")
        )
        names = [one.name for one in exact.get_outputs()]
        wholes, samples = [OutputDistance() for _ in names], [SampleDistance() for _ in names]
        for batch in subject.first_images(subject.settings.parity_images):
            pairs = zip(run_outputs(exact, batch), run_outputs(judged, batch), strict=True)
            for (a, b), whole, each in zip(pairs, wholes, samples, strict=True):
                whole.add(a, b)
                each.add(a, b, rows(batch))
        told = [
            whole.figures(name) | each.figures()
            for name, whole, each in zip(names, wholes, samples, strict=True)
        ]
        return results.with_measured(self.name, {"outputs": told})

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(self.name)
        if not found:
            return []
        told = [f"SQNR of each output: {', '.join(map(_text, found['outputs']))}"]
        return [*told, *(_near(one) for one in found["outputs"] if "cosine" in one)]


def _text(output: Mapping[str, Any]) -> str:
    decibel = output["sqnr_db"]
    same = "equal" if "cosine" in output else "not compared"  # integers, or other shapes
    text = f"{output['name']} {same if decibel is None else f'{decibel:.1f} dB'}"
    if output.get("worst_channel_db") is None:
        return text
    worst = f"worst channel {output['worst_channel']} of {output['channels']}"
    return f"{text} ({worst}: {output['worst_channel_db']:.1f} dB)"


def _near(output: Mapping[str, Any]) -> str:
    cosine = f"cosine {output['cosine']:.5f} (minimum {output['least_cosine']:.5f})"
    length = f"L2 distance {output['l2']:.3g} (maximum {output['largest_l2']:.3g})"
    return f"  {output['name']}, over {output['samples']:,} samples: {cosine}, {length}"
