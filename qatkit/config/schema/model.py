"""What is quantized, and how: model, images, backend, quantizers, ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import BITS, BLOCK, COUNT, PLACE, POSITIVE, SCALES, SWITCH, Choices, Range, setting
from qatkit.config.sizes import SIZE
from qatkit.quant.spec import ACTIVATIONS, BIAS_TYPES, FORMAT_NAMES, SCALE_TYPES, SCALE_VALUES, SIGNED
from qatkit_verify.fitting import ALIGNMENTS, FITS, LAYOUTS, ORDERS, PIXELS
from qatkit_verify.sound_limits import LARGEST_MELS, LEAST_OFFSET, LOG_MEL, MFCC

WAVE_AXES, WAVE_SCALES = ("nt", "n1t", "nt1", "t"), ("unit", "int16")  # of sound
# Sources with settings of their own.
AUDIO, DRAWN, TEXT = "qatkit.data.audio.audio", "qatkit.data.drawn.drawn", "qatkit.data.text.text"
PAIRS, LABELLED = "qatkit.data.sentence_pairs.sentence_pairs", "qatkit.data.labelled_text.labelled_text"
MAPS = "qatkit.data.label_pictures.label_pictures"
VOC_BOXES, COCO_BOXES = "qatkit.data.boxed_pictures.voc_boxes", "qatkit.data.boxed_pictures.coco_boxes"
DIGITS_SPOKEN = "qatkit.data.spoken_digits.spoken_digits"
COMMANDS, TONES = "qatkit.data.speech_commands.speech_commands", "qatkit.data.tones.tones"
RECORDINGS = (DIGITS_SPOKEN, COMMANDS, TONES)  # sources of recordings with a label each
PICTURE_AUGMENTATIONS = ("flip", "crop_flip", "resized_crop", "scale_flip")
SOUND_AUGMENTATIONS = ("shift", "shift_gain", "shift_gain_noise")
TEXTS = (TEXT, PAIRS, LABELLED)  # sources that read texts with a tokenizer


@dataclass
class ModelConfig:
    """The float model."""

    name: str = setting(
        "resnet18",
        'a torchvision.models name ("resnet18"), one of timm\'s ("timm/resnet18"), an architecture, a hub id or a '
        'folder of Hugging Face\'s with the head that task asks for ("hf/vit", "hf/google/vit-base-patch16-224", '
        '"hf//my/folder"), '
        '"lite/efficientnet-lite0", a float ONNX file ("onnx/FILE"), or the dotted path '
        ' of your builder ("my_package.models.build")',
        PLACE,
    )
    weights: str | None = setting(
        None,
        'one of torchvision\'s weight enums for that model ("IMAGENET1K_V1", "DEFAULT"), a tag of timm\'s '
        '("a1_in1k", "DEFAULT"), or DEFAULT or a revision for Hugging Face\'s and lite/efficientnet-lite0',
    )
    checkpoint: str | None = setting(
        None,
        "a file with a float state_dict: torch.save's, as training scripts write them, or safetensors; with "
        "model.weights of a model that began from those, which are not fetched then: their preprocessing holds",
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

    What is left null of how they are prepared (image_size to pixels) comes from the weights' own transforms, or from
    the model.json beside an ONNX file; without either it is the default in parentheses.
    """

    source: str = setting("qatkit.data.digits", "dotted path of a function that returns the datasets")
    root: str | None = setting(None, "folder of the images, for sources that read one", PLACE)
    image_size: Any | None = setting(
        None, "pixels of the model's input: one number for a square, or [height, width]", SIZE
    )
    resize: Any | None = setting(
        None,
        "with fit=crop: pixels that an image is scaled to cover before the centre crop, one number for the shorter "
        "side, or [height, width]; null: image_size",
        SIZE,
    )
    mean: list[float] | None = setting(
        None, "per channel of the model's input, of its pixels (pixels=0..255: 0)"
    )
    std: list[float] | None = setting(
        None, "per channel of the model's input, of its pixels (pixels=0..255: 1)"
    )
    fit: str | None = setting(
        None,
        "crop (default): scaled to cover resize, then the centre crop; resize: scaled to image_size, whatever "
        "happens to the proportions; letterbox: scaled to fit into image_size, and the rest is filled",
        Choices(FITS),
    )
    pad_value: float | None = setting(
        None, "with fit=letterbox: what fills the rest, in 0..255 (default 114)", Range(0, 255)
    )
    align: str | None = setting(
        None,
        "with fit=letterbox: where the image lies, center (default), as ultralytics' YOLOs want it, or "
        "top_left, as YOLOX, SCRFD and PaddleOCR do",
        Choices(ALIGNMENTS),
    )
    channels: str | None = setting(
        None, "order of the channels of the model's input (default rgb)", Choices(ORDERS)
    )
    layout: str | None = setting(
        None, "axes of the model's input, a batch of images (default nchw)", Choices(LAYOUTS)
    )
    pixels: str | None = setting(
        None, "range of the pixels that mean and std are of (default 0..1)", Choices(PIXELS)
    )
    augment: str = setting(
        "none",
        "of training images; of recordings: shift by up to 100 ms each way, gain of up to 6 dB each way, noise 10 to "
        "40 dB below",
        Choices(("none", *PICTURE_AUGMENTATIONS, *SOUND_AUGMENTATIONS)),
    )
    policy: str = setting(
        "none",
        "torchvision's, that changes training images further; for float models that have learned their images by "
        "heart",
        Choices(("none", "trivial_augment", "rand_augment", "auto_augment", "aug_mix")),
    )
    batch_size: int = setting(64, "training images a step and process", COUNT)
    eval_batch_size: int = setting(
        100, "test images at a time; fewer where 64 MiB do not hold so many", COUNT
    )
    workers: int = setting(
        2, "processes that load images, of passes that outlast their start; 0: none of their own", Range(0)
    )
    cache: str = setting(
        "none",
        "ram: images that were decoded once stay in memory, shared by the workers; a source's items have to be the "
        "same whenever they are read",
        Choices(("none", "ram")),
    )
    cache_mb: int = setting(
        4000, "of decoded images at most, in each process that trains; others are decoded each time", COUNT
    )
    train_images: int | None = setting(
        None, "so many of the train split, seeded and balanced over classes; null: all", COUNT
    )
    test_images: int | None = setting(
        None, "so many of the test split, seeded and balanced over classes; null: all", COUNT
    )
    bad: str = setting(
        "refuse",
        "files that can't be read as images or sound: end the run with a list of them, or leave them out and say so",
        Choices(("refuse", "skip")),
    )
    download: bool = setting(True, "fetch a data set that is not in root, where the source can")
    rate: int | None = setting(
        None,
        "of sound: samples per second of the model's input, to which files of other rates are resampled; null: what "
        "the model's file says (metadata, or a fixed input such as sr), else 16000; of data=spoken_digits and tones "
        "8000",
        COUNT,
    )
    frame: int | None = setting(
        None,
        "data=audio: audio samples of an input, where the model takes any number of them; of recordings: samples of a "
        "window (default 40 ms)",
        COUNT,
    )
    hop: int | None = setting(
        None,
        "of sound: audio samples from the start of a frame to that of the next; null: frame, of recordings half of it",
        COUNT,
    )
    axes: str | None = setting(
        None,
        "data=audio: axes of the input, with n for the batch and t for time; null: found by its shape",
        Choices(WAVE_AXES),
    )
    scale: str | None = setting(
        None,
        "data=audio: unit: samples in -1..1 (default of a float input); int16: in -32768..32767 (default of integers)",
        Choices(WAVE_SCALES),
    )
    seconds: float | None = setting(
        None,
        "of recordings: longer ones are cut off, shorter ones get zeros behind them (default 1)",
        POSITIVE,
    )
    features: str | None = setting(
        None,
        "of recordings: log_mel (default), logarithms of the power in bands of the mel scale, or mfcc, the first "
        "coefficients of their DCT",
        Choices((LOG_MEL, MFCC)),
    )
    features_in: str | None = setting(
        None,
        "of recordings: data (default), the file takes features; graph: it takes samples [N, T] and computes features "
        "in float",
        Choices(("data", "graph")),
    )
    mels: int | None = setting(
        None, "of recordings: bands of the mel scale (default 40)", Range(1, LARGEST_MELS, whole=True)
    )
    coefficients: int | None = setting(
        None,
        "of features=mfcc: coefficients of the DCT, at most mels (default 10)",
        Range(1, LARGEST_MELS, whole=True),
    )
    log_offset: float | None = setting(
        None,
        "of recordings: added to the power of a band before the logarithm (default 1e-6)",
        Range(LEAST_OFFSET, 1),
    )
    count: int | None = setting(None, "data=drawn: samples of each split (default 64)", COUNT)
    sizes: Any | None = setting(
        None,
        "data=drawn: sizes of open axes: {AXIS: SIZE} by names in the file, {INPUT: SIZE} or {INPUT: [SIZE, ...]}; "
        "null: 224 of pictures, 16000 of sound, else 64",
    )
    ranges: Any | None = setting(
        None,
        "data=drawn: {INPUT: [LOW, HIGH]}, both included; null: floats are normal(0, 1), ids are rows of the table "
        "that they index, numbers of 8 bits are any, other integers 0 or 1",
    )
    context: int | None = setting(
        None,
        "data=text: tokens of a window; a sample is one (default 512); data=sentence_pairs, labelled_text: tokens of a "
        "sentence or text at most (default 128)",
        Range(2, whole=True),
    )
    tokenizer: str | None = setting(
        None, "of text: a folder with a tokenizer.json, or that file; null: the one beside the model", PLACE
    )
    ignored: list[int] | None = setting(
        None,
        "data=label_pictures: numbers of label pictures that count neither as right nor as wrong; null: 255",
    )
    columns: list[str] | None = setting(
        None,
        "data=labelled_text: names of the columns (or keys) [TEXT, LABEL], or [TEXT, SECOND, LABEL] of pairs; null: "
        "label, and one or two whose names begin with text or sentence",
    )


