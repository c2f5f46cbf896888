"""The file that is made, and what is measured on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qatkit.config.fields import AXES, COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting

# How a file is quantized: by simulation and training, or by ONNX Runtime's tools (qatkit.export.ort_modes).
MODES = Choices(("dynamic", "static", "float16", "weight_only"))
CLEAN, SUMMARY, ENCODINGS = "clean", "summary", "encodings"
FILE_MODES = Choices((*MODES.values, CLEAN, SUMMARY, ENCODINGS))  # of a given file
# Bounds of VerifyConfig in place of max_drop where the images have no labels.
UNLABELLED_BOUNDS = ("min_float_agreement", "max_float_kl", "min_float_sqnr")


@dataclass
class ExportConfig:
    """The ONNX file."""

    opset: int = setting(13, "of the standard operators", Range(13, 23))
    dynamic_batch: bool = setting(True, "false: the batch is verify.latency_batch")
    dynamic_axes: Any = setting(
        "none",
        "axes beside the batch that the file takes other sizes of: none; auto, all that the model leaves free; or "
        "their names by input and axis, {input: {2: height, 3: width}}, where one name stands for one size. A given "
        "ONNX file keeps its own",
        AXES,
    )
    pack_int4: bool = setting(
        False,
        "store weights of int4, int3 and int2 in 4 bits, not in bytes (opset 21): half the size, and computed in float "
        "by ONNX Runtime",
    )
    weights_for_amx: bool = setting(
        False,
        "store weights of convolutions one lower, with the zero point -1: the same bits come out, by kernels that are "
        "faster on a CPU with AMX and slower on others; placement=measured tries it where there is AMX",
    )
    mode: str = setting(
        "static",
        "other than static: the float model, untrained by schedule, through ONNX Runtime's tools",
        MODES,
    )
    io: str = setting(
        "float32",
        "what a static file takes and gives: normalised float images and float outputs, or raw uint8 pixels and "
        "8-bit outputs",
        Choices(("float32", "uint8")),
    )
    tensorrt_table: str | None = setting(
        None,
        'write the ranges for an engine built from the float file as well: TensorRT\'s release in digits, "8601"',
    )
    decoder: bool = setting(
        False,
        "of a language model (task=causal_lm): also a folder with a file that takes keys and values of earlier tokens, "
        "the tokenizer, a program that continues text, and the configuration of onnxruntime-genai",
    )
    nms: bool = setting(
        True,
        "of a detector (task=detection): also a file with non-maximum suppression behind its boxes, whose rows are "
        "picture, corners, score and class",
    )
    nms_score: float = setting(0.05, "of a box that is kept", FRACTION)
    nms_overlap: float = setting(0.6, "from which a better box of its class suppresses a box", FRACTION)
    nms_boxes: int = setting(100, "of each class of a picture, at most", COUNT)
    stream: bool = setting(
        False,
        "also a file that takes a recording in chunks, with the states of LSTM, GRU and RNN as inputs and outputs; one "
        "axis of the input beside the batch has to be free (dynamic_axes)",
    )
    accuracy_level: str = setting(
        "0",
        "of products with packed weights (backend=weight_only), of the decoder where there is one: 0 computes what the "
        "simulation does; 4 rounds activations to 8 bits; auto: 4 where it is faster here and costs little on "
        "calibration samples, half a percent of the metric (or perplexity), or 1 % of the decisions without labels",
        Choices(("0", "4", "auto")),
    )
    packed_weights: str = setting(
        "matmul_nbits",
        "how packed weights (backend=weight_only) are stored: matmul_nbits for ONNX Runtime's own operator, "
        "dequantize_linear for the standard one with blocks, which other runtimes read, too (opset 21; 25 for 2 bits). "
        "Of number formats (backend=simulated) the former are bytes that standard operators unpack, the latter tensors "
        "of float8 (export.opset 19, 21 for mxfp8) or int8 (21 for mxint8 and bfp16)",
        Choices(("matmul_nbits", "dequantize_linear")),
    )
    bundle: bool = setting(
        False, "at the end: all that whoever deploys needs, which qatkit-verify checks there"
    )
    bundle_as: str = setting("folder", "bundle/ or bundle.zip", Choices(("folder", "zip")))
    bundle_float: bool = setting(True, "the bundle holds the float file too, to compare with")
    golden_images: int = setting(
        8, "test images (or samples of arrays) in the bundle, with what the file answers", Range(1, 256)
    )
    sign: str | None = setting(None, "a PEM file of the Ed25519 private key that signs the bundle", PLACE)
    demo: bool = setting(False, "the bundle holds demo.html: the file runs on pictures in a browser, offline")
    demo_runtime: str | None = setting(
        None,
        "npm's onnxruntime-web (its dist folder), which the demo carries; null: of the nearest node_modules",
        PLACE,
    )
    encrypt_bundle: bool | None = setting(
        None,
        "the bundle is one more encrypted file, bundle.zip.encrypted; null: where there is a key (export.encrypt), and "
        "nothing is published",
    )
    publish: str | None = setting(
        None,
        "a folder or a URL (s3://bucket/prefix, an extra) that the bundle of a run that meets its bounds goes to, as "
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

    @property
    def seals_bundle(self) -> bool:
        """Whether the bundle is encrypted: `encrypt_bundle`, or what null means."""
        asked = self.encrypt_bundle
        return self.encrypt is not None and self.publish is None if asked is None else asked

    def kept(self) -> ExportConfig:
        """The same file, and nothing that leaves the house."""
        return replace(
            self, bundle=False, demo=False, sign=None, publish=None, version=None, encrypt_bundle=None
        )


@dataclass
class EncodingsConfig:
    """What mode=encodings writes of a quantized ONNX file."""

    format: str = setting(
        "qatkit",
        "of encodings.json: qatkit, which has everything, or one of AIMET's versions, which have integers alone "
        "(up to 1.0.0 without biases)",
        Choices(("qatkit", "aimet_0.6.1", "aimet_1.0.0", "aimet_2.0.0")),
    )


@dataclass
class VerifyConfig:
    """What is measured on the exported file, and the bounds that it must meet (null: not checked)."""

    images: int | None = setting(
        None, "of the test split that accuracy is measured on, balanced over the classes; null: all", COUNT
    )
    control: bool = setting(False, "fine-tune a float control by the same schedule, to compare with")
    every: int | None = setting(
        None,
        "epochs of fine-tuning from one export to the next, whose accuracy in ONNX Runtime on held_out images decides "
        "which epoch, or the start, is kept; null: the last one",
        COUNT,
    )
    validation: bool = setting(
        False,
        "held_out training images are kept apart, and the file is measured on them too: what a search, which sets "
        "this, chooses trials by; every has it by itself",
    )
    held_out: int | None = setting(
        None,
        "training images that choose between epochs (every) and trials (search), and that neither train nor calibrate; "
        "null: a fifth of them, at most 1000",
        COUNT,
    )
    threads: int = setting(2, "of ONNX Runtime", COUNT)
    latency_batch: int = setting(1, "images", COUNT)
    latency_runs: int = setting(50, "of each file", COUNT)
    parity_images: int = setting(
        512,
        "that the file and the converted module are compared on; more where these fall short of min_agreement by what "
        "chance may do",
        COUNT,
    )
    max_drop: float | None = setting(
        1.0,
        "points (or the unit of the task's main metric) that INT8 may be worse than float in ONNX Runtime",
        Range(-100, 100),
    )
    decision: str = setting(
        "auto",
        "with task=outputs: what two outputs have the same where they agree. cosine(LEAST): their direction (0.99); "
        "argmax(AXIS); threshold(VALUE); equal: whole numbers; boxes(SCORE): a detector's boxes, as F1; "
        "strings(BLANK): a CTC recognizer's texts; mask(THRESHOLD): mean IoU, or the share of pixels of the same "
        "class; the dotted path of a function from outputs [N, ...] to integers or booleans; auto: argmax(1) of rows "
        "that add up to 1, threshold(0.5) of one value in 0..1, equal of whole numbers, mask and boxes where values "
        "leave no doubt, else cosine",
    )
    min_float_agreement: float | None = setting(
        0.9,
        "of images without labels: share with the same decision (of boxes: F1), float file and INT8 in ONNX Runtime; "
        "of a model with states over steps in which each file has its own",
        FRACTION,
    )
    max_float_kl: float | None = setting(
        0.05, "of images without labels: nats from the softmax of the float file to INT8's, mean", POSITIVE
    )
    min_float_sqnr: float | None = setting(
        12.0,
        "of images without labels: dB, outputs of the float file over INT8's error; with states as min_float_agreement",
        Range(-100, 200),
    )
    min_agreement: float | None = setting(
        0.999,
        "share of images with the same decision, converted module and ONNX Runtime; another one within half a step of "
        "the output is a tie, and counts as the same",
        FRACTION,
    )
    target_isa: str | None = setting(
        None,
        "also meet min_agreement on x86 processors without VNNI, where 8-bit products saturate: emulated; null: on "
        "the processor that verifies alone",
        Choices(("avx2",)),
    )
    saturation_images: int = setting(256, "that are emulated, of all classes alike", COUNT)
    max_size_ratio: float | None = setting(None, "INT8 bytes / float bytes", POSITIVE)
    min_speedup: float | None = setting(None, "float latency / INT8 latency", POSITIVE)
    outputs: bool = setting(
        False,
        "how near each output is to the float file's over parity_images test samples: SQNR, cosine and L2 distance; "
        "with task=outputs and no labels in any case",
    )
    dynamic: bool = setting(
        False,
        "measure ONNX Runtime's dynamic int8 of the same float file beside it: whether quantization without any "
        "calibration would have been enough",
    )
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
    examples: int = setting(
        4,
        "test samples that report.html draws, those where INT8 and float differ most, of a task that draws any "
        "(class maps, boxes, spectrograms); 0: none, since the page holds their pictures",
        Range(0, 50),
    )
    checks: list[str] = setting(
        lambda: [
            "qatkit.verify.checks.latency.LatencyCheck",  # first: data loading leaves no worker behind yet
            "qatkit.verify.checks.runtimes.RuntimesCheck",
            "qatkit.verify.checks.accuracy.AccuracyCheck",
            "qatkit.verify.checks.fidelity.FidelityCheck",
            "qatkit.verify.checks.outputs.OutputsCheck",
            "qatkit.verify.checks.bias.BiasCheck",
            "qatkit.verify.checks.examples.ExamplesCheck",
            "qatkit.verify.checks.drift.DriftCheck",
            "qatkit.verify.checks.validation.ValidationCheck",
            "qatkit.verify.checks.size.SizeCheck",
            "qatkit.verify.checks.parity.ParityCheck",
            "qatkit.verify.checks.sizes.SizesCheck",
            "qatkit.verify.checks.decoder.DecoderCheck",
            "qatkit.verify.checks.detections.DetectionsCheck",
            "qatkit.verify.checks.stream.StreamCheck",
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
    histograms: bool = setting(
        False,
        "a PNG file for each weight and activation that tensors compares: its values, the ends of its range and its "
        "steps",
    )
