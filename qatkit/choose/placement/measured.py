"""Applies placement=measured or a placement file to a run before its long stages."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qatkit.choose.placement.tournament import Tournament, digest, with_sites
from qatkit.config.schema import Config
from qatkit.data.inputs import Inputs
from qatkit.graph.captured import Captured
from qatkit.graph.nodes import site
from qatkit.records.run_files import PLACEMENT_FILE
from qatkit.report.placement import chosen_line
from qatkit.run.backend import backend_of
from qatkit.run.build import qat_module
from qatkit.run.folder import Run, main_process, say
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError, as_typed
from qatkit_verify.placement.machine import this_machine
from qatkit_verify.placement.record import Placed, check_fits, check_graph, read_placement, write_placement
from qatkit_verify.placement.sites import FIXED, MEASURED, Sites

_AGAIN = "a new run with placement=measured measures again; start it when the machine is idle"


def check_placement(config: Config) -> None:
    """Rejects settings that cannot be combined with `placement`, before the long stages.

    Raises:
        ConfigError: settings cannot be combined.
    """
    if config.placement == FIXED:
        return
    refused = {
        "export.mode": (config.export.mode, "static"),
        "backend.every_operator": (config.backend.every_operator, False),
    }
    for key, (value, needed) in refused.items():
        if value != needed:
            raise ConfigError(key, value, f"{as_typed(needed)} with placement={config.placement}")
    if config.rescue.climb and config.placement == MEASURED:
        allowed = "fixed or a placement.json with rescue=ladder, whose rungs would each measure again"
        raise ConfigError("placement", MEASURED, allowed)
    if backend_of(config).other_runtime:
        allowed = (
            f"fixed with backend.target={config.backend.target}, whose speed ONNX Runtime cannot measure"
        )
        raise ConfigError("placement", config.placement, allowed)


def placed_before(run: Run, model: Captured, inputs: Inputs, module_type: type[QATModule]) -> Run:
    """Returns the run with the placement of a placement file or, with placement=measured, the one in its folder.

    The run is returned unchanged with placement=fixed, or if no placement was measured yet.

    Args:
        run: the run.
        model: the float model.
        inputs: the inputs of the model.
        module_type: the class of the run's modules.

    Raises:
        ConfigError: the file is damaged, or belongs to another model or another graph.
    """
    config, there = run.config, run.folder / PLACEMENT_FILE
    if config.placement == FIXED:
        return run
    path = str(there) if config.placement == MEASURED else config.placement
    if config.placement == MEASURED and not there.is_file():
        return run
    placed = read_placement(path)
    check_fits(placed, config.model.name, backend_of(config).name, inputs.shape, path)
    graph = qat_module(config, model, inputs, module_type, algorithms=()).opened(model).graph
    check_graph(placed, digest(graph), [site(node) for node in graph.nodes], path)
    return _placed(run, placed)


def placed_now(run: Run, model: Captured, inputs: Inputs, module: QATModule) -> Run:
    """Returns the run with its placement, which is measured if the run has none, and stored in the run's folder.

    With placement=fixed, the run is returned unchanged.

    Args:
        run: the run.
        model: the float model.
        inputs: the inputs of the model.
        module: the module with the placement of the backend's table.
    """
    if run.config.placement == FIXED:
        return run
    path, placed = run.folder / PLACEMENT_FILE, run.placed
    if placed is None:
        with (
            run.stage("placement", "placement: measuring what is fastest on this machine"),
            tempfile.TemporaryDirectory() as folder,
        ):
            placed = Tournament(run.config, model, inputs, module, Path(folder)).run()
        run = _placed(run, placed)
    if main_process() and not path.is_file():
        write_placement(path, placed)
    say(f"placement: {chosen_line(placed)}")
    return run


def _placed(run: Run, placed: Placed) -> Run:
    """Returns the run with the overrides of a placement; if it is measured, min_speedup is 1 unless it is set."""
    config = with_sites(run.config, placed.sites)
    if config.placement == MEASURED and config.verify.min_speedup is None:
        config = replace(config, verify=replace(config.verify, min_speedup=1.0))
    differs = placed.machine.differs(this_machine(config.verify.threads, config.verify.latency_batch))
    notes = [f"placement: the measurement had {', '.join(differs)}"] if differs else []
    if placed.unrest():
        notes.append(f"placement: {placed.unrest()}; {_AGAIN}")
        say(notes[-1])
    return replace(run, config=config, asked=run.config, placed=placed, notes=(*run.notes, *notes))


def about_placement(run: Run) -> dict[str, object]:
    """Returns the checkpoint's entry for the placement; empty if the run has none."""
    if run.placed is None:
        return {}
    return {"placement": run.placed.sites.as_dict()}


def with_placement_of(config: Config, stored: Mapping[str, Any]) -> Config:
    """Returns the configuration of a checkpoint's module, including its placement.

    Args:
        config: the configuration of the run.
        stored: the entries of the run in the checkpoint.
    """
    return with_sites(config, Sites.from_dict(stored.get("placement", {"float": (), "int8": ()})))
