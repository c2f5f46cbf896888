"""The configuration schema: one dataclass a group, registered with Hydra, and what is done with a `Config`.

A typo or a wrong type in YAML or on the command line fails against these dataclasses, with the name of the
key. Only this module and the command line (`qatkit.config.command_line`, `qatkit.config.hydra_errors`) import hydra or
omegaconf: the rest of the library receives the plain dataclasses.

A run's folder tells its whole story: `config.yaml` (saved here), a checkpoint for each stage that trains,
`report.json` once it is done. `resume=auto` is a search for the folder where the second is there, the third
is not, and the first says the same as the present configuration.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qatkit.config.limits import validate
from qatkit.errors import ConfigError, near_matches

CONFIG_FILE, CHECKPOINT_FILE, REPORT_FILE = "config.yaml", "last.ckpt", "report.json"
MODEL_FILE = "model.json"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
FLOAT_CHECKPOINT, CONTROL_CHECKPOINT = "float.ckpt", "control.ckpt"
# One for each stage that trains, the last stage first.
STAGE_CHECKPOINTS = (CONTROL_CHECKPOINT, CHECKPOINT_FILE, FLOAT_CHECKPOINT)
OUTPUTS = Path("outputs")


@dataclass
class ModelConfig:
    """The float model.

    `name` is a `torchvision.models` name ("resnet18"), one of timm's ("timm/resnet18") or the dotted path of a
    user's builder ("my_package.models.build"). `weights` is one of torchvision's weight enums for that model
    ("IMAGENET1K_V1", "DEFAULT") or a tag of timm's ("a1_in1k", "DEFAULT");
    `checkpoint` is a file with a float `state_dict`.
    """

    name: str = "resnet18"
    weights: str | None = None
    checkpoint: str | None = None
    num_classes: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """Where images come from and how they are prepared.

    `source` is the dotted path of a function that returns the datasets. `image_size`, `resize`, `mean`
    and `std` left null come from the weights' own transforms. `train_images` and `test_images` cap the
    splits (a seeded, class-balanced subset of the train split, and of the test split).
    """

    source: str = "qatkit.data.digits"
    root: str | None = None
    image_size: int | None = None  # pixels, square input
    resize: int | None = None  # pixels of the shorter side before the centre crop; null: image_size
    mean: list[float] | None = None  # per channel, of pixels in 0..1
    std: list[float] | None = None
    augment: str = "none"  # none | flip | crop_flip | resized_crop
    batch_size: int = 64
    eval_batch_size: int = 100
    workers: int = 2
    train_images: int | None = None
    test_images: int | None = None
    download: bool = True


@dataclass
class OverrideConfig:
    """What one override pattern changes; null keeps the backend's choice.

    Exactly one of `float` or the specs: `float: true` leaves the matched operators in floating point.
    """

    float: bool = False
    weight_dtype: str | None = None  # int8
    weight_granularity: str | None = None  # per_tensor | per_channel
    activation_dtype: str | None = None  # uint8 | int8
    activation_symmetric: bool | None = None


@dataclass
class BackendConfig:
    """The target's rules by name, and overrides by pattern.

    Keys of `overrides` are a module path ("features.0.0"), a glob over module paths
    ("encoder.layers.*.mlp.*") or an operator class ("op/linear").
    """

    target: str = "qatkit.backends.FBGEMM"
    reduce_range: bool = False
    overrides: dict[str, OverrideConfig] = field(default_factory=dict)


@dataclass
class CalibrationConfig:
    """How activation ranges are found before fine-tuning.

    `percentile` and `deviations` reach those observers that take them; null leaves them their default.
    """

    observer: str = "qatkit.observers.MovingAverageMinMaxObserver"
    images: int = 512
    batch_size: int = 64
    percentile: float | None = None  # share of values inside the range, in percent
    deviations: float | None = None  # half of the range, in standard deviations
    weights: str = (
        "max"  # max | mse: a weight's range ends at its largest value, or at the least squared error
    )
    search: str = "none"  # none | layerwise | tournament: between methods, by what they do to the outputs
    cache: str | None = None  # a file: written after calibration, read instead of it
    random: bool = False  # noise instead of images, for those who have none


@dataclass
class AlgorithmConfig:
    """Corrections after training that need no labels (`qatkit.algorithms`); fine-tuning may follow."""

    equalize: bool = False  # channels of neighbouring operators get equal ranges, the function stays
    relu6: str = "keep"  # keep | relu; relu: equalize makes a ReLU of a ReLU6 that is in its way
    bias_correction: str = "none"  # none | analytic | empirical
    bias_images: int = 128  # of the calibration images; for empirical one batch, which has to fit into memory


@dataclass
class ScheduleConfig:
    """Fine-tuning. Milestones are fractions of all optimizer steps, from 0 (at once) to 1 (never)."""

    epochs: int = 1
    max_steps: int | None = None  # ends earlier than `epochs` when set
    optimizer: str = "sgd"  # sgd | adamw
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.05  # fraction of all steps with a linearly rising rate
    decay: str = "cosine"  # cosine | linear | constant
    label_smoothing: float = 0.0
    batch_norm: str = "fold"  # fold | freeze | train
    enable_fake_quant: float = 0.0
    freeze_observers: float = 0.5
    freeze_batch_norm: float = 0.5
    distill: float = 0.0  # weight of the float model's soft targets, 0..1
    distill_temperature: float = 2.0
    float_epochs: int = 0  # train the float model first (quickstart)
    float_lr: float = 0.05


@dataclass
class TrainerConfig:
    """Passed to Lightning's Trainer, and how often a checkpoint is written."""

    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    deterministic: bool = True
    gradient_clip: float | None = None
    checkpoint_every: int = 200  # optimizer steps
    progress: bool = True


