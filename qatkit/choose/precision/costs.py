"""Predicts the latency of a model with some operators in float, from profiles of a few of its files on this machine.

    int8 file, float file        time of each operator in either type, among neighbours of the same type
    mixtures: every 2nd          its time between neighbours of the other type (its input has left the caches,
    operator float, every 2nd    and so have its weights), and the time of the borders: kernels that quantize,
    quarter, the third and two   dequantize and reorder, whose time is a linear function of the number of values
    thirds that lose most

The profiler adds two or three microseconds to each kernel. The value with which the sums of the kernels'
times agree best with the clock is subtracted from each. The remaining difference is distributed over the
operators of the int8 and the float file, and over the borders of the mixtures.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from qatkit.choose.precision.layout import Layout
from qatkit.verify.site_kernels import DEQUANTIZE, LAYOUT, QUANTIZE, SiteKernel

_MOST, _LEAST = 4.0, 0.25  # limits of the factor that makes the time of borders agree with the clock
_LENGTH = 0.3  # length scale: share of the operators' time in which similar sets may differ
_FASTEST = 0.25  # lower limit of predictions, as a share of the shortest measured time
_NOISE = 0.02  # share of the clock's noise in the variance of prediction errors


@dataclass(frozen=True)
class Measured:
    """A measured file: the layout of its float operators, its kernels, and the milliseconds of a run by the clock."""

    layout: Layout
    kernels: Sequence[SiteKernel]
    ms: float

    @property
    def total(self) -> float:
        """The sum of the microseconds of all kernels."""
        return sum(kernel.microseconds for kernel in self.kernels)

    def time(self, site: str | None) -> float:
        """Returns the microseconds of an operator; 0 if it is part of another operator's kernel.

        Args:
            site: the site of the operator; None selects the kernels without a site.
        """
        return sum(one.microseconds for one in self.kernels if one.site == site and not one.border)


class Costs:
    """Predicts the milliseconds of a run with a set of float operators.

    Args:
        files: the int8 file, the float file, and then those of mixtures.
        operators: the sites of the operators that can be int8 or float, in graph order.
        sites: the sites of all nodes, in graph order.
    """

    def __init__(self, files: Sequence[Measured], operators: Sequence[str], sites: Sequence[str]) -> None:
        self._floor = _FASTEST * min(file.ms for file in files)
        overhead = _overhead(files)
        files = [_without(file, overhead) for file in files]
        self._int8, self._float, *probes = files
        self._beside = _neighbours(operators, sites)
        times = {one: self._float.time(one) for one in self._float.layout.floats}
        whole = sum(times.values()) or 1.0
        self._shares = {one: time / whole for one, time in times.items()}
        self._scale = {True: _scale(self._int8), False: _scale(self._float)}
        self._sites = sorted({one.site for file in files for one in file.kernels if one.site is not None})
        self._seen = {
            (one, eight): self._samples(one, eight, files) for one in self._sites for eight in (True, False)
        }
        self._known = {
            (k.site, k.site in file.layout.int8) for file in files for k in file.kernels if not k.border
        }
        self._line = {kind: _line(kind, files) for kind in (QUANTIZE, DEQUANTIZE, LAYOUT)}
        events = sum(len(probe.layout.moved) for probe in probes)
        moves = sum(one.border == LAYOUT for probe in probes for one in probe.kernels)
        self._moves = moves / max(1, events)
        self._files: list[tuple[Layout, float]] = []
        self._weights: NDArray[np.float64] = np.zeros(0)
        self._at_borders, self._left = 1.0, [0.0, 0.0]
        self._left = [file.ms - self._summed(file.layout) for file in files[:2]]
        self._at_borders = self._fitted(probes)
        self._left = [
            left + file.ms - self._summed(file.layout) for left, file in zip(self._left, files, strict=False)
        ]
        self.learn([(file.layout, file.ms) for file in files])

    def __call__(self, layout: Layout) -> float:
        """Returns the predicted milliseconds of a run."""
        return self._above_zero(layout) * math.exp(self._learned(layout))

    def learn(self, files: Sequence[tuple[Layout, float]]) -> None:
        """Corrects the predictions by files that have been timed, most for sets that are similar to theirs.

        Sums of times ignore effects between operators that are not neighbours. The logarithm of the error
        is interpolated (simple kriging: Rasmussen and Williams, "Gaussian processes for machine learning",
        2006, section 2.2). The covariance is e^(-d/L), where d is the share of the operators' float time in
        which two sets differ.

        Args:
            files: the layout and the milliseconds of a run of each file.
        """
        self._files += [(layout, math.log(ms / self._above_zero(layout))) for layout, ms in files]
        near = [[self._likeness(one, other) for other, _ in self._files] for one, _ in self._files]
        noise = _NOISE * np.eye(len(near))
        self._weights = np.linalg.solve(np.array(near) + noise, np.array([off for _, off in self._files]))

    def _learned(self, layout: Layout) -> float:
        near = [self._likeness(layout, other) for other, _ in self._files]
        return float(np.dot(near, self._weights))

    def _likeness(self, one: Layout, other: Layout) -> float:
        differs = sum(self._shares.get(name, 0.0) for name in one.floats ^ other.floats)
        return math.exp(-differs / _LENGTH)

    def _above_zero(self, layout: Layout) -> float:
        """Returns the sum of the times, limited from below by a share of the shortest measured time.

        Effects that the sum does not include may be negative, and the clock is inaccurate for files that take
        only a few microseconds.
        """
        return max(self._floor, self._summed(layout))

    def _summed(self, layout: Layout) -> float:
        share, total = self.share(layout), self._scale[True] * self._int8.time(None)
        for one in self._sites:
            eight = one in layout.int8
            places, times = self._seen[one, eight]
            total += self._scale[eight] * float(np.interp(self._among_others(one, layout), places, times))
        left = (1 - share) * self._left[0] + share * self._left[1]
        return total + self._at_borders * self._borders(layout) + left

    def of_site(self, site: str, *, eight: bool) -> float:
        """Returns the milliseconds of one operator, averaged over the types of its neighbours in the measured files.

        The time is 0 for an operator without its own kernel, and infinite if no file has the operator in that
        type.
        """
        if site not in self._sites:
            return 0.0
        if (site, eight) not in self._known:
            return math.inf
        return self._scale[eight] * fmean(self._seen[site, eight][1])

    def of_border(self, kind: str, values: int) -> float:
        """Returns the milliseconds of QUANTIZE, DEQUANTIZE or LAYOUT for a tensor with this number of values."""
        return self._at_borders * self._border(kind, values)

    def share(self, layout: Layout) -> float:
        """Returns the share of the operators' float time that belongs to the float operators."""
        return sum(self._shares.get(one, 0.0) for one in layout.floats)

    def _among_others(self, site: str, layout: Layout) -> float:
        """Returns the share of an operator's neighbours that compute in another type than the operator."""
        beside = self._beside.get(site, ())
        eight = site in layout.int8
        return sum((one in layout.int8) != eight for one in beside) / max(1, len(beside))

    def _samples(self, site: str, eight: bool, files: Sequence[Measured]) -> tuple[list[float], list[float]]:
        """Returns the shares of neighbours of the other type, and the microseconds of the operator.

        They come from files with the operator in this type or, if there are none, from all files.
        """
        chosen = [file for file in files if (site in file.layout.int8) == eight] or list(files)
        found: dict[float, list[float]] = {}
        for file in chosen:
            found.setdefault(self._among_others(site, file.layout), []).append(file.time(site))
        return sorted(found), [fmean(found[place]) for place in sorted(found)]

    def _borders(self, layout: Layout) -> float:
        turned = {QUANTIZE: layout.quantized, DEQUANTIZE: layout.dequantized, LAYOUT: layout.moved}
        return sum(self._border(kind, values) for kind, sizes in turned.items() for values in sizes)

    def _border(self, kind: str, values: int) -> float:
        share = self._moves if kind == LAYOUT else 1.0
        return share * self._line[kind](values) * (self._scale[True] + self._scale[False]) / 2

    def _fitted(self, probes: Sequence[Measured]) -> float:
        """Returns the factor for the time of borders that makes the mixtures agree with the clock."""
        borders = sum(self._borders(probe.layout) for probe in probes)
        missing = sum(probe.ms - self._summed(probe.layout) for probe in probes)
        return min(_MOST, max(_LEAST, 1 + missing / borders)) if borders else 1.0


