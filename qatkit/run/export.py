"""The export stage of a run: writes a graph as an ONNX file with the run's settings, and describes it in model.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import fx, nn

from qatkit import models
from qatkit.calibration.cache import table as calibration_ranges
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.data.inputs import ArrayInputs, Inputs
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.add_nms import add_nms
from qatkit.export.add_states import add_states
from qatkit.export.dequantized_blocks import as_dequantized_blocks
from qatkit.export.larger_file import why_larger
from qatkit.export.tensorrt_table import split_parts, tensorrt_table
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.format_modules import RoundToFormat
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.nodes import is_opaque
from qatkit.graph.pass_result import PassResult
from qatkit.graph.quantizers import fake_quantizers, quantized_operators
from qatkit.importing import ImportedModel
from qatkit.importing.write_back import write_back, write_given
from qatkit.importing.written_packed import is_packed
from qatkit.models import onnx_files
from qatkit.quant.spec import WHOLE, WIDE
from qatkit.records.detections import Suppression, nms_file
from qatkit.records.run_files import (
    BESIDE_INT8,
    FLOAT_FILE,
    RANGES_FILE,
    TABLE_FILE,
    model_json,
    write_model_json,
)
from qatkit.run.backend import backend_of
from qatkit.run.build import example_batch
from qatkit.run.folder import Run
from qatkit.run.quantizers import quantizers_of
from qatkit.tasks import task_of
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError, as_typed, counted
from qatkit_verify.files import write_text
from qatkit_verify.installed import ZERO_POINTS_OF_CHANNELS, version_numbers
from qatkit_verify.session import RUNTIME_VERSION, open_session, run_images
from qatkit_verify.stream import stream_file


@dataclass(frozen=True)
class Written:
    """The results of the export stage.

    Attributes:
        converted: the converted module that the file was written from.
        files: the names of the files in the run's folder.
        notes: notes for the report.
        level: the accuracy level of the file with its measurements; empty if level 0 was requested or the file has
            no products with packed weights.
    """

    converted: PassResult
    files: tuple[str, ...]
    notes: tuple[str, ...]
    level: Mapping[str, Any] = field(default_factory=dict)


DEQUANTIZE = "dequantize_linear"  # a value of export.packed_weights


def write_file(graph: nn.Module, config: Config, inputs: Inputs, path: Path) -> list[str]:
    """Writes the ONNX file of a converted or a float graph.

    A converted graph of an imported ONNX model is written by editing the imported file. A new file is written if
    an option needs it, or if the edited file cannot express the graph.

    Returns:
        Notes for the report: whether an imported file was not edited, which axes have a fixed size, and whether
        packed weights raised the opset.
    """
    notes = _written(graph, config, inputs, path)
    if config.export.packed_weights != DEQUANTIZE or not any(map(is_packed, graph.modules())):
        return notes
    return [*notes, *with_blocks(path)]


def with_blocks(path: Path) -> list[str]:
    """Rewrites a file's products with packed weights as blockwise DequantizeLinear and MatMul; returns notes."""
    opset = as_dequantized_blocks(path)
    if opset is None:
        return []
    return [f"{path.name} has opset {opset}, since export.packed_weights={DEQUANTIZE} needs it"]


def _written(graph: nn.Module, config: Config, inputs: Inputs, path: Path) -> list[str]:
    """Writes the file, in which products with packed weights are ONNX Runtime's own operator; returns notes."""
    notes = []
    fixed = _only_edited(graph, config)
    if config.model.name.startswith(onnx_files.PREFIX) and (fixed or _edits(graph, config)):
        try:
            write_back(cast(ImportedModel, models.build(config.model)), cast(fx.GraphModule, graph), path)
            return []
        except ConfigError as error:
            if fixed:
                raise
            notes.append(
                f"the INT8 file is a new export, since the given file could not be edited ({error.problem})"
            )
    _check_fixed_batch(config, inputs)
    example, wanted = example_batch(config, inputs), config.export
    not_free = export_onnx(
        graph,
        example,
        path,
        opset=wanted.opset,
        dynamic_batch=wanted.dynamic_batch,
        pack_int4=wanted.pack_int4,
        weights_for_amx=wanted.weights_for_amx,
        dequantize=wanted.packed_weights == DEQUANTIZE,
    )
    return [*notes, f"{path.name}: {not_free}"] if not_free else notes


def _check_fixed_batch(config: Config, inputs: Inputs) -> None:
    """Raises ConfigError for a fixed batch size if an input has its batch axis elsewhere than first."""
    if config.export.dynamic_batch or not isinstance(inputs, ArrayInputs):
        return
    for name, axis in inputs.axes.items():
        if axis not in (0, None):
            allowed = f"true, since the batch axis of '{name}' is {axis}, and a fixed batch size needs axis 0"
            raise ConfigError("export.dynamic_batch", False, allowed)


