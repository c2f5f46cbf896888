"""Builds the observers and quantizers that a configuration names, and checks that they fit together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from qatkit.config.schema import CalibrationConfig, Config
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import HistogramObserver, Observer
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize
from qatkit.run.backend import backend_of
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError


def quantizers_of(config: Config) -> Quantizers:
    """Returns the quantizer classes and the factory of observers, for `prepare_qat`.

    Raises:
        ConfigError: a class is not derived from the required one or does not support the backend's weights or scale
            types, or `observer_of` raises it.
    """
    kinds = {"activation": FakeQuantize, "weight": WeightFakeQuantize}
    found, backend = {}, backend_of(config)
    for name, base in kinds.items():
        key, path = f"quantizer.{name}", getattr(config.quantizer, name)
        found[name] = resolve(path, key)
        if not (inspect.isclass(found[name]) and issubclass(found[name], base)):
            allowed = f"the dotted path of a class derived from {base.__module__}.{base.__name__}"
            raise ConfigError(key, path, allowed)
        asked = {"backend": config.backend.scale_type}
        asked |= {
            f"backend.overrides.{name}": one.scale_type for name, one in config.backend.overrides.items()
        }
        for place, kind in asked.items():
            if kind is not None and kind not in found[name].scale_types:
                raise ConfigError(key, path, f"a class that supports {place}.scale_type={kind}")
    found["weight"].check(backend.weight)
    return Quantizers(observer_of(config.calibration), **found)


def observer_of(config: CalibrationConfig) -> Callable[[], Observer]:
    """Returns the factory of the observers, with the settings that the observer class accepts.

    Raises:
        ConfigError: the class is no observer, does not accept a setting or needs another one; or `calibration.search`
            is used with a setting that it chooses itself, a class without a histogram, or random samples.
    """
    make: Callable[..., Observer] = resolve(config.observer, "calibration.observer")
    if not (inspect.isclass(make) and issubclass(make, Observer) and make.update is not Observer.update):
        allowed = (
            "the dotted path of a class derived from qatkit.quant.observers.Observer, with a method update"
        )
        raise ConfigError("calibration.observer", config.observer, allowed)
    settings = {"percentile": config.percentile, "deviations": config.deviations}
    given = {name: value for name, value in settings.items() if value is not None}
    taken = inspect.signature(make).parameters
    for name, value in given.items():
        if config.search != "none":
            allowed = f"null with calibration.search={config.search}, which tries its own values"
            raise ConfigError(f"calibration.{name}", value, allowed)
        if name not in taken:
            allowed = f"null with calibration.observer={config.observer}, which does not have this setting"
            raise ConfigError(f"calibration.{name}", value, allowed)
    missing = [p.name for p in taken.values() if p.default is p.empty and p.name not in given]
    if missing:
        allowed = f"an observer without required arguments; this class needs {', '.join(missing)}"
        raise ConfigError("calibration.observer", config.observer, allowed)
    if config.search != "none" and not issubclass(make, HistogramObserver):
        allowed = f"an observer with a histogram, for calibration.search={config.search}"
        raise ConfigError("calibration.observer", config.observer, allowed)
    if config.search != "none" and config.random:
        allowed = f"false with calibration.search={config.search}, which compares ranges on real samples"
        raise ConfigError("calibration.random", True, allowed)
    return functools.partial(make, **given)
