"""The main job, one function a stage, in the order in which they run.

    float model → QATModule (fuse, stub, prepare_qat) → export once → calibrate
    → algorithms (if asked for) → fine-tune → convert → export → verify → report

Every run has one folder. What it holds at the end is the bundle: model.int8.onnx, model.float.onnx,
model.json (preprocessing and classes), ranges.json (every quantized tensor's range), report.json, report.html,
config.yaml and last.ckpt.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import lightning
import torch
from torch import Tensor, fx, nn

from qatkit import models, report
from qatkit.algorithms.base import CALIBRATED, algorithms_of
from qatkit.bundle import (
    BUNDLE,
    CHECKPOINT_FILE,
    CONFIG_FILE,
    CONTROL_CHECKPOINT,
    FLOAT_CHECKPOINT,
    FLOAT_FILE,
    INT8_FILE,
    RANGES_FILE,
    REPORT_FILE,
    TABLE_FILE,
    write_model_json,
)
from qatkit.calibration.cache import table as calibration_ranges
from qatkit.classifier import FloatModule
from qatkit.config.compose import load_config
from qatkit.config.dotted import resolve
from qatkit.config.limits import validate
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.errors import ConfigError
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.tensorrt_table import split_parts, tensorrt_table
from qatkit.files import write_text
from qatkit.module import QATModule
from qatkit.progress import shown
from qatkit.run import quantize_file
from qatkit.run.calibrate import LEAST_IMAGES, Calibrated, calibrate_module, check_cache
from qatkit.run.export import (
    check_integer_ends,
    example_batch,
    finish_file,
    try_export,
    write_file,
    write_float_file,
)
from qatkit.run.find import output_dir
from qatkit.run.fit import fit, processes
from qatkit.run.folder import (
    Run,
    backend_of,
    folder_of,
    main_process,
    open_folder,
    read_checkpoint,
    say,
)
from qatkit.run.quantizers import quantizers_of
from qatkit.run.verify import checks_of, conclude
from qatkit.verify.accuracy import predictor
from qatkit.verify.audit import audit
from qatkit.verify.checks.audit import audit_line
from qatkit.verify.checks.base import Subject
from qatkit.verify.results import Results


def train(config: Config, module_type: type[QATModule] = QATModule) -> int:
    """The whole chain. Returns 0, or 1 when the file falls short of a bound in `config.verify`.

    Raises:
        ConfigError: anything that the user can put right, before any long work.
    """
    validate(config)
    checks_of(config)
    run = Run(config, folder_of(config))
    lightning.seed_everything(config.seed, verbose=False)
    data = _data(config)
    if not (run.folder / CHECKPOINT_FILE).is_file():
        check_cache(data, config)
    model = models.build(config.model, data.num_classes)
    _check_run(model, config, data.input_shape)
    if config.export.mode != "static":
        return _by_mode(run, model, data)
    module = _qat_module(config, model, data.input_shape, module_type)
    with run.stage("export_first", "exporting once, before anything long runs"):
        try_export(module, config)
    open_folder(run)
    if config.schedule.float_epochs:
        _train_float(run, model, data)
        module = _qat_module(config, model, data.input_shape, module_type)
    calibrated = _calibrate(run, module, data)
    _correct(run, module, data)
    _fine_tune(run, module, data, CHECKPOINT_FILE, "QAT")
    control = None
    if config.verify.control:
        control = _qat_module(config, model, data.input_shape, module_type, quantize=False)
        _fine_tune(run, control, data, CONTROL_CHECKPOINT, "float control")
    if not main_process():
        return 0
    return _finish(run, data, model, module, control, calibrated)


def _by_mode(run: Run, model: nn.Module, data: DataModule) -> int:
    """The float model through one of the modes of `qatkit.export.ort_modes`: nothing is simulated."""
    with run.stage("export_first"), tempfile.TemporaryDirectory() as folder:
        source, shape = Path(folder) / FLOAT_FILE, data.input_shape
        write_float_file(model, run.config, shape, source)
        quantize_file.make(
            run.config, source, Path(folder) / INT8_FILE, tuple(example_batch(run.config, shape).shape)
        )
    open_folder(run)
    if run.config.schedule.float_epochs:
        _train_float(run, model, data)
    return quantize_file.from_model(run, model, data) if main_process() else 0


def export(config: Config) -> int:
    """Writes the ONNX file of `config.checkpoint` again; the same checkpoint gives the same bytes.

    Raises:
        ConfigError: settings that do not fit the checkpoint or the run in its folder; nothing is written.
    """
    assert config.checkpoint is not None
    if config.export.mode != "static":
        allowed = "static: a checkpoint is exported as QDQ; onnx=model.float.onnx takes mode=MODE"
        raise ConfigError("export.mode", config.export.mode, allowed)
    folder = output_dir(config)
    _check_neighbours(config, folder)
    module = _restored(config, config.checkpoint)
    shape = tuple(module.example.shape[1:])
    data = None
    if config.export.io == "uint8":
        check_integer_ends(module)
        data = _data(config)
        if data.input_shape != shape:
            allowed = f"the {shape[-1]} pixels of the checkpoint's images, {shape[0]} channels"
            raise ConfigError("data.image_size", list(data.input_shape), allowed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INT8_FILE
    say(f"exporting {path}")
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        new = Path(unfinished) / INT8_FILE
        write_file(module.convert().graph, config, shape, new)
        if data is not None:
            about = finish_file(new, config, data)
            write_model_json(folder, about)
        new.replace(path)
    found = audit(path, options=module.backend.session_options, threads=config.verify.threads,
                  allow_float=[site for site, _ in module.skipped],
                  for_onnxruntime=module.backend.for_onnxruntime)  # fmt: skip
    record = report.file_records(folder, [INT8_FILE])[0]
    say(audit_line(found))
    for problem in found.problems:
        say(f"  problem: {problem}")
    say(f"{path}  {record.bytes / 1e6:.2f} MB  sha256 {record.sha256}")
    return 0 if found.ok or not config.verify.audit else 1


def _restored(config: Config, checkpoint: str) -> QATModule:
    """The module that a checkpoint was written from."""
    stored = read_checkpoint(checkpoint)
    shape = tuple(stored["qatkit"]["input_shape"])
    blank = replace(config.model, weights=None, checkpoint=None, num_classes=stored["qatkit"]["num_classes"])
    module = _qat_module(config, models.build(blank), shape, QATModule)
    try:
        module.load_state_dict(stored["state_dict"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError("checkpoint", checkpoint, f"does not fit its config.yaml ({reason})") from error
    return module


def _check_neighbours(config: Config, folder: Path) -> None:
    """A finished run's report speaks of its own file: a file of other settings belongs elsewhere."""
    if not (folder / REPORT_FILE).exists() or not (folder / CONFIG_FILE).is_file():
        return
    reported = load_config(folder / CONFIG_FILE).export
    for name, value in asdict(config.export).items():
        if value != getattr(reported, name):
            allowed = f"{getattr(reported, name)} in {folder}, whose report tells of such a file; or another output_dir"
            raise ConfigError(f"export.{name}", value, allowed)


