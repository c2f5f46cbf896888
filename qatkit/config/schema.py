"""The configuration's schema: one dataclass a group, each setting with its default, its meaning and its limits.

A typo or a wrong type in YAML or on the command line fails against these dataclasses, with the name of the
key. They are plain: Hydra and OmegaConf, which fill them, are known to `compose` and the command line alone, and
the library is called with the filled ones. What joins several settings is in `limits`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qatkit.config.fields import COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting
from qatkit.spec import ACTIVATIONS, GRANULARITIES, SIGNED

# How a file is quantized: by simulation and training, or by ONNX Runtime's tools (qatkit.export.ort_modes).
MODES = Choices(("dynamic", "static", "float16", "weight_only"))


@dataclass
class ModelConfig:
    """The float model."""

    name: str = setting(
        "resnet18",
        'a torchvision.models name ("resnet18"), one of timm\'s ("timm/resnet18"), an architecture, a hub id or a '
        'folder of Hugging Face\'s ("hf/vit", "hf/google/vit-base-patch16-224", "hf//my/folder"), '
        '"lite/efficientnet-lite0", or the dotted path of your builder ("my_package.models.build")',
        PLACE,
    )
    weights: str | None = setting(
        None,
        'one of torchvision\'s weight enums for that model ("IMAGENET1K_V1", "DEFAULT"), a tag of timm\'s '
        '("a1_in1k", "DEFAULT"), or DEFAULT or a revision for Hugging Face\'s and lite/efficientnet-lite0',
    )
    checkpoint: str | None = setting(
        None,
        "a file with a float state_dict: torch.save's, as training scripts write them, or safetensors",
        PLACE,
    )
    checkpoint_key: str | None = setting(
        None,
        'of several in the file the one to take ("model_ema"); null: the trained one, not an average of it',
    )
    num_classes: int | None = setting(None, "of the classifier; null: those of the data", COUNT)
    kwargs: dict[str, Any] = setting(
        dict, "further arguments of the builder; of hf/NAME: settings of the model's configuration"
    )


@dataclass
class DataConfig:
    """Where images come from and how they are prepared.

    image_size, resize, mean and std left null come from the weights' own transforms.
    """

    source: str = setting("qatkit.data.digits", "dotted path of a function that returns the datasets")
    root: str | None = setting(None, "folder of the images, for sources that read one", PLACE)
    image_size: int | None = setting(None, "pixels, height and width of the model's input", COUNT)
    resize: int | None = setting(
        None, "pixels of the shorter side before the centre crop; null: image_size", COUNT
    )
    mean: list[float] | None = setting(None, "per channel, of pixels in 0..1")
    std: list[float] | None = setting(None, "per channel, of pixels in 0..1")
    augment: str = setting(
        "none", "of training images", Choices(("none", "flip", "crop_flip", "resized_crop"))
    )
    batch_size: int = setting(64, "training images a step and process", COUNT)
    eval_batch_size: int = setting(100, "test images at a time", COUNT)
    workers: int = setting(2, "processes that load images; 0: none of their own", Range(0))
    train_images: int | None = setting(
        None, "so many of the train split, seeded and balanced over classes; null: all", COUNT
    )
    test_images: int | None = setting(
        None, "so many of the test split, seeded and balanced over classes; null: all", COUNT
    )
    bad: str = setting(
        "refuse",
        "files that can't be read as images: end the run with a list of them, or leave them out and say so",
        Choices(("refuse", "skip")),
    )
    download: bool = setting(True, "fetch a data set that is not in root, where the source can")


@dataclass
class OverrideConfig:
    """What one override pattern changes; null keeps the backend's choice. Float, int8, or at least one of the rest."""

    float: bool = setting(False, "leave the matched operators in floating point")
    int8: bool = setting(
        False,
        "compute SiLUs in 8 bits too, as Sigmoid and Mul, where backends keep one float operator between two pairs",
    )
    weight_dtype: str | None = setting(None, "of the weights", Choices(SIGNED))
    weight_granularity: str | None = setting(
        None, "one scale a tensor, or one an output channel", Choices(GRANULARITIES)
    )
    reduce_range: bool | None = setting(None, "7-bit weights, which never saturate on x86 without VNNI")
    activation_dtype: str | None = setting(
        None,
        "of inputs and outputs; uint4 is simulated: the file clips to 16 steps and computes in float",
        Choices(ACTIVATIONS),
    )
    activation_symmetric: bool | None = setting(None, "zero in the middle of the range")