def _only_edited(graph: nn.Module, config: Config) -> bool:
    """Returns whether a graph can only be written by editing the imported file.

    This is so if torch cannot compute parts of it, which ONNX Runtime computes instead.

    Raises:
        ConfigError: an option requires a new file for such a graph.
    """
    path = next((path for path, module in graph.named_modules() if is_opaque(module)), None)
    if path is None:
        return False
    if any(isinstance(module, RoundToFormat) for module in graph.modules()):
        reason = f"its number formats need a new export, but only ONNX Runtime can compute '{path}'"
        reason += "; choose a backend with integers, such as backend=fbgemm"
        raise ConfigError("backend.target", config.backend.target, reason=reason)
    wanted = config.export
    options = {
        "pack_int4": (wanted.pack_int4, False),
        "weights_for_amx": (wanted.weights_for_amx, False),
        "dynamic_batch": (wanted.dynamic_batch, True),
    }
    for name, (given, allowed) in options.items():
        if given != allowed:
            key = f"export.{name}"
            reason = f"the setting needs a new export, but only ONNX Runtime can compute '{path}'"
            fix = f"set {key}={as_typed(allowed)} to edit the given file instead"
            raise ConfigError(key, given, reason=f"{reason}; {fix}")
    return True


def _edits(graph: nn.Module, config: Config) -> bool:
    """Returns whether a graph of an imported ONNX model is written by editing the imported file.

    This is so for a converted graph if no option requires a new file.
    """
    wanted = config.export
    new = wanted.pack_int4 or wanted.weights_for_amx or not wanted.dynamic_batch
    return not new and any(isinstance(module, Quantized) or is_packed(module) for module in graph.modules())


def write_float_file(model: nn.Module | Captured, config: Config, inputs: Inputs, path: Path) -> list[str]:
    """Writes the float file with which the INT8 file is compared: the float model, fused.

    For an imported ONNX model this is the imported file itself, unless the model was trained or has the weights of
    `model.checkpoint`. Returns notes as `write_file` does.
    """
    source = model.model if isinstance(model, Captured) else model
    as_given = not config.schedule.float_epochs and config.model.checkpoint is None
    if isinstance(source, ImportedModel) and as_given:
        write_given(source, path)
        return []
    if isinstance(model, Captured):  # a fixed batch size is traced with a batch of that size
        model = model.graph() if config.export.dynamic_batch else model.model
    return write_file(float_baseline(model, example_batch(config, inputs)), config, inputs, path)


def paths_of(model: nn.Module | Captured) -> dict[str, str]:
    """Returns the sites of an imported file's nodes by node name (`ImportedModel.paths`); {} for other models."""
    source = model.model if isinstance(model, Captured) else model
    return source.paths if isinstance(source, ImportedModel) else {}


def check_weights(config: Config) -> None:
    """Raises ConfigError for weights that cannot be exported or run.

    It is raised for quantizers that `quantizers_of` rejects, for zero points per channel that the installed ONNX
    Runtime does not support, and for AMX weights with a backend without AMX.
    """
    backend, weight = backend_of(config), backend_of(config).weight
    quantizers_of(config)
    of_channels = weight.granularity.separates(0) and not weight.symmetric
    old = version_numbers(RUNTIME_VERSION) < version_numbers(ZERO_POINTS_OF_CHANNELS)
    if backend.for_onnxruntime and of_channels and old:
        reason = (
            f"onnxruntime {RUNTIME_VERSION} does not support weights with a zero point per channel; install "
            f"{ZERO_POINTS_OF_CHANNELS} or higher, or set backend.weight_symmetric=true or "
            "backend.weight_granularity=per_tensor"
        )
        raise ConfigError("backend.target", config.backend.target, reason=reason)
    if config.export.weights_for_amx and not backend.has_amx:
        allowed = f"false with backend={backend.name}, which does not run on CPUs with AMX"
        raise ConfigError("export.weights_for_amx", True, allowed)


def check_integer_ends(module: QATModule) -> None:
    """Raises ConfigError if the module's backend does not accept uint8 images; called if they are requested."""
    if not module.backend.for_onnxruntime:
        allowed = f"float32 with backend={module.backend.name}, which does not accept uint8"
        raise ConfigError("export.io", "uint8", allowed)


