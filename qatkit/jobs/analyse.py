"""The analysis stage of a run: whether weights or activations cost accuracy, in which layers, and at which tensors.

    isolation    on `analysis.images` test images: the float model, the model with only its weights, only its
                 activations, or both quantized, and the file
    sensitivity  the estimate; with sensitivity=exact, also the exact loss of the `analysis.top` most sensitive
                 weights and activations
    tensors      on `analysis.tensors` images: each tensor in float, in the simulation and in ONNX Runtime

The sums from which the exact losses are computed are stored in the run's folder after each batch, so that a
killed run can resume.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from qatkit.analysis.estimate import estimate
from qatkit.analysis.isolation import isolation
from qatkit.analysis.partial_sums import Kept, key_of
from qatkit.analysis.runtime_tensors import RuntimeTensors, compared_with_file
from qatkit.analysis.sensitivity import ranked, sensitivity
from qatkit.analysis.switches import Switch, switches
from qatkit.analysis.tensors import without_histograms
from qatkit.calibration.cache import fingerprint
from qatkit.config.schema import AnalysisConfig
from qatkit.data import DataModule
from qatkit.export.converted_reference import ConvertedReference
from qatkit.importing import ImportedModel
from qatkit.importing.tensor_names import pairs_in_file
from qatkit.jobs.stages import State
from qatkit.records.analysis import Analysis, Comparison, SensitivityRow
from qatkit.records.plan import Planned
from qatkit.records.run_files import PICTURES, SENSITIVITY_FILE
from qatkit.report.histograms import draw_histograms
from qatkit.report.pictures import draw
from qatkit.run.export import Written
from qatkit.run.folder import Run
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.train.module import QATModule
from qatkit.verify.divergence import IMAGES
from qatkit_verify.feeds import rows
from qatkit_verify.installed import install_extra
from qatkit_verify.session import fixed_batch, open_session, run_images


def check_layers(module: QATModule, asked: AnalysisConfig) -> None:
    """Checks, before the long stages, that every pattern of `analysis.layers` matches a layer.

    Raises:
        ConfigError: a pattern has no match; the message suggests similar names.
    """
    if is_asked(asked):
        switches(module.graph, asked.layers)


def is_asked(asked: AnalysisConfig) -> bool:
    """Returns whether any analysis is requested."""
    return asked.isolation or asked.sensitivity != "none" or asked.tensors > 0


def planned_analysis(state: State, pace: Pace) -> Sequence[Planned]:
    """Returns the row of the plan if an analysis is requested, else ().

    For the exact sensitivity, each weight or activation counts as one pass: it needs two passes of the operators
    after it, which are half of the graph on average.
    """
    asked = state.run.config.analysis
    if not is_asked(asked):
        return ()
    images = min(asked.images, state.data.test_count)
    sites = switches(state.prepared.graph, asked.layers)
    measured = len(sites) if asked.top is None else min(asked.top, len(sites))
    passes = {  # of the simulation
        "isolation": 4.0 if asked.isolation else 0.0,
        "estimate": 4.0 if asked.sensitivity != "none" else 0.0,
        f"{measured} {'site' if measured == 1 else 'sites'}": 1.0 + measured
        if asked.sensitivity == "exact"
        else 0.0,
    }
    told = [name for name, count in passes.items() if count]
    told += [f"tensors of {asked.tensors:,}"] if asked.tensors else []
    about = f"{images:,} {state.data.task.names.samples}: {', '.join(told)}"

    def seconds() -> float:
        one_by_one = asked.tensors * (pace.simulated + pace.file("unoptimized") + pace.file("converted"))
        file = pace.file("int8") if asked.isolation else 0.0
        loads = sum(count > 0 for count in passes.values()) * pace.load
        return images * (sum(passes.values()) * pace.simulated + file + loads) + one_by_one

    return (stage("analysis", about, seconds),)


def analyse(run: Run, data: DataModule, module: QATModule, written: Written) -> Analysis | None:
    """Runs the analyses; returns None if none is requested."""
    if not is_asked(run.config.analysis):
        return None
    with run.stage("analysis", "analysing what quantization does"):
        return _Stage(run, data, module, written).analysis()


class _Stage:
    """The analyses of a run, with the data that they share."""

    def __init__(self, run: Run, data: DataModule, module: QATModule, written: Written) -> None:
        self._run, self._data, self._module, self._written = run, data, module, written
        self._asked, self._progress = run.config.analysis, run.config.trainer.progress
        self._graph, self._file = module.graph, run.files / run.int8_name
        self._sites = switches(module.graph, self._asked.layers)
        self._seconds: dict[str, float] = {}

    def analysis(self) -> Analysis:
        asked, found = self._asked, Analysis(self._data.labelled)
        if asked.isolation:
            with self._timed("isolation"):
                found = replace(found, isolation=self._isolation())
        if asked.sensitivity != "none":
            with self._timed("estimate"):
                found = replace(found, estimate=self._estimate())
        if asked.sensitivity == "exact":
            with self._timed("sensitivity"):
                found = replace(found, sensitivity=self._exact(found.estimate))
        if asked.tensors:
            with self._timed("tensors"):
                found = replace(found, comparison=self._comparison(found))
        return replace(self._drawn(found), seconds=self._seconds)

    def _drawn(self, found: Analysis) -> Analysis:
        """Returns the analysis with PNG files of its pictures if requested, or with a note if matplotlib is missing."""
        if not self._asked.pictures:
            return found
        try:
            made = draw(self._run.folder / PICTURES, found)
        except ModuleNotFoundError:
            note = f"no PNG files: matplotlib is not installed; {install_extra('pictures')} installs it"
            return replace(found, notes=(*found.notes, note))
        return replace(found, pictures=[f"{PICTURES}/{name}" for name in made])

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[name] = round(time.monotonic() - start, 2)

    def _images(self) -> Any:
        return self._data.test_subset(self._asked.images, self._asked.batch_size)

    def _isolation(self) -> Any:
        session = open_session(
            self._file, threads=self._run.config.verify.threads, options=self._module.backend.session_options
        )
        return isolation(
            self._graph,
            self._images(),
            labelled=self._data.labelled,
            classes=self._data.classes,
            runtime=lambda images: run_images(session, images),
            progress=self._progress,
            task=self._data.task.names,
        )

    def _estimate(self) -> list[SensitivityRow]:
        seed = self._run.config.seed
        return estimate(self._graph, self._images(), at=self._sites, seed=seed, progress=self._progress)

    def _exact(self, estimated: Sequence[SensitivityRow]) -> list[SensitivityRow]:
        chosen = ranked(estimated)[: self._asked.top]
        names = {(row.site, row.kind) for row in chosen}
        at = [switch for switch in self._sites if (switch.site, switch.kind) in names]
        return sensitivity(
            self._graph,
            self._images(),
            labelled=self._data.labelled,
            at=at,
            kept=Kept(self._run.folder / SENSITIVITY_FILE, self._key(at)),
            progress=self._progress,
        )

    def _key(self, at: Sequence[Switch]) -> str:
        """Returns a key for stored sums, from the model with its ranges, the preprocessed images, and the settings."""
        first, _ = next(iter(self._data.test_subset(1, 1)))
        settings = asdict(self._run.config.data) | {"seed": self._run.config.seed}
        counted = (self._asked.images, self._asked.batch_size, [switch.key for switch in at])
        return key_of(self._graph, fingerprint(settings, first), counted)

    def _comparison(self, found: Analysis) -> Comparison:
        model = self._module.original
        runtime = RuntimeTensors(
            self._file,
            ConvertedReference(self._written.converted.graph),
            self._module.backend.session_options,
            self._run.config.verify.threads,
            pairs_in_file(model, self._graph, self._file) if isinstance(model, ImportedModel) else {},
        )
        fixed = fixed_batch(open_session(self._file, threads=1, optimize=False))
        size = self._data.rows(fixed or IMAGES)
        batches = [images for images, _ in self._data.test_subset(max(size, self._asked.tensors), size)]
        batches = [images for images in batches if fixed is None or size == 1 or rows(images) == size]
        compared = compared_with_file(self._graph, runtime, batches, self._sites)
        if self._asked.histograms:
            with self._timed("histograms"):
                compared = draw_histograms(self._run.folder, compared)
        return without_histograms(compared, shown_tensors(found, compared, self._asked.pictures))


def shown_tensors(found: Analysis, compared: Comparison, count: int) -> list[str]:
    """Returns the keys of the tensors whose histograms are shown, at most `count`.

    First comes the tensor whose scale causes the largest avoidable error (`Comparison.suspect`), if there is one,
    then the most sensitive ones, then the noisiest ones.
    """
    suspect = [compared.suspect] if compared.suspect else []
    sensitive = [f"{row.kind} {row.site}" for row in ranked(found.sensitivity or found.estimate)]
    noisiest = sorted(compared.rows, key=lambda row: 999.0 if row.own.sqnr is None else row.own.sqnr)
    keys = [*suspect, *sensitive[:count], *(f"{row.kind} {row.site}" for row in noisiest)]
    return list(dict.fromkeys(keys))[:count]