@dataclass
class BackendConfig:
    """The target's rules by name, and overrides by pattern."""

    target: str = setting("qatkit.backends.FBGEMM", "dotted path of a qatkit.backends.Backend")
    reduce_range: bool = setting(False, "7-bit weights, for x86 processors without VNNI")
    weight_granularity: str | None = setting(
        None,
        "one scale a tensor, or one an output channel; null: the backend's choice",
        Choices(GRANULARITIES),
    )
    every_operator: bool = setting(
        False, "quantize the output of every operator, as naive tools do: to see what that costs"
    )
    overrides: dict[str, OverrideConfig] = setting(
        dict,
        'pattern: {setting: value}; a pattern is a module path ("features.0.0"), a glob over module paths '
        '("encoder.layers.*.mlp.*") or an operator class ("op/linear")',
    )


@dataclass
class QuantizerConfig:
    """Which classes quantize: how scales and roundings come about."""

    activation: str = setting(
        "qatkit.fake_quantize.FakeQuantize", "dotted path of a qatkit.fake_quantize.FakeQuantize"
    )
    weight: str = setting(
        "qatkit.weight_fake_quantize.WeightFakeQuantize",
        "dotted path of a qatkit.weight_fake_quantize.WeightFakeQuantize",
    )


@dataclass
class CalibrationConfig:
    """How activation ranges are found before fine-tuning."""

    observer: str = setting(
        "qatkit.observers.MovingAverageMinMaxObserver", "dotted path of a qatkit.observers.Observer"
    )
    images: int = setting(512, "of the train split", COUNT)
    batch_size: int = setting(64, "images at a time", COUNT)
    percentile: float | None = setting(
        None,
        "share of values inside the range, in percent, for observers that take it; null: their default",
        Range(50, 100, above=True),
    )
    deviations: float | None = setting(
        None,
        "half of the range, in standard deviations, for observers that take it; null: their default",
        POSITIVE,
    )
    weights: str = setting(
        "auto",
        "a weight's range ends at its largest value (max), or at the least squared error (mse); auto: mse below 8 bits",
        Choices(("auto", "max", "mse")),
    )
    search: str = setting(
        "none",
        "between methods, by what they do to the outputs",
        Choices(("none", "layerwise", "tournament")),
    )
    cache: str | None = setting(None, "a file: written after calibration, read instead of it", PLACE)
    random: bool = setting(False, "noise instead of images, for those who have none")