def finish_file(path: Path, config: Config, data: DataModule) -> dict[str, Any]:
    """Gives the file integer inputs and outputs if requested; returns the file's entries for model.json."""
    about = describe(data)
    if config.export.io != "uint8":
        return about
    session = open_session(path, threads=config.verify.threads, options=backend_of(config).session_options)
    low, high = 0.0, 0.0
    for images, _ in data.calibration_batches(config.calibration.images, config.calibration.batch_size):
        outputs = run_images(session, images)
        low, high = min(low, float(outputs.min())), max(high, float(outputs.max()))
    prepared = data.preprocessing
    ends = to_integer_io(path, path, prepared.unit_mean, prepared.unit_std, (low, high))
    return about | ends.as_dict()


def has_nms(config: Config) -> bool:
    """Returns whether an additional file with non-maximum suppression is written."""
    return config.export.nms and task_of(config.task).boxes


def write_nms(source: Path, target: Path, config: Config) -> None:
    """Writes a detector's file with non-maximum suppression.

    Raises:
        ConfigError: `add_nms` raises it.
    """
    wanted = config.export
    add_nms(source, target, Suppression(wanted.nms_score, wanted.nms_overlap, wanted.nms_boxes))


def describe(data: DataModule) -> dict[str, Any]:
    """Returns the entries that every model.json has."""
    return model_json(data.about_inputs(), data.classes)


def _low_bits(module: QATModule, config: Config) -> list[str]:
    """Returns notes on number types that no kernel supports, so that operators with them compute in float."""
    quantizers = fake_quantizers(module.graph).values()
    if module.backend.simulated:
        return [
            f"{counted(len(quantizers), 'activation')} and the weights have simulated number formats: the file "
            "computes their values in float, so its accuracy and the size of its "
            "weights are those of the formats, but not its latency"
        ]
    narrow = [q for q in quantizers if q.spec.dtype not in (*WHOLE, *WIDE)]
    biases = [fake for _, _, fake in quantized_operators(module.graph) if fake.spec.narrow_bias]
    wide = [q for q in quantizers if q.spec.dtype in WIDE]
    notes = []
    if wide:
        notes.append(
            f"activations with 16 bits: {len(wide)} of {len(quantizers)}; ONNX "
            "Runtime rounds to 16 bits and computes in "
            "float; an accelerator with 16-bit kernels has the same accuracy but a different latency"
        )
    if biases and not module.backend.weights_alone:
        notes.append(
            f"{counted(len(biases), 'operator')} with biases of fewer than 32 bits: "
            "ONNX Runtime computes such operators in float; an "
            "accelerator with such kernels has the same accuracy but a different latency"
        )
    if narrow:
        notes.append(
            f"activations with 4 bits, for which there is no kernel: {len(narrow)} of {len(quantizers)}; the "
            "file clips them to 16 steps, so its accuracy is that of 4 bits, but not its size and latency"
        )
    if config.export.pack_int4:
        notes.append(
            "export.pack_int4=true: ONNX Runtime converts the weights to float when "
            "it loads the file; only the file size "
            "is that of 4 bits"
        )
    return notes


def write_files(run: Run, data: DataModule, model: Captured, module: QATModule) -> Written:
    """Writes all model files of a finished module into the run's folder; reports and pages are written later."""
    config, folder = run.config, run.folder
    converted = module.convert()
    with run.stage("export", "exporting"):
        told = write_file(converted.graph, config, data.inputs, run.files / run.int8_name)
        told += write_float_file(model, config, data.inputs, run.files / FLOAT_FILE)
        about = finish_file(run.files / run.int8_name, config, data)
    larger = why_larger(run.files / FLOAT_FILE, run.files / run.int8_name) if paths_of(model) else None
    write_model_json(folder, about)
    ranges = calibration_ranges(module.graph)
    write_text(folder / RANGES_FILE, json.dumps(ranges, indent=1) + "\n")
    extra, notes = list[str](), [*_low_bits(module, config), *told, *filter(None, [larger])]
    if has_nms(config):
        int8 = run.files / run.int8_name
        write_nms(int8, nms_file(int8), config)
        extra.append(nms_file(int8).name)
    if config.export.stream:
        add_states(run.files / run.int8_name, stream_file(run.files / run.int8_name))
        extra.append(stream_file(run.files / run.int8_name).name)
    if config.export.tensorrt_table is not None:
        parts = split_parts(module.graph.graph)
        table, missing = tensorrt_table(run.files / FLOAT_FILE, ranges, config.export.tensorrt_table, parts)
        write_text(folder / TABLE_FILE, table)
        extra.append(TABLE_FILE)
        if missing:
            notes.append(f"{TABLE_FILE} lacks {', '.join(missing)}, since {FLOAT_FILE} has no such tensor")
    return Written(converted, (run.int8_name, *BESIDE_INT8, *extra), tuple(notes))
