"""A bad command line as a test case, and the smallest run to which each case adds its mistake."""

from __future__ import annotations

from dataclasses import dataclass

# A valid run of a few seconds: the mistake appended to it is the only one.
TINY = (
    "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=32", "data.workers=0", "calibration.images=64",
    "schedule=calibrate_only", "trainer=cpu", "trainer.progress=false", "verify.latency_runs=3", "verify.threads=1",
    "verify.max_drop=null", "output_dir=out",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line that must fail with a one-line error.

    Attributes:
        typed: arguments after the script.
        says: start of the error message, after "error: "; "{files}" is the folder of damaged files.
        script: name of the script to call.
    """

    typed: tuple[str, ...]
    says: str
    script: str = "train.py"


def bad(typed: str, says: str | None = None) -> Case:
    """Returns a case with one bad argument added to a valid run; `says` defaults to the argument as typed."""
    return Case((*TINY, typed), f"{typed}: " if says is None else says)