@dataclass
class ScheduleConfig:
    """Fine-tuning. Milestones are fractions of all optimizer steps, from 0 (at once) to 1 (never)."""

    epochs: int = setting(1, "of fine-tuning; 0: calibration alone", Range(0))
    max_steps: int | None = setting(None, "optimizer steps; ends earlier than epochs when set", COUNT)
    optimizer: str = setting("sgd", "of fine-tuning and of the float model", Choices(("sgd", "adamw")))
    lr: float = setting(1e-3, "learning rate of fine-tuning", POSITIVE)
    scale_lr: float = setting(1.0, "learning rate of learned scales, as a share of lr", POSITIVE)
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
    freeze_batch_norm: float = setting(
        0.5, "milestone from which statistics are fixed (batch_norm=train)", FRACTION
    )
    batch_norm_images: int = setting(
        0,
        "of calibration, on which BatchNorms that were kept (batch_norm=freeze, train) get their statistics anew, with "
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

    accelerator: str = setting("auto", "where to train", Choices(("auto", "cpu", "gpu", "cuda", "mps")))
    devices: int = setting(1, "of each node", Range(1, all_of_them=True))
    num_nodes: int = setting(1, "machines", COUNT)
    strategy: str = setting(
        "auto", "of several processes", Choices(("auto", "ddp", "ddp_find_unused_parameters_true"))
    )
    compile: bool = setting(
        False,
        "the graph that trains, by torch.compile: faster steps after minutes of compiling; needs a C++ compiler",
    )
    channels_last: bool = setting(
        False, "images and activations with their channels innermost, as GPUs' convolutions want them"
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
        "tracking URI of an MLflow server (http://host:5000; an extra) that parameters, metrics and the bundle are "
        "logged to, in the experiment NAME",
        PLACE,
    )


@dataclass
class ExportConfig:
    """The ONNX file."""

    opset: int = setting(13, "of the standard operators", Range(13, 23))
    dynamic_batch: bool = setting(True, "false: the batch is verify.latency_batch")
    pack_int4: bool = setting(
        False,
        "store int4 weights in 4 bits, not in bytes (opset 21): half the size, and computed in float by ONNX Runtime",
    )
    mode: str = setting(
        "static",
        "other than static: the float model, untrained by schedule, through ONNX Runtime's tools",
        MODES,
    )
    io: str = setting(
        "float32",
        "what a static file takes and gives: normalised float images and float logits, or raw uint8 pixels and "
        "8-bit logits",
        Choices(("float32", "uint8")),
    )
    tensorrt_table: str | None = setting(
        None,
        'write the ranges for an engine built from the float file as well: TensorRT\'s release in digits, "8601"',
    )
    bundle: bool = setting(
        False, "at the end: all that whoever deploys needs, which qatkit-verify checks there"
    )
    bundle_as: str = setting("folder", "bundle/ or bundle.zip", Choices(("folder", "zip")))
    bundle_float: bool = setting(True, "the bundle holds the float file too, to compare with")
    golden_images: int = setting(8, "test images in the bundle, with what the file answers", Range(1, 256))
    sign: str | None = setting(None, "a PEM file of the Ed25519 private key that signs the bundle", PLACE)
    demo: bool = setting(False, "the bundle holds demo.html: the file runs in a browser, offline")
    demo_runtime: str | None = setting(
        None,
        "npm's onnxruntime-web (its dist folder), which the demo carries; null: of the nearest node_modules",
        PLACE,
    )
    encrypt_bundle: bool = setting(
        False, "the bundle is one more encrypted file, bundle.zip.encrypted: with export.encrypt"
    )
    publish: str | None = setting(
        None,
        "a folder or a URL (s3://bucket/prefix, an extra) that the bundle of a run that keeps its bounds goes to, as "
        "NAME/VERSION; never over one that is there",
        PLACE,
    )
    version: str | None = setting(
        None, "of the published bundle; null: the beginning of its manifest's SHA-256", PLACE
    )
    encrypt: str | None = setting(
        None,
        "a file with a key (python -m qatkit.encryption.command key FILE): checkpoints, caches and ONNX files of the "
        "run are encrypted with it on the disk, temporary files are in memory; the extra sign",
        PLACE,
    )


@dataclass
class VerifyConfig:
    """What is measured on the exported file, and the bounds that it must keep (null: not checked)."""

    images: int | None = setting(
        None, "of the test split that accuracy is measured on, balanced over the classes; null: all", COUNT
    )
    control: bool = setting(False, "fine-tune a float control by the same schedule, to compare with")
    every: int | None = setting(
        None,
        "epochs of fine-tuning from one export to the next, whose accuracy in ONNX Runtime on held_out images decides "
        "which epoch is kept; null: the last one",
        COUNT,
    )
    held_out: int = setting(
        1000, "training images that choose between epochs (every), and are trained on by none of them", COUNT
    )
    threads: int = setting(2, "of ONNX Runtime", COUNT)
    latency_batch: int = setting(1, "images", COUNT)
    latency_runs: int = setting(50, "of each file", COUNT)
    parity_images: int = setting(512, "that the file and the converted module are compared on", COUNT)
    max_drop: float | None = setting(
        1.0, "points of top-1, float minus INT8 in ONNX Runtime", Range(-100, 100)
    )
    min_float_agreement: float | None = setting(
        0.9,
        "of images without labels: share with the same top-1, float file and INT8 in ONNX Runtime",
        FRACTION,
    )
    max_float_kl: float | None = setting(
        0.05, "of images without labels: nats from the softmax of the float file to INT8's, mean", POSITIVE
    )
    min_float_sqnr: float | None = setting(
        12.0, "of images without labels: dB, logits of the float file over INT8's error", Range(-100, 200)
    )
    min_agreement: float | None = setting(
        0.999, "share of images with the same top-1, converted module and ONNX Runtime", FRACTION
    )
    target_isa: str | None = setting(
        None,
        "also keep min_agreement on x86 processors without VNNI, where 8-bit products saturate: emulated; null: on "
        "the processor that verifies alone",
        Choices(("avx2",)),
    )
    saturation_images: int = setting(256, "that are emulated, of all classes alike", COUNT)
    max_size_ratio: float | None = setting(None, "INT8 bytes / float bytes", POSITIVE)
    min_speedup: float | None = setting(None, "float latency / INT8 latency", POSITIVE)
    audit: bool = setting(
        True,
        "no weight dequantized at run time, every quantized operator runs int8; this and the size at the first "
        "export already, which ends a run that falls short",
    )
    runtimes: list[str] = setting(
        lambda: ["onnxruntime"],
        "that the file is measured in: onnxruntime, openvino (an extra), or the dotted path of a"
        " qatkit_verify.runtimes.base.Runtime",
    )
    checks: list[str] = setting(
        lambda: [
            "qatkit.verify.checks.latency.LatencyCheck",  # first: data loading leaves no worker behind yet
            "qatkit.verify.checks.runtimes.RuntimesCheck",
            "qatkit.verify.checks.accuracy.AccuracyCheck",
            "qatkit.verify.checks.fidelity.FidelityCheck",
            "qatkit.verify.checks.size.SizeCheck",
            "qatkit.verify.checks.parity.ParityCheck",
            "qatkit.verify.checks.audit.AuditCheck",
            "qatkit.verify.checks.saturation.SaturationCheck",
        ],
        "dotted paths of qatkit.verify.checks.base.Check classes, in the order in which they run",
    )


@dataclass
class AnalysisConfig:
    """What is looked into beside the figures: which side loses, which layers matter, where a tensor goes wrong."""

    isolation: bool = setting(False, "float, weights alone, activations alone and both, on the same images")
    sensitivity: str = setting(
        "none",
        "of every weight and activation: estimated in one pass, or then measured too, alone and left out",
        Choices(("none", "estimate", "exact")),
    )
    top: int | None = setting(
        None, "so many are measured, the most sensitive by the estimate; null: all of them", COUNT
    )
    layers: list[str] = setting(
        lambda: ["*"], 'which ones: paths ("layer1.0.conv1") or globs ("encoder.layers.*.mlp.*")'
    )
    images: int = setting(1000, "of the test split, balanced over the classes", COUNT)
    batch_size: int = setting(50, "images at a time; memory follows it", COUNT)
    tensors: int = setting(
        0, "images on which each tensor is compared: float, simulated, ONNX Runtime; 0: none", Range(0)
    )
    pictures: int = setting(
        0,
        "tensors whose histograms are drawn; with the extra pictures as PNG files too; 0: no pictures",
        Range(0),
    )


# Bounds of VerifyConfig in place of max_drop where the images have no labels.
UNLABELLED_BOUNDS = ("min_float_agreement", "max_float_kl", "min_float_sqnr")


@dataclass
class TargetConfig:
    """What is aimed at where there is a choice: algorithms compete, a precision is taken, a rescue climbs."""

    max_drop: float = setting(
        0.1, "points of top-1 below float, which itself would miss less than 0", Range(0, 100)
    )
    min_agreement: float = setting(
        0.99, "of images without labels: share with the same top-1 as float", FRACTION
    )
    min_speedup: float | None = setting(
        None,
        "float latency / this file's, of precision=auto: the most accurate point that is so fast is taken, in place of "
        "the fastest one that keeps the accuracy",
        POSITIVE,
    )


@dataclass
class PrecisionConfig:
    """Which operators are float in the file, for the accuracy that `target` asks for or the speed."""

    search: str = setting(
        "none",
        "auto: files with some operators in float are made, judged and timed, and the run goes on with the one that "
        "target asks for",
        Choices(("none", "auto")),
    )
    points: int = setting(8, "files of mixed precision that are made and measured, at most", COUNT)
    images: int = setting(256, "of calibration, on which what each operator loses is estimated", COUNT)
    front: str | None = setting(
        None, "folder of a run that has searched; with point, that point is built", PLACE
    )
    point: int | None = setting(None, "number of a point of that front", Range(0))


@dataclass
class RescueConfig:
    """The ladder back to float's accuracy, rung by rung, until the target is met."""

    climb: bool = setting(False, "naive PTQ first, then one thing better on each rung (qatkit.rescue.rungs)")
    full: bool = setting(False, "all rungs, whatever is met on the way")
    epochs: int = setting(1, "of the last rung, where the schedule trains nothing by itself", COUNT)


@dataclass
class SearchConfig:
    """A study of many runs, whose settings Optuna proposes; all workers of one command share it."""

    trials: int = setting(0, "runs in all, whoever runs them; 0: no search", Range(0, 100_000))
    space: dict[str, Any] = setting(
        dict,
        "KEY: [VALUE, ...], one of these, or KEY: {low: , high: , step: , log: true}, a number; a key is whatever the "
        "command line takes, groups included",
    )
    objectives: list[str] = setting(
        lambda: ["accuracy"],
        "of the file in ONNX Runtime, one or several: accuracy, drop, agreement, sqnr, latency, speedup, size",
    )
    constraints: list[str] = setting(
        list, "bounds on such figures, in points, ms and MB: [accuracy>=97, size<=3.5]"
    )
    storage: str | None = setting(
        None,
        "of the study. null: SQLite in its folder; journal: a file there, for workers on several machines; or a "
        "database's URL (postgresql://...)",
    )
    prune: bool = setting(
        True,
        "end a trial whose best accuracy so far is below the median of what the finished ones had by then",
    )
    startup: int = setting(
        8, "trials that are drawn at random, and that are finished before any ends early", Range(0)
    )
    attempts: int = setting(
        5,
        "of a trial whose worker was killed, before it counts as failed (one that a signal ended is none)",
        COUNT,
    )
    worker: int = setting(
        0, "of this worker a number: -m launcher=slurm search.worker=0,1,2,3 starts four", Range(0)
    )


@dataclass
class Config:
    """A whole run."""

    name: str = setting("run", "of the run, and of its folder", PLACE)
    seed: int = setting(0, "of every random draw", Range(0, 2**32 - 1))
    output_dir: str | None = setting(None, "folder of the run; null: outputs/NAME/DATE_TIME", PLACE)
    resume: str | None = setting(
        None, "auto: continue the newest unfinished run of this configuration; or a checkpoint's path", PLACE
    )
    checkpoint: str | None = setting(None, "export.py only: the checkpoint to export", PLACE)
    onnx: str | None = setting(
        None, "export.py only: a float ONNX file to quantize, instead of a checkpoint", PLACE
    )
    mode: str | None = setting(None, "with onnx: how it is quantized", MODES)
    placement: str = setting(
        "fixed",
        "which operators are int8. fixed: those of the backend's table; measured: files with others in float compete "
        "on this machine first; or a placement.json of such a run, perhaps of the machine that is deployed to",
        PLACE,
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    quantizer: QuantizerConfig = field(default_factory=QuantizerConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    algorithm: dict[str, Any] = setting(
        dict,
        "corrections without labels: NAME: {target: dotted path of a qatkit.algorithms.Algorithm, SETTING: value}, "
        "in the order of their stages, then as listed",
    )
    algorithm_choice: str = setting(
        "all",
        "all: every algorithm that is listed runs; auto: they compete, and those are kept that pay beyond noise on "
        "images that they have not seen",
        Choices(("all", "auto")),
    )
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    rescue: RescueConfig = field(default_factory=RescueConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
