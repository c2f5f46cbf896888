"""The search for the Pareto front between int8 and float.

Predicted losses and latencies select sets of float operators; measurements of their files decide.

`qatkit.choose.precision.mixed`, the stage that runs the search, has a diagram of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from qatkit.analysis.estimate import estimate
from qatkit.choose.contest import Entrant, Judged, judged
from qatkit.choose.judge import Judge
from qatkit.choose.precision.costs import Costs, Measured
from qatkit.choose.precision.front import (
    Choice,
    decide,
    not_beaten,
    not_beaten_but_by,
    predicted_front,
    thinned,
)
from qatkit.choose.precision.layout import Layout, Layouts, Losses
from qatkit.choose.precision.mixtures import Builder
from qatkit.choose.precision.simulate import simulated_losses
from qatkit.choose.ranges import runtime_of, splits
from qatkit.choose.verdict import Verdict, aim, keeps
from qatkit.config.schema import TargetConfig
from qatkit.graph.overrides import Overrides
from qatkit.progress import Batches
from qatkit.records.precision import Precision, PrecisionPoint
from qatkit.records.results import Fidelity
from qatkit.run.build import example_batch
from qatkit.run.export import paths_of, write_float_file
from qatkit.run.sound import overrides_of
from qatkit.verify.drift import drift_of_files
from qatkit.verify.site_kernels import site_kernels
from qatkit_verify.classification import NAMES
from qatkit_verify.latency import quickest
from qatkit_verify.placement.sites import FloatSites
from qatkit_verify.records import Metric

FLOAT, INT8 = "float", "int8"
_SIMULATED, _FIRST_LOOK = 96, 32  # limits of sets, and of images for their first simulation
_CLEARLY = 10**0.1  # one decibel: the uncertainty of so few images
_NOTHING = 1e-9  # points of the metric: possible rounding error of a subtraction
_Sites = TypeVar("_Sites", bound=Collection[str])
_SESSIONS = 3  # sessions for each timed file
_STEPS = 1000  # steps of calibration sequences in which files with states run on their own states


@dataclass(frozen=True)
class _Trial:
    """A file with its measurements; `floats` is None for the float model."""

    floats: FloatSites | None
    layout: Layout
    predicted_ms: float
    file: Judged[Path, Verdict]


class Search:
    """Finds the front of one module.

    Args:
        builder: the builder of modules with some operators in float.
        folder: a folder for temporary files.
    """

    def __init__(self, builder: Builder, folder: Path) -> None:
        self.builder, self.folder = builder, folder
        self.config, self.data = config, data = builder.config, builder.data
        self.seen, held_out = splits(data, config)
        batches = data.image_batches(held_out, config.calibration.batch_size)
        module = builder.int8
        self.runtime = runtime_of(config, module, data)
        example = example_batch(config, data.inputs)
        self.judge = Judge(module.graph, example, batches, folder, self.runtime, "precision")
        opened = module.opened(builder.model)
        forced = Overrides(opened.graph, overrides_of(config)).forced_float
        sites = [str(node.meta.get("site", node.name)) for node in forced]
        self.layouts = Layouts(opened.graph, module.backend, sites)
        self.files: dict[str, Path] = {}
        self._losses: dict[int, dict[frozenset[str], float]] = {}

    def run(self) -> Precision:
        """Runs the search and returns the measured front."""
        costs, ends = self.costs()
        mixed = self.rounds(costs, ends)
        count = len(self.layouts.operators)
        trials = [self._trial((), INT8, costs), *mixed, self._trial(None, FLOAT, costs)]
        times = self.clock({trial.file.name: trial.file.made for trial in trials})
        points = [self._point(trial, times, ends, costs) for trial in trials]
        errors, steps = [trial.file.verdict.error or 0.0 for trial in trials], 0
        if self.data.states:
            free = [self._in_free_run(trial) for trial in trials]
            points = [
                replace(point, agreement=one.agreement, sqnr_db=one.sqnr_db)
                for point, one in zip(points, free, strict=True)
            ]
            errors = [0.0 if one.sqnr_db is None else 10 ** (-one.sqnr_db / 10) for one in free]
            steps = free[0].images
        shown = shown_points(points, errors)
        target, exact = aim(self.config, labelled=self.data.labelled), points[-1]

        def met(point: PrecisionPoint) -> bool:
            return meets(point, exact, target, self.data.task.names.main)

        number, note = decide(shown, met, target.min_speedup)
        note += "" if mixed else "; no mixture of int8 and float is predicted to be worthwhile"
        shown = [replace(point, chosen=point.number == number) for point in shown]
        return Precision(tuple(shown), count, len(trials), len(self.judge.wanted), note, steps)

    def costs(self) -> tuple[Costs, dict[str, float]]:
        """Returns the costs of operators and borders, and the milliseconds of the measured files by name."""
        operators = self.layouts.operators
        quarter = -(-len(operators) // 4)
        quarters = [operators[i : i + quarter] for i in range(0, len(operators), quarter)]
        sets = {INT8: (), FLOAT: operators, "even": operators[0::2], "odd": operators[1::2]}
        for name, chosen in (("quarters", quarters[0::2]), ("others", quarters[1::2])):
            sets[name] = tuple(one for part in chosen for one in part)
        ranking, third = self.ranking, len(operators) // 3
        for name, count in (("third", third), ("thirds", 2 * third)):
            sets[name] = tuple(one for one in operators if one in ranking[:count])
        sets = {
            name: floats for name, floats in sets.items() if name in (INT8, FLOAT) or self.mixtures([floats])
        }
        for name, floats in sets.items():
            path = self.files[name] = self.folder / f"{name}.onnx"
            if name == FLOAT:
                write_float_file(self.builder.model, self.config, self.data.inputs, path)
            else:
                self.builder.write(floats, path, calibrate=False)
        times = self.clock(self.files)
        seen = [self._measured(name, floats, times[name]) for name, floats in sets.items()]
        return Costs(seen, operators, self.layouts.sites), times

    def _measured(self, name: str, floats: Sequence[str], ms: float) -> Measured:
        kernels = site_kernels(
            self.files[name],
            self.layouts.sites,
            paths=paths_of(self.builder.model),
            options=self.builder.int8.backend.session_options,
            threads=self.config.verify.threads,
            input_shape=self.data.inputs.timed(self.config.verify.latency_batch),
        )
        return Measured(self.layouts(floats), kernels, ms)

    def rounds(self, costs: Costs, before: dict[str, float]) -> list[_Trial]:
        """Writes and measures the promising sets of float operators in two rounds, and returns the measured files.

        The latencies of the first round correct the predictions for the second.

        Args:
            costs: the costs, which are corrected by the measured latencies.
            before: the milliseconds of the int8 and the float file when the costs were measured.
        """
        ends, count = self.ends(costs), self.config.precision.points
        chosen, trials = list[Choice](), list[_Trial]()
        for wanted in (count - count // 2, count // 2):
            found = thinned(self.front(costs), ends, wanted, chosen) if wanted else []
            if not found:
                break
            made = [self._mixed(choice, f"mixed{len(chosen) + i}", costs) for i, choice in enumerate(found)]
            times = self.clock(
                {name: self.files[name] for name in (INT8, FLOAT, *(one.file.name for one in made))}
            )
            costs.learn(
                [(t.layout, times[t.file.name] / drift(costs.share(t.layout), times, before)) for t in made]
            )
            chosen, trials = chosen + found, trials + made
        return trials

    def ends(self, costs: Costs) -> tuple[Choice, Choice]:
        """Returns the int8 and the float model as choices."""
        cost = self.price(costs)
        int8, exact = (
            Choice(end, *cost(end)) for end in (frozenset[str](), frozenset(self.layouts.operators))
        )
        return int8, exact

    @property
    def ranking(self) -> list[str]:
        """The operators, the most sensitive first."""
        return sorted(self.layouts.operators, key=self.losses.of_operator, reverse=True)

    def front(self, costs: Costs) -> list[Choice]:
        """Returns the Pareto front over simulated loss and predicted latency, followed by the float model.

        Only two kinds of sets are simulated: those that are likely to be on the front by their estimated
        losses, and the k most sensitive operators for several k. The latter are added because estimates are
        least accurate if few operators are quantized.
        """
        ranking, cost, ends = self.ranking, self.price(costs), self.ends(costs)
        tops = self.mixtures(frozenset(ranking[:k]) for k in range(1, len(ranking)))
        rivals = thinned([Choice(top, *cost(top)) for top in tops], ends, _SIMULATED // 2)
        predicted = predicted_front(self.layouts.operators, cost, ranking)
        mixed = set(self.mixtures(choice.floats for choice in predicted))
        found = thinned([one for one in predicted if one.floats in mixed], ends, _SIMULATED - len(rivals))
        likely = self._simulated([*ends, *found, *rivals], _FIRST_LOOK)
        whole = ends[1].floats
        rivals = [one for one in likely if one.floats != whole]
        likely = [one for one in likely if not any(_clearly_beats(other, one) for other in rivals)]
        exact = self._simulated(likely, self.config.precision.images)
        return not_beaten_but_by(whole, exact)

    def mixtures(self, sets: Iterable[_Sites]) -> list[_Sites]:
        """Returns the sets with int8 and float operators; an operator may be float because its neighbours are."""
        count = len(self.layouts.operators)
        return [floats for floats in sets if 0 < len(self.layouts(floats).floats) < count]

    def _simulated(self, choices: Sequence[Choice], images: int) -> list[Choice]:
        """Returns the choices with losses simulated on `images` images; equal layouts are simulated once."""
        layouts = {choice.floats: self.layouts(choice.floats) for choice in choices}
        known = self._losses.setdefault(images, {})
        new = list({one.floats: one for one in layouts.values() if one.floats not in known}.values())
        losses = simulated_losses(
            self.builder.int8.graph,
            self.layouts,
            new,
            self._images(images),
            progress=self.config.trainer.progress,
        )
        known |= {layout.floats: loss for layout, loss in zip(new, losses, strict=True)}
        return [replace(choice, loss=known[layouts[choice.floats].floats]) for choice in choices]

    def price(self, costs: Costs) -> Callable[[frozenset[str]], tuple[float, float]]:
        """Returns a function that predicts the loss and milliseconds of a set."""

        def cost(floats: frozenset[str]) -> tuple[float, float]:
            layout = self.layouts(floats)
            return self.losses(layout), costs(layout)

        return cost

    @cached_property
    def losses(self) -> Losses:
        """The contributions of weights and tensors to the squared error of the outputs, by which files are judged."""
        config, graph = self.config, self.builder.int8.graph
        batches = self._images(config.precision.images)
        rows = estimate(graph, batches, of_outputs=True, seed=config.seed, progress=config.trainer.progress)
        return Losses(self.layouts, rows)

    def _images(self, count: int) -> Batches:
        return self.data.image_batches(self.seen[:count], self.config.calibration.batch_size)

    def clock(self, files: dict[str, Path]) -> dict[str, float]:
        """Returns the milliseconds of each file: the fastest of its runs, with all files in alternation."""
        asked = self.config.verify
        given = self.data.inputs.timed_by(asked.latency_batch)
        times = quickest(files, given, batch=asked.latency_batch, threads=asked.threads,
                         runs=math.ceil(asked.latency_runs / _SESSIONS), sessions=_SESSIONS,
                         options=self.builder.int8.backend.session_options)  # fmt: skip
        return {name: min(seen) for name, seen in times.items()}

    def _mixed(self, choice: Choice, name: str, costs: Costs) -> _Trial:
        return self._trial(tuple(one for one in self.layouts.operators if one in choice.floats), name, costs)

    def _trial(self, floats: FloatSites | None, name: str, costs: Costs) -> _Trial:
        layout = self.layouts(self.layouts.operators if floats is None else floats)
        file = judged(Entrant(name, partial(self._made, floats, name)), self._verdict)
        return _Trial(floats, layout, costs(layout), file)

    def _made(self, floats: FloatSites | None, name: str) -> Path:
        """Returns the file of a set; those of int8 and float have already been written for the costs."""
        if floats:
            self.files[name] = self.builder.write(floats, self.folder / f"{name}.onnx")
        return self.files[name]

    def _verdict(self, path: Path, name: str) -> Verdict:
        return self.judge.of_float() if name == FLOAT else self.judge.of_file(path, name)

    def _in_free_run(self, trial: _Trial) -> Fidelity:
        """Returns the distance from the float file if each file runs on its own states, as in verification.

        With the float file's states, errors that accumulate in the states would not be included.
        """
        return drift_of_files(
            (self.files[FLOAT], trial.file.made),
            self.data.states,
            self.data.calibration_sequences(_STEPS),
            self.data.task,
            threads=self.config.verify.threads,
            options=self.runtime.options,
        ).near

    def _point(
        self, trial: _Trial, times: dict[str, float], before: dict[str, float], costs: Costs
    ) -> PrecisionPoint:
        """Returns a measured point, with its prediction corrected for drift of the machine's speed."""
        name, verdict = trial.file.name, trial.file.verdict
        return PrecisionPoint(
            0,
            trial.floats,
            len(trial.layout.floats),
            trial.predicted_ms * drift(costs.share(trial.layout), times, before),
            times[name],
            times[FLOAT] / times[name],
            verdict.score,
            verdict.agreement,
            verdict.sqnr_db,
        )