def _neighbours(operators: Sequence[str], sites: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns, for each site, the operator before it and the one after it."""
    places = [i for i, one in enumerate(sites) if one in set(operators)]
    found = {}
    for i, one in enumerate(sites):
        before, behind = bisect_left(places, i), bisect_right(places, i)
        found[one] = tuple(
            sites[place] for place in (*places[max(0, before - 1) : before], *places[behind : behind + 1])
        )
    return found


def _scale(file: Measured) -> float:
    """Returns the clock's milliseconds per microsecond of the kernels; 0 if the profiler recorded no kernels."""
    return file.ms / file.total if file.total else 0.0


def _overhead(files: Sequence[Measured]) -> float:
    """Returns the microseconds that the profiler adds to each kernel, by least squares.

    They are limited by the time of the shortest kernel.
    """
    more = sum(len(file.kernels) * (file.total - 1e3 * file.ms) for file in files)
    least = min((one.microseconds for file in files for one in file.kernels), default=0.0)
    return min(least, max(0.0, more / max(1, sum(len(file.kernels) ** 2 for file in files))))


def _without(file: Measured, overhead: float) -> Measured:
    """Returns `file` with `overhead` microseconds less for each kernel, but with at least a tenth of each time."""
    times = [max(one.microseconds / 10, one.microseconds - overhead) for one in file.kernels]
    kernels = [replace(one, microseconds=time) for one, time in zip(file.kernels, times, strict=True)]
    return replace(file, kernels=kernels)


def _line(kind: str, files: Sequence[Measured]) -> Callable[[int], float]:
    """Returns the line that fits the microseconds of kernels by their number of values; no coefficient is negative."""
    seen = [(one.values, one.microseconds) for file in files for one in file.kernels if one.border == kind]
    if not seen:
        return lambda values: 0.0
    x, y = np.array(seen, np.float64).T
    slope = max(0.0, float(np.polyfit(x, y, 1)[0])) if np.ptp(x) else 0.0
    start = max(0.0, float(y.mean() - slope * x.mean()))
    return lambda values: start + slope * values
