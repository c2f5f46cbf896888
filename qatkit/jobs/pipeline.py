"""The main job: its stages in the order in which they run. Each stage is in a file of this folder.

    float model → QATModule (fuse, stub, prepare_qat) → export once → algorithms on float activations
    → calibrate → algorithms after calibration (with algorithm_choice=auto, all algorithms are tried here instead)
    → mixed precision (if requested) → fine-tune → convert → export
    → analysis (if requested) → verify → report

`STAGES` is the list (`qatkit.jobs.stages`).

Every run has one folder. With export.mode=static it finally contains model.int8.onnx, model.float.onnx,
model.json (preprocessing and classes), ranges.json (every quantized tensor's range), report.json, report.html,
config.yaml and last.ckpt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning
from torch import nn

from qatkit.choose.placement.measured import check_placement
from qatkit.choose.ranges import check_cache
from qatkit.config.rules import validate
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.encryption.vault import protected
from qatkit.jobs.accuracy_level import ChooseLevel
from qatkit.jobs.by_mode import ByMode
from qatkit.jobs.calibrate import Adjust, Calibrate, Correct
from qatkit.jobs.choices import Compete, Mix
from qatkit.jobs.decoder import CheckDecoder, WriteDecoder, check_settings
from qatkit.jobs.finish import Analyse, Export, Leave, Verify
from qatkit.jobs.first_export import FirstExport, FirstExportByMode
from qatkit.jobs.hand_over import check_hand_over
from qatkit.jobs.packed_weights import check_form
from qatkit.jobs.prepare import (
    Announce,
    Check,
    FirstProcess,
    KnownPlaces,
    Models,
    OpenFolder,
    Places,
    Prepare,
)
from qatkit.jobs.stages import Stage, begin, carry_out
from qatkit.jobs.training import Control, FineTune, TrainFloat
from qatkit.jobs.verify import checks_of
from qatkit.quant.observers.base import with_other_ranks
from qatkit.run.allocator import keep_freed_memory, return_freed_memory
from qatkit.run.build import data_of
from qatkit.run.build_model import built, naming_the_file
from qatkit.run.export import check_weights
from qatkit.run.float_average import warn_of_average
from qatkit.run.folder import Run, check_images, folder_of, main_process
from qatkit.run.lock import locked
from qatkit.run.resume import resumed_from
from qatkit.train.module import QATModule

LATER: Sequence[Stage] = (
    Places(),
    TrainFloat(),
    FirstProcess(),
    Prepare(),  # again if weights, placement or choices have changed
    Adjust(),
    Calibrate(),
    Correct(),
    Compete(),
    Mix(),
    FineTune(),
    Control(),
    Leave(),
    Export(),
    ChooseLevel(),
    WriteDecoder(),
    Analyse(),
    Verify(),
)
STAGES: Sequence[Stage] = (
    Models(),
    KnownPlaces(),
    Prepare(),
    Check(),
    CheckDecoder(),
    FirstExport(),
    OpenFolder(),
    Announce(LATER),
    *LATER,
)
LATER_BY_MODE: Sequence[Stage] = (TrainFloat(), Leave(), ByMode())
STAGES_BY_MODE: Sequence[Stage] = (
    FirstExportByMode(),
    OpenFolder(),
    Announce(LATER_BY_MODE),
    *LATER_BY_MODE,
)


@with_other_ranks(False)  # Outside of trainings, the first process works for all.
def train(config: Config, module_type: type[QATModule] = QATModule, *, notes: tuple[str, ...] = ()) -> int:
    """Runs all stages.

    Returns 0, or 1 if the first or the finished file misses a bound of `config.verify`, or if the bundle cannot be
    published.

    Args:
        config: the configuration of the run.
        module_type: the class of the modules.
        notes: notes on the configuration for the report.

    Raises:
        ConfigError: the user has made a mistake; this is raised before the long stages.
    """
    with begun(config, notes) as (run, data, model):
        stages = STAGES if config.export.mode == "static" else STAGES_BY_MODE
        return carry_out(stages, begin(run, data, model, module_type))


@contextmanager
def begun(config: Config, notes: tuple[str, ...] = ()) -> Iterator[tuple[Run, DataModule, nn.Module]]:
    """Yields the run, data and model of a job, checked as far as possible before the long stages; writes nothing.

    Within the context, the run's folder is locked.

    Raises:
        ConfigError: the user has made a mistake.
    """
    validate(config)
    check_placement(config)
    check_weights(config)
    check_settings(config)
    check_form(config)
    check_hand_over(config)
    with protected(config.export.encrypt):
        folder = folder_of(config)
        with locked(folder) if main_process() else nullcontext():
            run, data, model = _start(config, folder, notes)
            with naming_the_file(model):
                yield run, data, model


def _start(config: Config, folder: Path, notes: tuple[str, ...]) -> tuple[Run, DataModule, nn.Module]:
    run = Run(config, folder, notes=(*notes, *resumed_from(folder, config)))
    lightning.seed_everything(config.seed, verbose=False)
    data = data_of(config)
    keep_freed_memory(data.inputs.bytes)
    check_images(config, folder, data.fingerprint)
    checks_of(config, labelled=data.labelled)
    if run.stored() is None:
        check_cache(data, config)
    model = built(config, data)
    warn_of_average(config)
    if not (config.schedule.epochs or config.schedule.float_epochs):
        keep_freed_memory(data.inputs.bytes, sum(one.nbytes for one in model.parameters()))
    return_freed_memory()
    return run, data, model