def _clearly_beats(other: Choice, one: Choice) -> bool:
    return other.ms <= one.ms and other.loss * _CLEARLY < one.loss


def drift(share: float, times: dict[str, float], before: dict[str, float]) -> float:
    """Returns the factor by which a file has become slower since the costs were measured.

    The speed of a machine drifts over time; the factor is estimated from the int8 and the float file.

    Args:
        share: the share of the operators' time that is float.
        times, before: the times of the int8 and the float file, now and when the costs were measured.
    """
    return (1 - share) * times[INT8] / before[INT8] + share * times[FLOAT] / before[FLOAT]


def shown_points(points: Sequence[PrecisionPoint], errors: Sequence[float]) -> list[PrecisionPoint]:
    """Returns the Pareto front over latency and error with the points of int8 and float, numbered by latency."""
    priced = [pair for pair in zip(points, errors, strict=True) if pair[0].floats is not None]
    front = [point for point, _ in not_beaten(priced, lambda pair: (pair[1], pair[0].ms))]
    ends = [point for point in points if not point.floats]
    found = sorted({id(point): point for point in (*front, *ends)}.values(), key=lambda point: point.ms)
    return [replace(point, number=number) for number, point in enumerate(found)]


def meets(
    point: PrecisionPoint, exact: PrecisionPoint, target: TargetConfig, metric: Metric = NAMES.main
) -> bool:
    """Returns whether a point meets the accuracy target; `exact` is the float model's point."""
    drop = None if point.score is None or exact.score is None else metric.lost(exact.score, point.score)
    return keeps(target, drop, point.agreement, point.sqnr_db, slack=_NOTHING)
