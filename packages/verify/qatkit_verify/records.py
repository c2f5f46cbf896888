"""What is measured of a file anywhere, as plain dataclasses. Units are in the names; agreement is a share 0..1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """One file's time per run, and how it compares with the first file of the same measurement.

    `ratio` is the median over rounds of (first file's time / this file's time): above 1 is faster.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    batch: int
    threads: int
    runs: int


@dataclass(frozen=True)
class Comparison:
    """Logits of ONNX Runtime against those of the converted module, over the same images."""

    agreement: float  # share of images with the same top-1, 0..1
    max_abs: float
    mean_abs: float
    max_steps: float  # max_abs / Parity.step
    mean_steps: float
    ties: float = 0.0  # share of images with another top-1 that was within half a step of the reference's own

    @property
    def held(self) -> float:
        """Share of images on which nothing was decided otherwise but ties."""
        return self.agreement + self.ties


@dataclass(frozen=True)
class Hardware:
    """Where it was measured."""

    cpu: str
    cores: int
    isa: tuple[str, ...]  # the instruction sets that decide int8 speed
    threads: int
    system: str