@dataclass
class OverrideConfig:
    """What one override pattern changes; null keeps the backend's choice. Float, int8, or at least one of the rest."""

    float: bool = setting(False, "leave the matched operators in floating point")
    int8: bool = setting(
        False,
        "compute SiLUs in 8 bits too, as Sigmoid and Mul, where backends keep one float operator between two pairs",
    )
    weight_dtype: str | None = setting(
        None,
        "of the weights; integers below 8 bits are kept in bytes, which int8 kernels take; number formats: "
        "backend=simulated",
        Choices((*SIGNED, *FORMAT_NAMES)),
    )
    weight_granularity: Any = setting(None, "as backend.weight_granularity, of these operators", SCALES)
    weight_symmetric: bool | None = setting(None, "as backend.weight_symmetric, of these operators")
    weight_scale_dtype: str | None = setting(None, "as backend.weight_scale_dtype", Choices(SCALE_TYPES))
    # Any: one number, or a list of them.
    weight_scale: Any = setting(
        None,
        "the scale of the weights, which neither calibration nor training moves; a list: of each output channel",
    )
    weight_zero_point: Any = setting(
        None, "that goes with weight_scale, where weights are not symmetric; a list too"
    )
    weight_range: Any = setting(
        None, "[LOW, HIGH] of the weights, in place of what they are: rmin and rmax of other tools"
    )
    weight_axis: int | None = setting(
        None,
        "one scale for each index along this axis of the weight, as the file has it: that of the output channels",
    )
    # Any: OmegaConf does not merge mappings of a dataclass with a union in it.
    reduce_range: Any = setting(None, "as backend.reduce_range, of these operators", SWITCH)
    activation_dtype: str | None = setting(
        None,
        "of inputs and outputs; uint4 is simulated: the file clips to 16 steps and computes in float; ONNX Runtime "
        "rounds to 16 bits and computes in float, too; number formats: backend=simulated",
        Choices((*ACTIVATIONS, *FORMAT_NAMES)),
    )
    activation_symmetric: bool | None = setting(None, "zero in the middle of the range")
    scale_type: str | None = setting(
        None, "as backend.scale_type, of the weights and outputs of these operators", Choices(SCALE_VALUES)
    )
    bias_dtype: str | None = setting(None, "as backend.bias_dtype, of these operators", Choices(BIAS_TYPES))
    activation_reduce_range: bool | None = setting(
        None, "gives up one bit: the range is spread over 128 of 256 steps"
    )
    activation_scale: Any = setting(None, "the scale, which neither calibration nor training moves")
    activation_zero_point: int | None = setting(
        None, "the integer that 0 is, with activation_scale, where the range is not symmetric"
    )
    activation_range: Any = setting(
        None, "[LOW, HIGH], in place of what calibration finds: rmin and rmax of other tools"
    )