def _data(config: Config) -> DataModule:
    source = resolve(config.data.source, "data.source")
    data = DataModule(config.data, source, config.seed, models.weights_preprocessing(config.model))
    if config.schedule.epochs or config.schedule.float_epochs:
        data.batches_per_epoch(processes(config.trainer))  # at least one
    if config.export.mode == "static":
        least = LEAST_IMAGES if config.calibration.search == "tournament" else 1
        data.check_calibration(config.calibration.images, config.calibration.batch_size, least)
    return data


def _check_run(model: nn.Module, config: Config, shape: tuple[int, ...]) -> None:
    """The model takes the images as the data have them."""
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()(example_batch(config, shape))
    except Exception as error:  # whatever a forward raises
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        allowed = f"a model of images [N, {', '.join(map(str, shape))}], as data.* makes them ({reason})"
        raise ConfigError("model.name", config.model.name, allowed) from error
    for module in training:
        module.training = True


def _train_float(run: Run, model: nn.Module, data: DataModule) -> None:
    """Trains the model that is quantized later, in place."""
    config = run.config
    module = FloatModule(model, config.schedule)
    path = run.folder / FLOAT_CHECKPOINT
    with run.stage("float_training", f"training the float model{_from(path)}"):
        fit(module, data, path, config.trainer,
            epochs=config.schedule.float_epochs, title="float")  # fmt: skip
    model.cpu().eval()


def _from(checkpoint: Path) -> str:
    return f", from {checkpoint.name}" if checkpoint.is_file() else ""


def _qat_module(
    config: Config,
    model: nn.Module,
    shape: tuple[int, ...],
    module_type: type[QATModule],
    *,
    quantize: bool = True,
) -> QATModule:
    return module_type(
        model,
        _example(shape),
        config.schedule,
        backend_of(config),
        config.backend.overrides,
        quantizers_of(config),
        algorithms=list(algorithms_of(config.algorithm).values()),
        quantize=quantize,
    )