@dataclass
class ExportConfig:
    """The ONNX file.

    `mode` other than static takes the float model, untrained by `schedule`, through `qatkit.export.ort_modes`.
    `io` is what a static file takes and gives: normalised float images and float logits, or raw uint8 pixels
    and 8-bit logits. `tensorrt_table` writes the ranges for an engine built from the float file as well.
    """

    opset: int = 13
    dynamic_batch: bool = True
    mode: str = "static"  # static | dynamic | float16 | weight_only
    io: str = "float32"  # float32 | uint8
    tensorrt_table: str | None = None  # TensorRT's release in digits, "8601"


@dataclass
class VerifyConfig:
    """What is measured on the exported file, and the bounds that it must keep (null: not checked).

    `checks` are the dotted paths of `qatkit.verify.checks.base.Check` classes, in the order in which they run.
    """

    control: bool = False
    threads: int = 2
    latency_batch: int = 1
    latency_runs: int = 50
    parity_images: int = 512
    max_drop: float | None = 1.0  # points of top-1, float minus INT8 in ONNX Runtime
    min_agreement: float | None = 0.999  # share of images with the same top-1, converted module and ORT
    max_size_ratio: float | None = None  # INT8 bytes / float bytes
    min_speedup: float | None = None  # float latency / INT8 latency
    audit: bool = True  # no weight dequantized at run time, every quantized operator runs int8
    checks: list[str] = field(
        default_factory=lambda: [
            "qatkit.verify.checks.latency.LatencyCheck",  # first: data loading leaves no worker behind yet
            "qatkit.verify.checks.accuracy.AccuracyCheck",
            "qatkit.verify.checks.size.SizeCheck",
            "qatkit.verify.checks.parity.ParityCheck",
            "qatkit.verify.checks.audit.AuditCheck",
        ]
    )


@dataclass
class Config:
    """A whole run."""

    name: str = "run"
    seed: int = 0
    output_dir: str | None = None  # null: outputs/NAME/DATE_TIME
    resume: str | None = None  # null | auto | a checkpoint's path
    checkpoint: str | None = None  # export.py only: the checkpoint to export
    onnx: str | None = None  # export.py only: a float ONNX file to quantize, instead of a checkpoint
    mode: str | None = None  # with onnx: dynamic | static | float16 | weight_only
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)


def register() -> None:
    """Make the dataclasses Hydra's schema: `schema` in the defaults list of `conf/config.yaml`.

    A value of `${required:WHAT}` in YAML must be given on the command line. (OmegaConf's own `???` does not
    replace a default of the schema, so that a recipe's `???` would be null without a word.)
    """
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("required", _required, replace=True)


def _required(*what: str) -> None:
    raise LookupError(f"required, {', '.join(what)}")


