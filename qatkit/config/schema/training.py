"""How it is trained, and on what."""

from __future__ import annotations

from dataclasses import dataclass

from qatkit.config.fields import COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting


@dataclass
class ScheduleConfig:
    """Fine-tuning. Milestones are fractions of all optimizer steps, from 0 (at once) to 1 (never)."""

    epochs: int = setting(1, "of fine-tuning; 0: calibration alone", Range(0))
    max_steps: int | None = setting(None, "optimizer steps; ends earlier than epochs when set", COUNT)
    optimizer: str = setting("sgd", "of fine-tuning and of the float model", Choices(("sgd", "adamw")))
    lr: float = setting(1e-3, "learning rate of fine-tuning", POSITIVE)
    relative_lr: bool = setting(
        False,
        "with adamw, lr (and float_lr) is the largest share, about, of the root mean square of an output channel's "
        "weights by which these move in a step: for weights of very different sizes, as where BatchNorms were folded",
    )
    scale_lr: float = setting(
        1e-3,
        "largest share of itself, about, by which a learned scale moves in a step",
        Range(0, 0.1, above=True),
    )
    momentum: float = setting(0.9, "of sgd", Range(0, 1))
    weight_decay: float = setting(1e-4, "share of the weights, times the rate", Range(0))
    warmup: float = setting(0.05, "fraction of all steps with a linearly rising rate", FRACTION)
    decay: str = setting("cosine", "of the rate after the warmup", Choices(("cosine", "linear", "constant")))
    label_smoothing: float = setting(0.0, "share of the target spread over all classes", FRACTION)
    batch_norm: str = setting(
        "fold",
        "fold: into the weights before training; freeze, train: kept until convert, its statistics fixed or not",
        Choices(("fold", "freeze", "train")),
    )
    enable_fake_quant: float = setting(0.0, "milestone from which values are quantized", FRACTION)
    freeze_observers: float = setting(0.5, "milestone from which ranges are fixed", FRACTION)
    branches: str = setting(
        "train",
        "of re-parameterized blocks, which are one convolution in the file: train all of them, and quantize what they "
        "merge to, or train that alone",
        Choices(("train", "merged")),
    )
    freeze_batch_norm: float = setting(
        0.5, "milestone from which statistics are fixed (batch_norm=train)", FRACTION
    )
    batch_norm_images: int = setting(
        0,
        "of calibration, on which the statistics of kept BatchNorms (batch_norm=freeze, train) are re-estimated, with "
        "quantization on, before they are folded; 0: those of the training stay",
        Range(0),
    )
    ema: float | None = setting(
        None,
        "decay a step of an average of the weights, which is validated and shipped in place of the last weights; null: "
        "no average",
        Range(0, 0.999999),
    )
    oscillation: str = setting(
        "ignore",
        "of weights that jump between two integers: count them for the report, and dampen them by a term of the loss, "
        "or freeze those that jump most",
        Choices(("ignore", "count", "dampen", "freeze")),
    )
    dampening: float = setting(0.1, "weight of the dampening term at the end, from 0 by a cosine", POSITIVE)
    freeze_above: float = setting(
        0.01,
        "share of steps with a jump above which a weight is frozen at the end, from 0.1 by a cosine",
        FRACTION,
    )
    distill: float = setting(0.0, "weight of the teacher's soft targets in the loss", FRACTION)
    distill_temperature: float = setting(2.0, "of the soft targets", POSITIVE)
    distill_teacher: str | None = setting(
        None,
        "a model to learn from, named as model.name is, with its pretrained weights; null: the float model itself",
        PLACE,
    )
    distill_checkpoint: str | None = setting(
        None,
        "a file with the teacher's state_dict, in place of pretrained weights; without distill_teacher it is one of "
        "this run's own model",
        PLACE,
    )
    distill_features: list[str] = setting(
        list,
        "modules of the float model whose outputs are learned from the teacher's too: paths (layer3), or OURS:THEIRS "
        "where the teacher calls it otherwise (features.18:layer4)",
    )
    distill_feature_weight: float = setting(
        1.0, "of the features' relative squared error in the loss", POSITIVE
    )
    float_epochs: int = setting(0, "train the float model first, for want of a checkpoint", Range(0))
    float_lr: float = setting(0.05, "learning rate of the float model", POSITIVE)


@dataclass
class TrainerConfig:
    """Passed to Lightning's Trainer, and how often a checkpoint is written."""

    accelerator: str = setting(
        "auto",
        "where to train; auto is a CUDA device where there is one",
        Choices(("auto", "cpu", "gpu", "cuda")),
    )
    devices: int = setting(1, "of each node", Range(1, all_of_them=True))
    num_nodes: int = setting(1, "machines", COUNT)
    strategy: str = setting(
        "auto", "of several processes", Choices(("auto", "ddp", "ddp_find_unused_parameters_true"))
    )
    compile: bool = setting(
        False,
        "the graph that trains, by torch.compile, after minutes of compiling; needs a C++ compiler; on a CPU a "
        "ResNet-18 gains nothing by it",
    )
    channels_last: bool = setting(
        False,
        "images and activations with their channels innermost, as GPUs' convolutions want them, on CPUs "
        "depthwise ones and trainer.compile",
    )
    accumulate: int = setting(1, "batches of each process that an optimizer step takes", COUNT)
    sync_batch_norm: bool = setting(
        True, "of several processes: statistics of a BatchNorm that trains over the batches of all"
    )
    precision: str = setting("32-true", "of the training", Choices(("32-true", "bf16-mixed", "16-mixed")))
    deterministic: bool = setting(
        True, "repeatable kernels alone: slower on a GPU, and not there for all operators"
    )
    gradient_clip: float | None = setting(None, "largest norm of the gradient", POSITIVE)
    checkpoint_every: int = setting(200, "optimizer steps", COUNT)
    progress: bool = setting(True, "progress bars on stderr")
    debug: bool = setting(False, "the traceback of every error, before its one line")
    mlflow: str | None = setting(
        None,
        "tracking URI of an MLflow server (http://host:5000; an extra) that parameters, metrics, report and bundle "
        "are logged to, in the experiment NAME",
        PLACE,
    )
