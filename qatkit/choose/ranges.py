"""The calibration stage of a run: reads a cache if there is one, else observes images and chooses a method.

calibration.search   none         the observer's own method
                     layerwise    for each tensor min-max or the percentile with the least error at the outputs of
                                  the operators that read it
                     tournament   the best of several methods, by whole models in ONNX Runtime
                                  (`qatkit.choose.tournament`)
calibration.cache    statistics and ranges in a file: the next run makes no forward pass
calibration.random   noise instead of images, with a warning
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.algorithms.shifted_means import take_back
from qatkit.calibration import cache as statistics
from qatkit.calibration.candidates import METHODS, apply, best_of_each, candidates, output_errors
from qatkit.calibration.checks import Watch
from qatkit.calibration.mixed_scales import SAMPLE
from qatkit.choose.judge import Runtime, judging_options
from qatkit.choose.tournament import SCORING_IMAGES, scoring_images, tournament, use
from qatkit.config.schema import CalibrationConfig, Config
from qatkit.data import DataModule
from qatkit.data.image_loader import ImageLoader
from qatkit.data.inputs import Batch
from qatkit.graph.quantizers import clip_weights, fake_quantizers
from qatkit.graph.signature import Example
from qatkit.progress import shown
from qatkit.quant.qat_layers import QATOperator
from qatkit.records.scores import with_score
from qatkit.records.tried import Candidate
from qatkit.run.backend import backend_of
from qatkit.run.build import holds_out
from qatkit.run.encodings import digest_of_encodings, fix_encodings
from qatkit.run.folder import say
from qatkit.train.module import QATModule
from qatkit.warning import warn
from qatkit_verify.errors import counted
from qatkit_verify.fitting import LEVELS
from qatkit_verify.placement.sites import FloatSites, read_float_sites

# Weights with at most this number of quantization levels lose accuracy if their largest value limits the
# range (decision 13).
_NARROW = 64
# One in this number of images is held out to choose between the methods.
_HELD_OUT = 4
_RANDOM = (
    "calibrated on random noise (calibration.random=true): ranges fit no real data, and accuracy on real data"
    " will suffer; calibrate on a few hundred samples of your own"
)


@dataclass(frozen=True)
class Calibrated:
    """The outcome of a calibration.

    Attributes:
        notes: notes for the report.
        candidates: the methods that a tournament compared; () if there was none.
        floats: the sites of operators that stay float, since a single scale does not suit values of such
            different sizes.
        shifts: the shift of each channel that the bias compensates, by site.
    """

    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    floats: FloatSites = ()
    shifts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Calibrated:
        """Rebuilds the result from `dataclasses.asdict`, for checkpoints and caches."""
        rows = tuple(Candidate(**with_score(row)) for row in stored.get("candidates", ()))
        floats = read_float_sites(stored.get("floats", ()))
        return cls(tuple(stored.get("notes", ())), rows, floats, stored.get("shifts", {}))

    @property
    def method(self) -> str | None:
        """The method that a tournament has chosen; None if there was no tournament."""
        return next((row.method for row in self.candidates if row.chosen), None)


def calibrate_module(
    module: QATModule,
    data: DataModule,
    config: Config,
    example: Example,
    method: str | None = None,
    folder: Path | None = None,
) -> Calibrated:
    """Sets the activation ranges of `module`; returns notes and choices.

    Args:
        module: the prepared module.
        data: the data of the run.
        config: the configuration of the run.
        example: the example input, as in `export_onnx`.
        method: the method that an earlier tournament chose for a variant of the same model; it replaces a
            tournament.
        folder: the folder in which a tournament leaves its template for another judge of the model; None: it is
            not kept.

    Raises:
        ConfigError: the cache is damaged or belongs to another model, other data or other settings, there are no
            images, activations are not finite, or given encodings do not fit.
    """
    path = None if config.calibration.cache is None else Path(config.calibration.cache)
    graph = module.graph
    if config.calibration.weights != "max":
        clip_weights(graph, 256 if config.calibration.weights == "mse" else _NARROW)
    notes = fix_encodings(module, config)
    for note in notes if method is None else ():
        say(note)
    if path is None:
        found = _observe(module, data, config, example, method, folder)
        return replace(found, notes=(*notes, *found.notes))
    key = {"model": statistics.of_model(graph), **_key(data, config)}
    if path.exists():
        found = Calibrated.from_dict(statistics.check(path, key)[0])
        if found.floats:
            module.leave_float(found.floats)
        statistics.restore(path, module.graph, key)
        for name, shift in found.shifts.items():
            take_back(cast(QATOperator, module.graph.get_submodule(name)), torch.tensor(shift))
        say(f"calibration: using the ranges from {path}")
        return found
    found = _observe(module, data, config, example, method, folder)
    found = replace(found, notes=(*notes, *found.notes))
    statistics.save(path, module.graph, key, asdict(found))
    return found


def check_cache(data: DataModule, config: Config) -> None:
    """Checks, before the long stages, that an existing cache belongs to these data and settings.

    The model is checked later.

    Raises:
        ConfigError: the cache is damaged, or belongs to other data or settings.
    """
    path = config.calibration.cache
    if path is not None and Path(path).exists():
        statistics.check(Path(path), _key(data, config))


def _key(data: DataModule, config: Config) -> statistics.Key:
    """Returns the key of the statistics without the model: the images, their preprocessing, and the settings."""
    chosen = config.calibration
    if chosen.random:
        images = data.of_pictures and data.preprocessing.pixels == LEVELS
        kind = [data.preprocessing.as_dict()] if images else []
        of_data = statistics.fingerprint("random", config.seed, data.inputs.shape, *kind)
    else:
        indices = data.calibration_indices(chosen.images)
        first, _ = next(iter(data.image_batches(indices[:SCORING_IMAGES], SCORING_IMAGES)))
        of_data = statistics.fingerprint(config.data.source, indices, data.digests(indices), first)
    settings = {f"calibration.{k}": str(v) for k, v in asdict(chosen).items() if k != "cache"}
    if config.algorithm_choice == "auto":
        settings["algorithm_choice"] = "auto"  # this setting holds images out
    if config.precision.search == "auto":
        settings["precision.search"] = "auto"  # and so does this one
    return {"data": of_data, "backend": backend_of(config).name} | settings | digest_of_encodings(config)


def splits(data: DataModule, config: Config) -> tuple[list[int], list[int]]:
    """Returns the indices of the images to observe, and of those held out (none if no candidates are compared)."""
    indices = data.calibration_indices(config.calibration.images)
    if not holds_out(config):
        return indices, []
    seen = [index for i, index in enumerate(indices) if i % _HELD_OUT != _HELD_OUT - 1]
    return seen, indices[_HELD_OUT - 1 :: _HELD_OUT]


def runtime_of(config: Config, module: QATModule, data: DataModule) -> Runtime:
    """Returns the settings with which the compared files are exported and run."""
    options, threads = judging_options(module), config.verify.threads
    return Runtime(config.export, options, threads, config.trainer.progress, data.labelled, data.task)


def _observe(
    module: QATModule,
    data: DataModule,
    config: Config,
    example: Example,
    method: str | None,
    folder: Path | None,
) -> Calibrated:
    chosen, progress = config.calibration, config.trainer.progress
    if chosen.random:
        warn(_RANDOM)
        module.mixed_scales = module.mean_shifts = "report"  # noise has no information on them either
        noise = shown(_noise(data, chosen, config.seed), "calibrating on noise", progress)
        module.calibrate(images for images, _ in noise)
        return Calibrated((_RANDOM,))
    indices, held_out = splits(data, config)
    if not fake_quantizers(module.graph):  # without ranges, the shifts of means need only a few images
        indices = indices[:SAMPLE]
    batches = data.image_batches(indices, chosen.batch_size)
    watch = Watch(module.graph, len(indices), data.classes, data.task.names.samples)
    module.calibrate(watch(shown(batches, "calibrating", progress)))
    graph = module.graph  # the graph differs if operators stay float
    ranges = fake_quantizers(module.graph)
    notes = (*(watch.notes() if ranges else ()), *_about_scales(module), *_about_shifts(module))
    shifts = {one.site: one.shift for one in module.shifted} if module.mean_shifts == "correct" else {}
    found = Calibrated(notes, floats=tuple(module.floats), shifts=shifts)
    for note in found.notes if method is None else ():  # the same images have already caused this warning
        warn(note)
    if not ranges:
        return found
    if chosen.search == "layerwise":
        _layerwise(graph, batches, progress)
    if method is not None:
        use(graph, method, batches, progress)
    elif chosen.search == "tournament":
        runtime = runtime_of(config, module, data)
        judges = data.image_batches(held_out, chosen.batch_size)
        rows = tournament(graph, example, batches, judges, runtime, folder)
        found = replace(found, candidates=tuple(rows))
    return found


def _about_scales(module: QATModule) -> list[str]:
    """Returns a line for each tensor that a single scale does not suit, with the operators that stay float for it."""
    lines = []
    for one in module.mixed:
        floats = [name for name in one.floats if name in module.floats]
        done = f"now in float: {', '.join(floats)}" if floats else "it was left unchanged"
        lines.append(f"calibration: one 8-bit scale cannot represent {one} ({done})")
    return lines


def _about_shifts(module: QATModule) -> list[str]:
    """Returns a line about operators whose mean output shifts because weights are rounded; [] if there are none."""
    if not module.shifted:
        return []
    worst = min(module.shifted, key=lambda one: one.before_db)
    done = "the biases were " + ("corrected" if module.mean_shifts == "correct" else "not corrected")
    operators = counted(len(module.shifted), "operator")
    return [
        f"calibration: rounded weights shift the output means of {operators} (worst: {worst.site}, SQNR"
        f" {worst.before_db:.1f} dB, {worst.after_db:.1f} dB without the shift); {done}"
    ]


def _layerwise(graph: fx.GraphModule, batches: ImageLoader, progress: bool) -> None:
    """Sets the range of each tensor to min-max or a percentile, by the error at the outputs of its readers."""
    offered = candidates(graph, {k: m for k, m in METHODS.items() if k == "min-max" or "percentile" in k})
    apply(graph, best_of_each(offered, output_errors(graph, offered, scoring_images(batches, progress))))


def _noise(data: DataModule, config: CalibrationConfig, seed: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yields batches of noise, drawn by `Preprocessing` or the inputs, with meaningless labels."""
    generator = torch.Generator().manual_seed(seed)
    draw = data.preprocessing.noise if data.of_pictures else data.inputs.noise
    for start in range(0, config.images, config.batch_size):
        count = min(config.batch_size, config.images - start)
        yield draw(count, generator), torch.zeros(count, dtype=torch.int64)
