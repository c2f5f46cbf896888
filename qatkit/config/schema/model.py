"""The groups `model` and `data`: the float model, and the source and preprocessing of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import COUNT, PLACE, POSITIVE, Choices, Range, setting
from qatkit.config.sizes import SIZE
from qatkit_verify.fitting import ALIGNMENTS, FITS, LAYOUTS, ORDERS, PIXELS
from qatkit_verify.sound_limits import LARGEST_MELS, LEAST_OFFSET, LOG_MEL, MFCC

WAVE_AXES, WAVE_SCALES = ("nt", "n1t", "nt1", "t"), ("unit", "int16")  # axes and value ranges of sound
# Sources with their own settings.
AUDIO, DRAWN, TEXT = "qatkit.data.audio.audio", "qatkit.data.drawn.drawn", "qatkit.data.text.text"
PAIRS, LABELLED = "qatkit.data.sentence_pairs.sentence_pairs", "qatkit.data.labelled_text.labelled_text"
MAPS = "qatkit.data.label_pictures.label_pictures"
VOC_BOXES, COCO_BOXES = "qatkit.data.boxed_pictures.voc_boxes", "qatkit.data.boxed_pictures.coco_boxes"
DIGITS_SPOKEN = "qatkit.data.spoken_digits.spoken_digits"
COMMANDS, TONES = "qatkit.data.speech_commands.speech_commands", "qatkit.data.tones.tones"
RECORDINGS = (DIGITS_SPOKEN, COMMANDS, TONES)  # sources of labelled recordings
PICTURE_AUGMENTATIONS = ("flip", "crop_flip", "resized_crop", "scale_flip")
SOUND_AUGMENTATIONS = ("shift", "shift_gain", "shift_gain_noise")
TEXTS = (TEXT, PAIRS, LABELLED)  # sources that read texts with a tokenizer


@dataclass
class ModelConfig:
    """The float model."""

    name: str = setting(
        "resnet18",
        'a torchvision.models name ("resnet18"), a timm name ("timm/resnet18"), a Hugging Face '
        'architecture, hub id or folder, with a head for the task ("hf/vit", '
        '"hf/google/vit-base-patch16-224", "hf//my/folder"), "lite/efficientnet-lite0", a float ONNX '
        'file ("onnx/FILE"), or the dotted path of your builder ("my_package.models.build")',
        PLACE,
    )
    weights: str | None = setting(
        None,
        'pretrained weights: a torchvision weight enum of that model ("IMAGENET1K_V1", "DEFAULT"), a '
        'timm tag ("a1_in1k", "DEFAULT"), for Hugging Face DEFAULT or a revision, for '
        "lite/efficientnet-lite0 DEFAULT; null: no pretrained weights",
    )
    checkpoint: str | None = setting(
        None,
        "file with a float state_dict, written by torch.save or in safetensors; model.weights then "
        "names the weights that training started from: they are not fetched, but their preprocessing "
        "is used; null: no file",
        PLACE,
    )
    checkpoint_key: str | None = setting(
        None,
        'which state_dict to load if the file contains several ("model_ema"); null: the trained '
        "weights, not an average of them",
    )
    num_classes: int | None = setting(
        None, "number of classes of the classifier; null: as many as the data has", COUNT
    )
    kwargs: dict[str, Any] = setting(
        dict,
        "further arguments of the builder; for hf/NAME, settings of the model's configuration; for "
        "onnx/FILE: fix (values of inputs that become constants), states (which output is which input "
        "of the next step) and custom_ops (library of custom operators)",
    )


@dataclass
class DataConfig:
    """The source of the samples and their preprocessing.

    Preprocessing settings (image_size to pixels) that are null come from the weights' own transforms, from the
    model.json next to an ONNX file, or from the source. If none of them has a value, the default in parentheses is
    used. Recordings are the samples of data=spoken_digits, speech_commands and tones.
    """

    source: str = setting("qatkit.data.digits", "dotted path of the function that returns the datasets")
    root: str | None = setting(None, "folder of the data, for sources that read one", PLACE)
    image_size: Any | None = setting(
        None, "size of the model's input in pixels: one number for a square, or [height, width]", SIZE
    )
    resize: Any | None = setting(
        None,
        "with fit=crop: size in pixels that a scaled image covers before the centre crop: one number "
        "for its shorter side, or [height, width]; null: image_size if that is set, else that of the "
        "weights",
        SIZE,
    )
    mean: list[float] | None = setting(
        None,
        "mean per channel of the model's input, in the units of data.pixels (default 0 with data.pixels=0..255)",
    )
    std: list[float] | None = setting(
        None,
        "standard deviation per channel of the model's input, in the units of data.pixels (default 1 "
        "with data.pixels=0..255)",
    )
    fit: str | None = setting(
        None,
        "how an image is brought to image_size. crop (default): scale it to cover data.resize, then "
        "crop the centre; resize: scale it to image_size and ignore its aspect ratio; letterbox: scale "
        "it to fit into image_size and fill the rest",
        Choices(FITS),
    )
    pad_value: float | None = setting(
        None, "fill value with fit=letterbox, from 0 to 255 (default 114)", Range(0, 255)
    )
    align: str | None = setting(
        None,
        "position of the image with fit=letterbox: center (default), which YOLO models of ultralytics"
        " expect, or top_left, which YOLOX, SCRFD and PaddleOCR expect",
        Choices(ALIGNMENTS),
    )
    channels: str | None = setting(None, "channel order of the model's input (default rgb)", Choices(ORDERS))
    layout: str | None = setting(
        None, "axis order of the model's input, a batch of images (default nchw)", Choices(LAYOUTS)
    )
    pixels: str | None = setting(
        None, "range of the pixel values to which mean and std apply (default 0..1)", Choices(PIXELS)
    )
    augment: str = setting(
        "none",
        "augmentation of training data. flip: mirror at random; crop_flip: mirror, and shift by up "
        "to an eighth; resized_crop: mirror, and scale a random part to image_size; scale_flip: "
        "mirror, and zoom by 0.5 to 1.5. For recordings, shift moves them by up to 100 ms either "
        "way, gain changes the level by up to 6 dB either way, noise is 10 to 40 dB below the signal",
        Choices(("none", *PICTURE_AUGMENTATIONS, *SOUND_AUGMENTATIONS)),
    )
    policy: str = setting(
        "none",
        "torchvision augmentation policy, in addition to data.augment; for float models that overfit "
        "their training images",
        Choices(("none", "trivial_augment", "rand_augment", "auto_augment", "aug_mix")),
    )
    batch_size: int = setting(64, "training samples per step and process", COUNT)
    eval_batch_size: int = setting(
        100, "test samples per batch; fewer if that many pictures need more than 64 MiB", COUNT
    )
    workers: int = setting(
        2,
        "data-loading processes, for passes that take longer than starting them; 0: load in the main process",
        Range(0),
    )
    cache: str = setting(
        "none",
        "ram: keep decoded images in memory, shared by the workers; the source must return the same "
        "item each time it is read; none: decode them each time",
        Choices(("none", "ram")),
    )
    cache_mb: int = setting(
        4000,
        "largest size of the cache of decoded images in MB, per training process; images that do not "
        "fit are decoded each time",
        COUNT,
    )
    train_images: int | None = setting(
        None,
        "size of the subset of the train split, seeded and balanced over classes; null: all samples",
        COUNT,
    )
    test_images: int | None = setting(
        None,
        "size of the subset of the test split, seeded and balanced over classes; null: all samples",
        COUNT,
    )
    bad: str = setting(
        "refuse",
        "what to do with files that cannot be read as images or sound. refuse: list them and end the "
        "run; skip: leave them out and report them",
        Choices(("refuse", "skip")),
    )
    download: bool = setting(
        True, "download the data set if data.root does not contain it and the source can fetch it"
    )
    rate: int | None = setting(
        None,
        "sample rate of the model's input in Hz, to which sound files of other rates are resampled; "
        "null: with data=audio, what the model's file says (metadata, or a fixed input such as sr), "
        "else 16000; 8000 with data=spoken_digits and tones, 16000 with data=speech_commands",
        COUNT,
    )
    frame: int | None = setting(
        None,
        "with data=audio: samples per input, needed if the model accepts any number; for recordings: "
        "samples per window (default 40 ms)",
        COUNT,
    )
    hop: int | None = setting(
        None,
        "samples from the start of one frame to the start of the next; null: data.frame with "
        "data=audio, half of data.frame for recordings",
        COUNT,
    )
    axes: str | None = setting(
        None,
        "with data=audio: axes of the input, n for the batch and t for time; null: inferred from its shape",
        Choices(WAVE_AXES),
    )
    scale: str | None = setting(
        None,
        "with data=audio: range of the samples. unit: -1..1 (default for a float input); int16: "
        "-32768..32767 (default for integer inputs)",
        Choices(WAVE_SCALES),
    )
    seconds: float | None = setting(
        None,
        "length of a recording in seconds; longer ones are cut, shorter ones are padded with zeros at"
        " the end (default 1)",
        POSITIVE,
    )
    features: str | None = setting(
        None,
        "features of recordings. log_mel (default): logarithm of the power in mel bands; mfcc: the "
        "first coefficients of the DCT of log_mel",
        Choices((LOG_MEL, MFCC)),
    )
    features_in: str | None = setting(
        None,
        "where features of recordings are computed. data (default): before the model, whose input is "
        "the features; graph: in float inside the file, whose input is samples [N, T]",
        Choices(("data", "graph")),
    )
    mels: int | None = setting(
        None, "number of mel bands for recordings (default 40)", Range(1, LARGEST_MELS, whole=True)
    )
    coefficients: int | None = setting(
        None,
        "number of DCT coefficients for data.features=mfcc (default 10), at most data.mels",
        Range(1, LARGEST_MELS, whole=True),
    )
    log_offset: float | None = setting(
        None,
        "value added to the power of a band before the logarithm, for recordings (default 1e-6)",
        Range(LEAST_OFFSET, 1),
    )
    count: int | None = setting(None, "with data=drawn: samples per split (default 64)", COUNT)
    sizes: Any | None = setting(
        None,
        "with data=drawn: sizes of dynamic axes. {AXIS: SIZE} by the axis name in the file, {INPUT: "
        "SIZE} or {INPUT: [SIZE, ...]}; null: 224 for inputs with 4 or more axes (pictures), 16000 "
        "for float inputs with a single axis of more than one value (sound), else 64",
    )
    ranges: Any | None = setting(
        None,
        "with data=drawn: {INPUT: [LOW, HIGH]}, both included; null: normal(0, 1) for float inputs, "
        "the rows of the table for ids that index one, the full range of the type for 8-bit "
        "integers, 0 and 1 for other integers",
    )
    context: int | None = setting(
        None,
        "with data=text: tokens per window, which is one sample (default 512); with "
        "data=sentence_pairs or labelled_text: maximum tokens of a sentence or text (default 128)",
        Range(2, whole=True),
    )
    tokenizer: str | None = setting(
        None, "folder with a tokenizer.json, or that file, for text; null: the one next to the model", PLACE
    )
    ignored: list[int] | None = setting(
        None,
        "with data=label_pictures: label values whose pixels count neither as right nor as wrong; null: 255",
    )
    columns: list[str] | None = setting(
        None,
        "with data=labelled_text: column names (or keys) [TEXT, LABEL], or [TEXT, SECOND, LABEL] for "
        "pairs; null: label, and one or two columns whose names begin with text or sentence",
    )