@dataclass
class BackendConfig:
    """The target's rules by name, and overrides by pattern."""

    target: str = setting("qatkit.quant.backends.FBGEMM", "dotted path of a qatkit.quant.backends.Backend")
    reduce_range: bool | str = setting(
        "auto",
        "of weights, so that the file computes the same on x86 processors without VNNI; auto: no two weights that their"
        " kernels add up can saturate, at 8 bits; true: 7 bits; false: 8 bits, which may saturate there",
        SWITCH,
    )
    weight_dtype: str | None = setting(
        None,
        "of all weights, as an override has it; null: the backend's choice",
        Choices((*SIGNED, *FORMAT_NAMES)),
    )
    activation_dtype: str | None = setting(
        None,
        "of all activations, the model's inputs too, as an override has it; number formats: backend=simulated; "
        "null: the backend's choice",
        Choices((*ACTIVATIONS, *FORMAT_NAMES)),
    )
    activation_symmetric: bool | None = setting(
        None,
        "activations with zero in the middle of their range: signed ones have the zero point 0, unsigned ones 128 (or "
        "32768), and 0 where a ReLU ends the range at zero; null: the backend's choice",
    )
    # Any: a text or a mapping.
    weight_granularity: Any = setting(
        None,
        "one scale per tensor, per output channel, or (backend=weight_only) per block of an output channel's inputs; "
        "null: the backend's choice",
        SCALES,
    )
    weight_symmetric: bool | None = setting(
        None, "weights without zero points, zero in the middle of their range; null: the backend's choice"
    )
    weight_scale_dtype: str | None = setting(
        None,
        "type that holds the scales (backend=weight_only); uint8: quantized themselves, with one float32 per output "
        "channel (double quantization); null: the backend's choice",
        Choices(SCALE_TYPES),
    )
    scale_type: str | None = setting(
        None,
        "any scales (float), powers of two (pow2), numbers of float16, or integers of 15 bits times powers of two "
        "(int16), of weights and activations; those of int32 biases are their products; null: the backend's choice",
        Choices(SCALE_VALUES),
    )
    bias_dtype: str | None = setting(
        None,
        "of the biases of operators with quantized weights and activations; int16 and int8 have scales of their own, "
        "for NPUs, and float is float32: ONNX Runtime computes most of these operators in float; null: int32, at input "
        "scale times weight scale",
        Choices(BIAS_TYPES),
    )
    every_operator: bool = setting(
        False, "quantize the output of every operator, as naive tools do: to see what that costs"
    )
    overrides: dict[str, OverrideConfig] = setting(
        dict,
        "selector: {setting: value}; a selector is a name (of a module, or of a node of a given ONNX file), a glob "
        '("encoder.layers.*.mlp.*"), re/PATTERN, op/TYPE ("op/linear", "op/Gemm"), subgraph/NAME, tensor/NAME or '
        "input/K/SELECTOR (docs/overrides.md)",
    )
    overrides_file: str | None = setting(
        None,
        "a YAML or JSON file with further overrides, {selector: {setting: value}}: for names that a command line does "
        "not take; those of backend.overrides win",
        PLACE,
    )
    exclude: list[Any] = setting(
        list,
        "selectors of operators that stay float; one may be {from: [...], to: [...]}, all operators on a path between",
    )
    only: list[Any] = setting(
        list, "selectors of the only operators that are quantized, as backend.exclude has them; []: all"
    )
    # Any: a mapping with the key "from", which no dataclass has.
    subgraphs: dict[str, Any] = setting(
        dict,
        "name: {from: [...], to: [...]}, for subgraph/NAME: every operator on a path, both ends included",
    )