def _example(shape: tuple[int, ...]) -> Tensor:
    """Two images of noise: enough for shapes, and a batch that the exporter won't take for a constant."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def _calibrate(run: Run, module: QATModule, data: DataModule) -> Calibrated:
    path = run.folder / CHECKPOINT_FILE
    if path.is_file():  # the ranges are in the checkpoint
        found = Calibrated.from_dict(read_checkpoint(str(path), "resume")["qatkit"].get("calibrated", {}))
    else:
        with run.stage("calibration", "calibrating"):
            found = calibrate_module(module, data, run.config, example_batch(run.config, data.input_shape))
    module.about["calibrated"] = asdict(found)
    return found


def _correct(run: Run, module: QATModule, data: DataModule) -> None:
    """The algorithms that come after calibration, each on as many of the calibration images as it wants."""
    if (run.folder / CHECKPOINT_FILE).is_file():
        return  # what they changed is in the checkpoint
    for name, algorithm in algorithms_of(run.config.algorithm).items():
        if algorithm.stage != CALIBRATED:
            continue
        indices = data.calibration_indices(algorithm.images, f"algorithm.{name}.images")
        batches, title = (
            data.image_batches(indices, run.config.calibration.batch_size),
            name.replace("_", " "),
        )
        with run.stage(name, title):
            seen = shown(batches, title, run.config.trainer.progress)
            module.correct((images for images, _ in seen), [algorithm])


def _fine_tune(run: Run, module: QATModule, data: DataModule, checkpoint: str, title: str) -> None:
    """Lightning's Trainer over the QAT schedule; with no epochs, only the checkpoint is written."""
    config, path = run.config, run.folder / checkpoint
    lightning.seed_everything(config.seed, verbose=False)
    module.about |= {"input_shape": list(data.input_shape), "num_classes": data.num_classes}
    with run.stage(
        title.replace(" ", "_"), f"fine-tuning: {title}{_from(path)}" if config.schedule.epochs else ""
    ):
        fit(module, data, path, config.trainer, epochs=config.schedule.epochs,
            max_steps=config.schedule.max_steps, title=title)  # fmt: skip
    module.cpu().eval()
    module.ready_to_convert()


def _finish(
    run: Run,
    data: DataModule,
    model: nn.Module,
    module: QATModule,
    control: QATModule | None,
    calibrated: Calibrated,
) -> int:
    """Convert, export, verify, report."""
    config, folder = run.config, run.folder
    converted = module.convert()
    with run.stage("export", "exporting"):
        write_file(converted.graph, config, data.input_shape, folder / INT8_FILE)
        write_float_file(model, config, data.input_shape, folder / FLOAT_FILE)
        about = finish_file(folder / INT8_FILE, config, data)
    write_model_json(folder, about)
    ranges = calibration_ranges(module.graph)
    write_text(folder / RANGES_FILE, json.dumps(ranges, indent=1) + "\n")
    extra, notes = [], calibrated.notes
    if config.export.tensorrt_table is not None:
        parts = split_parts(module.graph.graph)
        table, missing = tensorrt_table(folder / FLOAT_FILE, ranges, config.export.tensorrt_table, parts)
        write_text(folder / TABLE_FILE, table)
        extra.append(TABLE_FILE)
        if missing:
            notes = (*notes, f"{TABLE_FILE} lacks {', '.join(missing)}: {FLOAT_FILE} has no such tensor")
    told = Results(
        config.name,
        config.model.name,
        str(folder),
        skipped=tuple(module.skipped + converted.skipped + module.notes),
        calibration=calibrated.candidates,
        notes=notes,
        preprocessing=data.preprocessing.as_dict(),
        config=asdict(config),
    )
    subject = _subject(run, data, module, converted.graph, control)
    return conclude(run, subject, told, [*BUNDLE, *extra, CHECKPOINT_FILE, CONFIG_FILE])


def _subject(
    run: Run, data: DataModule, module: QATModule, converted: fx.GraphModule, control: QATModule | None
) -> Subject:
    """What is checked: the files, and beside them the simulation, the converted module and the control."""
    predictors = {"simulated": predictor(module.graph)}
    if control is not None:
        predictors["control"] = predictor(control.graph)
    return Subject(
        folder=run.folder,
        files={"float": run.folder / FLOAT_FILE, "int8": run.folder / INT8_FILE},
        batches=data.test_batches,
        input_shape=data.input_shape,
        settings=run.config.verify,
        options=module.backend.session_options,
        predictors=predictors,
        reference=ConvertedReference(converted),
        allow_float=[site for site, _ in module.skipped],
        for_onnxruntime=module.backend.for_onnxruntime,
        progress=run.config.trainer.progress,
    )
