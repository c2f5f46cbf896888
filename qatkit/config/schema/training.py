"""The groups `schedule` and `trainer`: how and on which devices the model is trained."""

from __future__ import annotations

from dataclasses import dataclass

from qatkit.config.fields import COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting


@dataclass
class ScheduleConfig:
    """The fine-tuning schedule. Milestones are fractions of all optimizer steps, from 0 (at once) to 1 (never)."""

    epochs: int = setting(1, "epochs of fine-tuning; 0: only calibrate", Range(0))
    max_steps: int | None = setting(
        None,
        "maximum number of optimizer steps, which can end training before schedule.epochs; null: no limit",
        COUNT,
    )
    optimizer: str = setting(
        "sgd", "optimizer of fine-tuning and of float training", Choices(("sgd", "adamw"))
    )
    lr: float = setting(1e-3, "learning rate of fine-tuning", POSITIVE)
    relative_lr: bool = setting(
        False,
        "with adamw: lr (and float_lr) is the approximate maximum change of a weight per step, "
        "relative to the root mean square of the weights of its output channel; for weights of very "
        "different sizes, for example after BatchNorm folding",
    )
    scale_lr: float = setting(
        1e-3,
        "approximate maximum relative change of a learned scale per step",
        Range(0, 0.1, above=True),
    )
    momentum: float = setting(0.9, "momentum of sgd", Range(0, 1))
    weight_decay: float = setting(
        1e-4,
        "weight decay coefficient, multiplied by the learning rate; not applied to biases and other vectors",
        Range(0),
    )
    warmup: float = setting(
        0.05, "fraction of all steps during which the learning rate rises linearly", FRACTION
    )
    decay: str = setting(
        "cosine",
        "learning rate after the warmup. cosine, linear: falls to 0 along this curve; constant: does "
        "not change",
        Choices(("cosine", "linear", "constant")),
    )
    label_smoothing: float = setting(0.0, "share of the target that is spread over all classes", FRACTION)
    batch_norm: str = setting(
        "fold",
        "what happens to BatchNorms. fold: they are merged into the weights before training; freeze, "
        "train: they are kept until the conversion to integers, with fixed (freeze) or updated "
        "(train) statistics",
        Choices(("fold", "freeze", "train")),
    )
    enable_fake_quant: float = setting(0.0, "milestone from which fake quantization is on", FRACTION)
    freeze_observers: float = setting(0.5, "milestone from which ranges are fixed", FRACTION)
    branches: str = setting(
        "train",
        "how to train re-parameterized blocks, which become one convolution in the file. train: all "
        "branches, with their merged weights quantized; merged: only the merged convolution",
        Choices(("train", "merged")),
    )
    freeze_batch_norm: float = setting(
        0.5, "milestone from which BatchNorm statistics are fixed (batch_norm=train)", FRACTION
    )
    batch_norm_images: int = setting(
        0,
        "calibration samples on which the statistics of kept BatchNorms (batch_norm=freeze or train) "
        "are re-estimated with quantization on, before they are folded; 0: keep the statistics from "
        "training",
        Range(0),
    )
    ema: float | None = setting(
        None,
        "decay per step of an exponential moving average of the weights, which is validated and "
        "exported instead of the last weights; null: no average",
        Range(0, 0.999999),
    )
    oscillation: str = setting(
        "ignore",
        "what to do about weights that oscillate between two integers. ignore: nothing; count: "
        "report their number; dampen: add a term to the loss; freeze: fix those that oscillate most",
        Choices(("ignore", "count", "dampen", "freeze")),
    )
    dampening: float = setting(
        0.1, "final weight of the loss term of oscillation=dampen, reached from 0 along a cosine", POSITIVE
    )
    freeze_above: float = setting(
        0.01,
        "weights whose integers jump back in more than this share of the steps are frozen "
        "(oscillation=freeze); the share starts at 0.1 and reaches this value along a cosine",
        FRACTION,
    )
    distill: float = setting(0.0, "weight of the teacher's soft targets in the loss", FRACTION)
    distill_temperature: float = setting(2.0, "temperature of the soft targets", POSITIVE)
    distill_teacher: str | None = setting(
        None,
        "teacher model, written like model.name, with pretrained weights unless distill_checkpoint is set;"
        " null: the float model itself",
        PLACE,
    )
    distill_checkpoint: str | None = setting(
        None,
        "file with the teacher's state_dict, used instead of pretrained weights; without "
        "distill_teacher the teacher has the architecture of this run's model; null: no file",
        PLACE,
    )
    distill_features: list[str] = setting(
        list,
        "modules of the float model whose outputs are also learned from the teacher: paths (layer3), "
        "or OURS:THEIRS if the teacher uses another name (features.18:layer4)",
    )
    distill_feature_weight: float = setting(
        1.0, "weight of the relative squared error of these features in the loss", POSITIVE
    )
    float_epochs: int = setting(
        0, "epochs in which the float model is trained first; 0: it is used as it was loaded", Range(0)
    )
    float_lr: float = setting(0.05, "learning rate of float training", POSITIVE)


@dataclass
class TrainerConfig:
    """The settings passed to Lightning's Trainer, and how often a checkpoint is written."""

    accelerator: str = setting(
        "auto",
        "device type to train on. auto: CUDA if available, else the CPU; gpu, cuda: CUDA; cpu: the CPU",
        Choices(("auto", "cpu", "gpu", "cuda")),
    )
    devices: int = setting(
        1, "devices per node (processes, on a CPU); -1: all GPUs", Range(1, all_of_them=True)
    )
    num_nodes: int = setting(1, "number of machines", COUNT)
    strategy: str = setting(
        "auto",
        "how several processes train together. auto, ddp: data-parallel training; "
        "ddp_find_unused_parameters_true: the same for models with parameters that get no gradient",
        Choices(("auto", "ddp", "ddp_find_unused_parameters_true")),
    )
    compile: bool = setting(
        False,
        "compile the training graph with torch.compile, which takes minutes and needs a C++ compiler;"
        " a ResNet-18 on a CPU does not get faster",
    )
    channels_last: bool = setting(
        False,
        "channels-last memory format for images and activations: faster for convolutions on GPUs; on "
        "CPUs, for depthwise convolutions and with trainer.compile",
    )
    accumulate: int = setting(1, "batches of each process per optimizer step", COUNT)
    sync_batch_norm: bool = setting(
        True,
        "with several processes: compute the statistics of trained BatchNorms over the batches of all"
        " processes",
    )
    precision: str = setting(
        "32-true",
        "numeric precision of training. 32-true: float32; bf16-mixed, 16-mixed: bfloat16 or float16 "
        "where autocast allows, with float32 weights",
        Choices(("32-true", "bf16-mixed", "16-mixed")),
    )
    deterministic: bool = setting(
        True, "use only deterministic kernels: slower on a GPU, and missing for some operators"
    )
    gradient_clip: float | None = setting(None, "maximum norm of the gradient; null: not limited", POSITIVE)
    checkpoint_every: int = setting(200, "optimizer steps between checkpoints", COUNT)
    progress: bool = setting(True, "show progress bars on stderr")
    debug: bool = setting(False, "print the traceback of every error before its one-line message")
    mlflow: str | None = setting(
        None,
        "tracking URI of MLflow, such as http://host:5000 or sqlite:///FILE (needs the extra mlflow); "
        "parameters, metrics, report and bundle are logged to the experiment with the name of the run "
        "(the key name); null: not used",
        PLACE,
    )