@dataclass
class WeightsConfig:
    """Weights of few bits in blocks, with onnx=FILE mode=weight_only: by the backend weight_only."""

    bits: int | None = setting(
        None,
        "of a weight; 4 or fewer are multiplied packed, and 3 take the room of 4; null: int8, one scale per channel, "
        "by ONNX Runtime's tools",
        BITS,
    )
    block: Any = setting(
        None,
        "inputs of an output channel that share a scale; of a channel with fewer inputs all of them do; null: 32",
        BLOCK,
    )
    symmetric: bool | None = setting(None, "weights without zero points; null: with zero points")
    scale_dtype: str | None = setting(
        None,
        "type that holds the scales: float32, float16, or uint8 (quantized themselves); null: float32",
        Choices(SCALE_TYPES),
    )


@dataclass
class QuantizerConfig:
    """Which classes quantize: how scales and roundings come about."""

    activation: str = setting(
        "qatkit.quant.fake_quantize.FakeQuantize", "dotted path of a qatkit.quant.fake_quantize.FakeQuantize"
    )
    weight: str = setting(
        "qatkit.quant.weight_fake_quantize.WeightFakeQuantize",
        "dotted path of a qatkit.quant.weight_fake_quantize.WeightFakeQuantize",
    )


@dataclass
class CalibrationConfig:
    """How activation ranges are found before fine-tuning."""

    observer: str = setting(
        "qatkit.quant.observers.MovingAverageMinMaxObserver",
        "dotted path of a qatkit.quant.observers.Observer",
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
    mean_shifts: str = setting(
        "correct",
        "of operators whose rounded weights shift the means of their outputs (inputs far from zero): the biases take "
        "the shifts back, or they are only reported",
        Choices(("correct", "report")),
    )
    mixed_scales: str = setting(
        "float",
        "of tensors whose small values one 8-bit scale loses (boxes beside scores, the input of a logarithm): the "
        "operators around them stay float, or they are only reported",
        Choices(("float", "report")),
    )
    cache: str | None = setting(None, "a file: written after calibration, read instead of it", PLACE)
    encodings: str | None = setting(
        None,
        "a file of scales and zero points by name of the tensor, which are fixed, and the others calibrated: "
        "encodings.json (mode=encodings), AIMET's, or a quantized ONNX file itself",
        PLACE,
    )
    random: bool = setting(False, "noise instead of images, for those who have none")
