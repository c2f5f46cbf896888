"""The calibration stage of a run: from a cache if there is one, else a pass over the images and a choice.

calibration.search   none         the observer's own method
                     layerwise    for each tensor the percentile with the least error behind it
                     tournament   every method, as whole models in ONNX Runtime (`qatkit.tournament`)
calibration.cache    statistics and ranges in a file: the next run goes through no image
calibration.random   noise instead of images, said aloud
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.calibration import statistics
from qatkit.calibration.candidates import METHODS, apply, best_of_each, candidates, output_errors
from qatkit.calibration.checks import Watch
from qatkit.config import CalibrationConfig, Config, resolve
from qatkit.data import DataModule
from qatkit.data.loading import ImageLoader
from qatkit.errors import ConfigError
from qatkit.graph.prepare import clip_weights
from qatkit.module import QATModule
from qatkit.observers import HistogramObserver, Observer
from qatkit.progress import shown
from qatkit.report.results import Candidate
from qatkit.tournament import SCORING_IMAGES, Runtime, tournament

# Of so many images one is held out of the pass, to choose between the methods.
_HELD_OUT = 4
_RANDOM = (
    "calibrated on random noise (calibration.random=true): ranges fit no real image, and accuracy on real images"
    " will suffer; calibrate on a few hundred of your own"
)


@dataclass(frozen=True)
class Calibrated:
    """What there is to report: notes for the reader, and the methods that were compared."""

    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Calibrated:
        """The inverse of `dataclasses.asdict`, for checkpoints and caches."""
        rows = tuple(Candidate(**row) for row in stored.get("candidates", ()))
        return cls(tuple(stored.get("notes", ())), rows)


def observer_of(config: CalibrationConfig) -> Callable[[], Observer]:
    """What makes the observers, with those of the settings that it takes.

    Raises:
        ConfigError: a setting that it does not take, or one without a histogram where a search needs it.
    """
    make: Callable[..., Observer] = resolve(config.observer, "calibration.observer")
    settings = {"percentile": config.percentile, "deviations": config.deviations}
    given = {name: value for name, value in settings.items() if value is not None}
    taken = inspect.signature(make).parameters
    for name, value in given.items():
        if name not in taken:
            allowed = f"null with calibration.observer={config.observer}, which has no such setting"
            raise ConfigError(f"calibration.{name}", value, allowed)
    if config.search != "none" and not (inspect.isclass(make) and issubclass(make, HistogramObserver)):
        raise ConfigError(
            "calibration.observer",
            config.observer,
            f"one with a histogram, for calibration.search={config.search}",
        )
    if config.search == "tournament" and config.random:
        raise ConfigError(
            "calibration.random", True, "false with calibration.search=tournament: noise has no labels"
        )
    return functools.partial(make, **given)


def calibrate_module(module: QATModule, data: DataModule, config: Config, example: Tensor) -> Calibrated:
    """Gives `module` its activation ranges.

    Raises:
        ConfigError: a cache of something else, no images, or activations that are not finite.
    """
    path = None if config.calibration.cache is None else Path(config.calibration.cache)
    graph = cast(fx.GraphModule, module.graph)
    if config.calibration.weights == "mse":
        clip_weights(graph)
    key = None if path is None else _key(module, data, config)
    if path is not None and key is not None and path.exists():
        return Calibrated.from_dict(statistics.restore(path, graph, key))
    found = _observe(module, data, config, example)
    if path is not None and key is not None:
        statistics.save(path, graph, key, asdict(found))
    return found


def _key(module: QATModule, data: DataModule, config: Config) -> statistics.Key:
    """What the statistics depend on. Of the images the first few are looked at, and which ones they are."""
    chosen = config.calibration
    if chosen.random:
        of_data = statistics.fingerprint("random", config.seed, chosen.images, chosen.batch_size)
    else:
        indices = data.calibration_indices(chosen.images)
        first, _ = next(iter(data.image_batches(indices[:SCORING_IMAGES], SCORING_IMAGES)))
        of_data = statistics.fingerprint(config.data.source, indices, chosen.batch_size, first)
    method = {k: v for k, v in asdict(chosen).items() if k != "cache"}
    return {
        "model": statistics.of_model(cast(fx.GraphModule, module.graph)),
        "data": of_data,
        "method": statistics.fingerprint(method),
    }


def _observe(module: QATModule, data: DataModule, config: Config, example: Tensor) -> Calibrated:
    chosen, progress = config.calibration, config.trainer.progress
    if chosen.random:
        warnings.warn(_RANDOM, stacklevel=2)
        module.calibrate(_noise(data.input_shape, chosen, config.seed))
        return Calibrated((_RANDOM,))
    indices = data.calibration_indices(chosen.images)
    held_out: list[int] = []
    if chosen.search == "tournament":
        held_out = indices[_HELD_OUT - 1 :: _HELD_OUT]
        indices = [index for i, index in enumerate(indices) if i % _HELD_OUT != _HELD_OUT - 1]
        if not held_out:
            raise ConfigError("calibration.images", chosen.images, f"at least {_HELD_OUT} for a tournament")
    batches = data.image_batches(indices, chosen.batch_size)
    graph = cast(fx.GraphModule, module.graph)
    watch = Watch(graph, len(indices), data.classes)
    module.calibrate(watch(shown(batches, "calibrating", progress)))
    found = Calibrated(tuple(watch.notes()))
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    if chosen.search == "layerwise":
        _layerwise(graph, batches)
    if chosen.search == "tournament":
        runtime = Runtime(config.export, module.backend.session_options, config.verify.threads, progress)
        rows = tournament(
            graph, example, _images(batches), data.image_batches(held_out, chosen.batch_size), runtime
        )
        found = replace(found, candidates=tuple(rows))
    return found


def _layerwise(graph: fx.GraphModule, batches: ImageLoader) -> None:
    """For each tensor, of the percentiles, the one with the least error at the outputs behind it."""
    offered = candidates(graph, {k: m for k, m in METHODS.items() if k == "min-max" or "percentile" in k})
    few = (images[:SCORING_IMAGES] for images, _ in [next(iter(batches))])
    apply(graph, best_of_each(offered, output_errors(graph, offered, few)))


def _images(batches: ImageLoader) -> Iterator[Tensor]:
    return (images for images, _ in batches)


def _noise(shape: tuple[int, ...], config: CalibrationConfig, seed: int) -> Iterator[Tensor]:
    """Standard normal, as normalised pixels are on average."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, config.images, config.batch_size):
        count = min(config.batch_size, config.images - start)
        yield torch.randn(count, *shape, generator=generator)
