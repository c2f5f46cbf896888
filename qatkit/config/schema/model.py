"""What is quantized, and how: model, images, backend, quantizers, ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import COUNT, PLACE, POSITIVE, Choices, Range, setting
from qatkit.config.sizes import SIZE
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
