"""Draws the test samples in which the two files differ most, for tasks with a drawing (`Task.drawing`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qatkit.records.examples import Example, Examples
from qatkit.records.results import Results
from qatkit.tasks.drawing import Drawing, Sample
from qatkit.verify.checks.base import Check, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ExamplesCheck(Check):
    """Drawings of the inspected test samples on which the files differ most, `verify.examples` of them; no bound."""

    name = "examples"

    def measure(self, subject: Subject, results: Results) -> Results:
        drawing, wanted = subject.task.drawing(), subject.settings.examples
        if drawing is None or wanted == 0:
            return results
        kept: list[tuple[float, Sample]] = []
        seen = 0
        for differs, sample in _samples(subject, drawing, results):
            seen += 1
            kept = sorted([*kept, (differs, sample)], key=lambda one: -one[0])[:wanted]
        rows = [Example(differs, tuple(drawing.panels(sample))) for differs, sample in kept]
        found = Examples(rows, seen, drawing.measure, tuple(drawing.legend(results.classes)))
        return replace(results, examples=found)


def _samples(subject: Subject, drawing: Drawing, results: Results) -> Iterator[tuple[float, Sample]]:
    """Yields how much the files differ on each of the inspected test samples, and the sample."""
    import numpy as np

    from qatkit.verify.accuracy import all_cores, file_predictor
    from qatkit_verify.session import open_session

    exact_file, int8_file = (
        file_predictor(
            open_session(subject.files[name], threads=all_cores(), options=subject.options), subject.task
        )
        for name in ("float", "int8")
    )
    seen = 0
    for inputs, targets in subject.some(drawing.looked_at):
        exact, found = exact_file(inputs), int8_file(inputs)
        shares = drawing.differs(exact, found)
        pictures = _pictures(inputs, results.preprocessing)
        for place, share in enumerate(shares):
            yield (
                float(share),
                Sample(
                    {name: np.asarray(one[place]) for name, one in inputs.items()}
                    if isinstance(inputs, Mapping)
                    else np.asarray(inputs[place]),
                    None if pictures is None else pictures[place],
                    np.asarray(targets[place]) if subject.labelled else None,
                    exact[place].copy(),
                    found[place].copy(),
                    results.classes,
                    subject.label,
                    subject.sound,
                ),
            )
        seen += len(shares)
        if seen >= drawing.looked_at:
            return


def _pictures(inputs: Any, preprocessing: Mapping[str, Any] | None) -> NDArray[Any] | None:
    """Returns a batch as pixels, uint8 [N, H, W, 3], by undoing its normalisation; None for other samples."""
    import numpy as np

    from qatkit_verify.fitting import UNIT

    if preprocessing is None or isinstance(inputs, Mapping):
        return None
    batch = np.asarray(inputs, np.float32)
    if preprocessing.get("layout", "NCHW") == "NCHW":
        batch = np.moveaxis(batch, 1, -1)
    values = batch * np.float32(preprocessing["std"]) + np.float32(preprocessing["mean"])
    if preprocessing.get("pixels", UNIT) == UNIT:
        values = values * 255
    pixels = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    if preprocessing.get("channel_order", "RGB") == "BGR":
        pixels = pixels[..., ::-1]
    colours = 3
    return np.repeat(pixels, colours, -1) if pixels.shape[-1] == 1 else pixels[..., :colours].copy()
