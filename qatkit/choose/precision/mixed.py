"""Chooses the operators that stay float: the fastest set for an accuracy target, or the most accurate for a speed-up.

    calibrated module ── estimate ──> the loss of each weight and tensor     ┐
    eight files ── profile, clock ──> the time of each operator and border   ├─ likely sets ── simulate ──> their losses
    placement ──> the quantized tensors and the borders of each set          ┘  front ── thinned ──> half of the files,
                                                                                whose times correct the predicted ones,
                                                                                and the other half: judged on unseen
                                                                                images, and timed in alternation

This is the stage of precision=auto. It runs after the algorithms, whose corrections are kept in int8
operators and removed from operators that become float. The choice is part of the checkpoint: a resumed run
and export.py build the module with it.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from qatkit.choose.contest import resumed
from qatkit.choose.precision.mixtures import Builder
from qatkit.choose.precision.search import Search
from qatkit.choose.ranges import Calibrated
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.graph.captured import Captured
from qatkit.quant.qat_layers import QATOperator
from qatkit.records.precision import Precision
from qatkit.records.run_files import PARTIAL, PICTURES
from qatkit.report.pictures import draw_front
from qatkit.run.backend import backend_of
from qatkit.run.folder import Run, say
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

_SEARCHED = f"precision{PARTIAL}"


def check_precision(module: QATModule, config: Config) -> None:
    """Checks, before the long stages, that there are operators to choose from and that ONNX Runtime runs the file.

    Raises:
        ConfigError: the backend is for another runtime, or fewer than two Convs and Linears are int8.
    """
    if config.precision.search == "none":
        return
    if backend_of(config).other_runtime:
        allowed = f"none with backend.target={config.backend.target}, whose speed ONNX Runtime cannot measure"
        raise ConfigError("precision.search", "auto", allowed)
    weighted = [
        m for m in module.graph.modules() if isinstance(m, QATOperator) and m.weight_fake_quant is not None
    ]
    if len(weighted) < 2:
        allowed = "none for a model with fewer than two Convs and Linears in int8"
        raise ConfigError("precision.search", "auto", allowed)


def mix(
    run: Run, model: Captured, data: DataModule, module: QATModule, calibrated: Calibrated
) -> tuple[QATModule, Precision]:
    """Returns the module of the chosen point, and the front from which it was chosen.

    Args:
        run: the run.
        model: the captured float model.
        data: the data of the run.
        module: the calibrated module with the corrections of all algorithms.
        calibrated: the results of its calibration.
    """
    partial = run.folder / _SEARCHED
    with run.stage("precision", "searching for a precision"), tempfile.TemporaryDirectory() as folder:
        builder = Builder(run.config, model, data, module, calibrated)
        found = resumed(partial, Search(builder, Path(folder)).run, Precision.from_dict, Precision.as_dict)
        say(f"precision: {found.chosen.name}, {found.note}")
        module = builder.module(found.chosen.floats or ())
    return module, found


def about_precision(found: Precision) -> dict[str, Any]:
    """Returns the checkpoint's entries for a search."""
    return {"floats": list(found.chosen.floats or ()), "precision": found.as_dict()}


def draw_precision(run: Run, found: Precision | None) -> None:
    """Draws the front as a PNG file if pictures are requested and possible; report.html always includes the front."""
    if found is not None and run.config.analysis.pictures:
        with suppress(ModuleNotFoundError):
            draw_front(run.folder / PICTURES, found)
