"""Checks whether the file for chunks agrees with the file for whole recordings after the last chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit_verify.stream import LEAST_DB, stream_file

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


class StreamCheck(Check):
    """The share of equal decisions and the SQNR on `verify.parity_images` samples; the bound is on the SQNR."""

    name = "stream"

    def measure(self, subject: Subject, results: Results) -> Results:
        path = stream_file(subject.files["int8"])
        if not path.is_file():
            return results
        import numpy as np

        from qatkit_verify.chunks import in_chunks, kept_db
        from qatkit_verify.session import open_session, run_outputs

        whole, stream = (
            open_session(one, threads=subject.settings.threads, options=subject.options)
            for one in (subject.files["int8"], path)
        )
        exact, found = [], []
        for images in subject.first_images(subject.settings.parity_images):
            exact.append(subject.task.joined(run_outputs(whole, images)))
            found.append(subject.task.joined(in_chunks(stream, images)))
        outputs = [np.concatenate(one) for one in (exact, found)]
        figures = {
            "file": path.name,
            "images": len(outputs[0]),
            "agreement": float(np.mean(subject.task.agree(*outputs))),
            "sqnr_db": kept_db(*outputs),
            "max_difference": float(np.abs(outputs[0] - outputs[1]).max()),
        }
        return results.with_measured(self.name, figures)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        found = results.measured.get(self.name)
        if found is None or found["sqnr_db"] >= LEAST_DB:
            return []
        line = (
            f"export.stream: the SQNR of {found['file']} after the last chunk against the file for whole recordings is"
            f" {found['sqnr_db']:.1f} dB, less than {LEAST_DB:g} dB"
        )
        return [Shortfall(line, [Fix(("export.stream=false",), "only the whole file")])]

    def lines(self, results: Results) -> list[str]:
        found: dict[str, Any] | None = results.measured.get(self.name)
        if found is None:
            return []
        near = "outputs bit-identical"
        if found["max_difference"]:
            near = f"difference max {found['max_difference']:.3g} (SQNR {found['sqnr_db']:.1f} dB)"
        return [
            f"in chunks ({found['file']}): same decision as the file for whole recordings for"
            f" {100 * found['agreement']:.2f} % of {found['images']} {results.task.samples}, {near}"
        ]
