"""What a bad command line is, and the smallest run that any of them is put on top of."""

from __future__ import annotations

from dataclasses import dataclass

# A run that would work, of seconds: what is typed behind it is the only mistake.
TINY = (
    "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=32", "data.workers=0", "calibration.images=64",
    "schedule=calibrate_only", "trainer=cpu", "trainer.progress=false", "verify.latency_runs=3", "verify.threads=1",
    "verify.max_drop=null", "output_dir=out",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line that has to end in one line.

    Attributes:
        typed: behind the script.
        says: how the line begins, behind "error: "; "{files}" is the folder of damaged files.
        script: the one that is called.
    """

    typed: tuple[str, ...]
    says: str
    script: str = "train.py"


def bad(typed: str, says: str | None = None) -> Case:
    """One argument on top of a run that would work; by itself it is said as it was typed."""
    return Case((*TINY, typed), f"{typed}: " if says is None else says)
