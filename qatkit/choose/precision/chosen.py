"""The float operators of a run's module, from a point of an earlier front or from the run's own search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qatkit.config.schema import Config
from qatkit.records.precision import Precision
from qatkit.records.run_files import REPORT_FILE
from qatkit_verify.classification import names_of
from qatkit_verify.errors import ConfigError
from qatkit_verify.placement.sites import FloatSites, read_float_sites
from qatkit_verify.untrusted import read_json


def chosen_floats(config: Config, stored: Mapping[str, Any] | None) -> FloatSites:
    """Returns the operators that stay float in addition to those of the overrides, in graph order.

    Args:
        config: the configuration of the run.
        stored: the entries of the run's checkpoint (`qatkit.run.folder.Run.stored`), which include the
            operators that the run chose; None if there is no checkpoint. Then they are those of the point
            that `precision` names, if any.

    Raises:
        ConfigError: the point does not exist or cannot be used (`floats_of_point`).
    """
    if stored is not None:
        return read_float_sites(stored.get("floats", ()))
    return () if config.precision.front is None else floats_of_point(config)


def floats_of_point(config: Config) -> FloatSites:
    """Returns the float operators of the point that the configuration names.

    Raises:
        ConfigError: the folder has no front or that of another model, or the point does not exist or is the
            float model.
    """
    asked = config.precision
    path = Path(str(asked.front)) / REPORT_FILE
    allowed = "a folder of a finished run with precision=auto, whose report.json has a front"
    try:
        report = read_json(path)
        front = Precision.from_dict(report["precision"], names_of(report).main)
        model = report["config"]["model"]["name"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("precision.front", asked.front, allowed) from error
    if model != config.model.name:
        raise ConfigError(
            "precision.front",
            asked.front,
            f"a folder with a front of {config.model.name}; its front is of {model}",
        )
    named = ", ".join(f"{one.number} ({one.name})" for one in front.points if one.floats is not None)
    found = next((one for one in front.points if one.number == asked.point), None)
    if found is None:
        raise ConfigError("precision.point", asked.point, f"one of the front's points: {named}")
    if found.floats is None:
        allowed = f"a point with int8 operators: {named}; point {found.number} is the float model"
        raise ConfigError("precision.point", asked.point, allowed)
    return found.floats