def resolve(path: str, key: str) -> Any:
    """The object at a dotted path, `package.module.name`.

    Raises:
        ConfigError: `path` (the value of `key`) is no dotted path, its module cannot be imported, or the
            module has no such name; the message lists near names.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path.replace(".", "_").isidentifier() or not name.isidentifier():
        raise ConfigError(key, path, "a dotted path, such as my_package.my_module.name")
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        reason = f"a dotted path that can be imported ({error}; is its folder on PYTHONPATH?)"
        raise ConfigError(key, path, reason) from error
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        raise ConfigError(key, path, f"a name in {module_path}, such as {near_matches(name, public)}")
    return getattr(module, name)


def to_config(node: DictConfig) -> Config:
    """The plain dataclasses of a composed configuration, with every value checked.

    The values are merged into the schema anew: Hydra's `+key=value` adds keys that the schema lacks, which
    would otherwise be dropped without a word.

    Raises:
        ConfigError: a value out of range.
        OmegaConfBaseException: a required value that is missing, a key or type that does not fit the schema.
    """
    values = OmegaConf.to_container(node, resolve=True)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
    assert isinstance(config, Config)
    validate(config)
    return config


def save_config(config: Config, path: Path, without: Collection[str] = ()) -> None:
    """Write `config` as YAML, whole or not at all; `without` names groups that play no part in the run."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    values = {key: value for key, value in OmegaConf.structured(config).items() if key not in without}
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")
    temporary.replace(path)


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote, checked against the schema and `validate`.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or does not fit the schema.
    """
    try:
        node = OmegaConf.load(path)
        if not isinstance(node, DictConfig):
            raise ConfigError("config", path, "a config.yaml written by train.py")
        return to_config(node)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("config", path, f"a config.yaml written by train.py ({reason})") from error


def output_dir(config: Config, job: int | None = None) -> Path:
    """The run's folder: `config.output_dir`, or a new outputs/NAME/DATE_TIME (_JOB in a sweep).

    Nothing is created; the place is tried by writing next to it, since permission bits say little to root
    or on a network drive.

    Raises:
        ConfigError: the folder could not be created or written.
    """
    if config.output_dir is not None:
        folder = Path(config.output_dir)
    else:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S") + ("" if job is None else f"_{job}")
        folder = OUTPUTS / config.name / stamp
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        reason = f"a folder that can be created and written ({error.strerror})"
        raise ConfigError("output_dir", folder, reason) from error
    return folder


def preprocessing_beside(onnx_file: Path) -> dict[str, Any] | None:
    """What the model.json of the bundle that a file lies in says of its images; null without one, or another tool's."""
    try:
        found = json.loads(onnx_file.with_name(MODEL_FILE).read_text())["preprocessing"]
        sizes = [found[key] for key in ("image_size", "resize")]
        numbers = [*found["mean"], *found["std"]]
        whole = (
            all(type(size) is int for size in sizes) and 0 < sizes[0] <= sizes[1] and min(found["std"]) > 0
        )
        fits = len(found["mean"]) == len(found["std"]) in (1, 3) and found["interpolation"] in INTERPOLATIONS
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole and fits and all(type(number) in (int, float) for number in numbers) else None


def find_resume(config: Config) -> tuple[Path, Path] | None:
    """The unfinished run that `resume=auto` continues: its folder and its last stage's checkpoint, or None.

    Looked for in `config.output_dir` and in every outputs/NAME/*; unfinished means that a stage's checkpoint
    is there and `report.json` is not. The saved configuration must equal `config` but for `resume` and
    `output_dir`: a run with another learning rate is another run. The newest checkpoint wins.
    """
    folders = {path.parent.resolve() for path in (OUTPUTS / config.name).glob(f"*/{CONFIG_FILE}")}
    if config.output_dir is not None:
        folders.add(Path(config.output_dir).resolve())
    checkpoints = [
        checkpoint
        for folder in folders
        if not (folder / REPORT_FILE).exists() and (checkpoint := _last_stage(folder)) is not None
    ]
    for checkpoint in sorted(checkpoints, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if _same_run(config, checkpoint.with_name(CONFIG_FILE)):
            return checkpoint.parent, checkpoint
    return None


def _last_stage(folder: Path) -> Path | None:
    return next((path for name in STAGE_CHECKPOINTS if (path := folder / name).is_file()), None)


def _same_run(config: Config, saved: Path) -> bool:
    """Whether `saved` holds `config`. A file of an older schema, or none, is simply another run."""
    try:
        other = load_config(saved)
    except ConfigError:
        return False
    return replace(other, resume=None, output_dir=None) == replace(config, resume=None, output_dir=None)
