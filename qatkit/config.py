"""The configuration schema: one dataclass a group, registered with Hydra.

A typo or a wrong type in YAML or on the command line fails here, with the name of the key. This is the
only module that imports hydra or omegaconf: the rest of the library receives these plain dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The float model.

    `name` is a `torchvision.models` name ("resnet18") or the dotted path of a user's builder
    ("my_package.models.build"). `weights` is one of torchvision's weight enums for that model
    ("IMAGENET1K_V1", "DEFAULT"); `checkpoint` is a file with a float `state_dict`.
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
    ("encoder.layers.*.mlp.*") or an operator class ("op:linear").
    """

    target: str = "qatkit.backends.FBGEMM"
    reduce_range: bool = False
    overrides: dict[str, OverrideConfig] = field(default_factory=dict)


@dataclass
class CalibrationConfig:
    """How activation ranges are found before fine-tuning."""

    observer: str = "qatkit.observers.MovingAverageMinMaxObserver"
    images: int = 512
    batch_size: int = 64


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
    """The ONNX file."""

    opset: int = 13
    dynamic_batch: bool = True


@dataclass
class VerifyConfig:
    """What is measured on the exported file, and the bounds that it must keep (null: not checked)."""

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


@dataclass
class Config:
    """A whole run."""

    name: str = "run"
    seed: int = 0
    output_dir: str | None = None  # null: outputs/NAME/DATE_TIME
    resume: str | None = None  # null | auto | a checkpoint's path
    checkpoint: str | None = None  # export.py only: the checkpoint to export
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
