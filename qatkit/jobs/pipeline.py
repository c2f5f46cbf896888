"""The main job, in the order in which its stages run; each has a file beside this one.

    float model → QATModule (fuse, stub, prepare_qat) → export once → algorithms on float activations
    → calibrate → algorithms on ranges (or all of them compete) → mixed precision (if asked for) → fine-tune
    → convert → export
    → analysis (if asked for) → verify → report

Every run has one folder. What it holds at the end is the bundle: model.int8.onnx, model.float.onnx,
model.json (preprocessing and classes), ranges.json (every quantized tensor's range), report.json, report.html,
config.yaml and last.ckpt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from pathlib import Path

import lightning
from torch import nn

from qatkit.choose.algorithms import chosen_algorithms, compete
from qatkit.choose.placement.measured import about_placement, check_placement, placed_before, placed_now
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.precision.mixed import check_precision, draw_precision, mix
from qatkit.choose.ranges import check_cache
from qatkit.config.rules import validate
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.encryption.vault import protected
from qatkit.jobs import by_mode, first_export
from qatkit.jobs.analyse import analyse, check_layers
from qatkit.jobs.calibrate import adjust, calibrate, correct, forget_partial
from qatkit.jobs.hand_over import check_hand_over
from qatkit.jobs.training import fine_tune, train_float
from qatkit.jobs.verify import Told, checks_of, conclude_module
from qatkit.quant.observers.base import with_other_ranks
from qatkit.records.run_files import CHECKPOINT_FILE, CONTROL_CHECKPOINT
from qatkit.records.tried import Tried
from qatkit.run.build import built, data_of, qat_module
from qatkit.run.export import check_weights, write_files
from qatkit.run.float_model import check_same, digests
from qatkit.run.folder import Run, check_images, folder_of, main_process, open_folder
from qatkit.run.lock import locked
from qatkit.run.loop.fit import keep_freed_memory
from qatkit.run.loop.ranks import wait_for_first
from qatkit.run.loop.teacher import teacher_of
from qatkit.run.resume import resumed_from
from qatkit.train.module import QATModule


@with_other_ranks(False)  # but in trainings: the first process does the rest for all
def train(config: Config, module_type: type[QATModule] = QATModule) -> int:
    """The whole chain. Returns 0, or 1 when the file falls short of a bound in `config.verify`, the first one or the
    finished one.

    Raises:
        ConfigError: anything that the user can put right, before any long work.
    """
    with begun(config) as (run, data, model):
        if config.export.mode != "static":
            return _by_mode(run, model, data)
        return _by_module(run, model, data, module_type)


def _by_module(run: Run, model: nn.Module, data: DataModule, module_type: type[QATModule]) -> int:
    """The chain of the docstring above, from the float model on."""
    teacher = teacher_of(run.config, data)
    begun_with = digests(run.config, model, teacher)
    check_same(run.config, run.folder, begun_with)
    run = placed_before(run, model, data.input_shape, module_type)
    build = partial(qat_module, run.config, model, data.input_shape, module_type)
    floats = chosen_floats(run.config, run.folder)
    module = build(algorithms=chosen_algorithms(run.config, run.folder), floats=floats)
    check_layers(module, run.config.analysis)
    check_precision(module, run.config)
    teach = None if teacher is None else methodcaller("learn_from", model, teacher)
    if teach is not None:
        teach(module)
    if not first_export.try_module(run, model, module, labelled=data.labelled):
        return 1
    open_folder(run)
    run = placed_now(run, model, data.input_shape, module)
    config = run.config
    build = partial(qat_module, config, model, data.input_shape, module_type)
    if config.schedule.float_epochs:
        train_float(run, model, data)
    wait_for_first(run.folder / CHECKPOINT_FILE)
    module = build(algorithms=chosen_algorithms(config, run.folder), floats=chosen_floats(config, run.folder))
    if config.algorithm_choice == "all":
        adjust(run, module, data)
    calibrated = calibrate(run, module, data)
    tried: list[Tried] = []
    if config.algorithm_choice == "auto":
        module, tried = compete(run, model, data, module, calibrated)
    else:
        correct(run, module, data)
    module, precision = mix(run, model, data, module, calibrated)
    module.about |= about_placement(run) | begun_with
    fine_tune(run, module, data, CHECKPOINT_FILE, "QAT", teach)
    forget_partial(run)
    control = None
    if config.verify.control:
        control = build(
            quantize=False,
            algorithms=chosen_algorithms(config, run.folder),
            floats=chosen_floats(config, run.folder),
        )
        fine_tune(run, control, data, CONTROL_CHECKPOINT, "float control", teach)
    if not main_process():
        return 0
    written = write_files(run, data, model, module)
    analysis = analyse(run, data, module, written)
    draw_precision(run, precision)
    return conclude_module(run, data, Told(written, module, calibrated, tried, analysis, precision), control)


@contextmanager
def begun(config: Config) -> Iterator[tuple[Run, DataModule, nn.Module]]:
    """What every run starts from, checked as far as it can be before anything long; nothing is written.

    Within, the run's folder is its own.

    Raises:
        ConfigError: anything that the user can put right.
    """
    validate(config)
    check_placement(config)
    check_weights(config)
    check_hand_over(config)
    keep_freed_memory()
    with protected(config.export.encrypt):
        folder = folder_of(config)
        with locked(folder) if main_process() else nullcontext():
            yield _start(config, folder)


def _start(config: Config, folder: Path) -> tuple[Run, DataModule, nn.Module]:
    run = Run(config, folder, notes=resumed_from(folder, config))
    lightning.seed_everything(config.seed, verbose=False)
    data = data_of(config)
    check_images(config, folder, data.fingerprint)
    checks_of(config, labelled=data.labelled)
    if not (run.folder / CHECKPOINT_FILE).is_file():
        check_cache(data, config)
    return run, data, built(config, data)


def _by_mode(run: Run, model: nn.Module, data: DataModule) -> int:
    """The float model through one of the modes of `qatkit.export.ort_modes`: nothing is simulated."""
    if not first_export.try_mode(run, model, data.input_shape, labelled=data.labelled):
        return 1
    open_folder(run)
    if run.config.schedule.float_epochs:
        train_float(run, model, data)
    return by_mode.from_model(run, model, data) if main_process() else 0
