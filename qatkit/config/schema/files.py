"""The groups `export`, `encodings`, `verify` and `analysis`: the exported file, and what is measured on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qatkit.config.fields import AXES, COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting

# Modes of quantization: by simulation and training, or by ONNX Runtime's tools (qatkit.export.ort_modes).
MODES = Choices(("dynamic", "static", "float16", "weight_only"))
CLEAN, SUMMARY, ENCODINGS = "clean", "summary", "encodings"
FILE_MODES = Choices((*MODES.values, CLEAN, SUMMARY, ENCODINGS))  # modes for a given ONNX file
# Bounds of VerifyConfig that replace max_drop if the images have no labels.
UNLABELLED_BOUNDS = ("min_float_agreement", "max_float_kl", "min_float_sqnr")


@dataclass
class ExportConfig:
    """The settings of the ONNX file."""

    opset: int = setting(13, "version of the standard ONNX operator set", Range(13, 23))
    dynamic_batch: bool = setting(
        True, "whether the batch axis is dynamic; false: the batch size is verify.latency_batch"
    )
    dynamic_axes: Any = setting(
        "none",
        "dynamic axes of the inputs, besides the batch. none: no others; auto: all that the model "
        "allows; or names by input and axis, {input: {2: height, 3: width}}, where the same name "
        "means the same size. A given ONNX file keeps its own axes",
        AXES,
    )
    pack_int4: bool = setting(
        False,
        "store int4, int3 and int2 weights in 4 bits instead of a byte (opset 21): half the size, but"
        " ONNX Runtime computes them in float",
    )
    weights_for_amx: bool = setting(
        False,
        "store convolution weights lowered by one, with the zero point -1: the results are "
        "bit-identical, and the kernels are faster on a CPU with AMX but slower on others; "
        "placement=measured tries this on a CPU with AMX",
    )
    mode: str = setting(
        "static",
        "static: simulated quantization and training; dynamic, float16, weight_only: conversion of the "
        "float model by ONNX Runtime's tools, without training (described at the key mode)",
        MODES,
    )
    io: str = setting(
        "float32",
        "inputs and outputs of a static file. float32: normalised images in, float outputs; uint8: "
        "pixels 0..255 in, 8-bit outputs",
        Choices(("float32", "uint8")),
    )
    tensorrt_table: str | None = setting(
        None,
        "also write the ranges for a TensorRT engine built from the float file, for the TensorRT "
        'release with these digits ("8601"); null: no table',
    )
    decoder: bool = setting(
        False,
        "for a language model (task=causal_lm): also write a folder with a decoder (a file that "
        "reads and returns the keys and values of tokens), the tokenizer, a program that continues "
        "text, and the configuration of onnxruntime-genai",
    )
    nms: bool = setting(
        True,
        "for a detector (task=detection): also write a file that ends with non-maximum suppression; "
        "its output has one row per box: picture, four corners, score, class",
    )
    nms_score: float = setting(0.05, "minimum score of a box that is kept", FRACTION)
    nms_overlap: float = setting(
        0.6, "overlap (IoU) from which a better box suppresses another box of its class", FRACTION
    )
    nms_boxes: int = setting(100, "maximum number of boxes per class and picture", COUNT)
    stream: bool = setting(
        False,
        "also write a file that processes a recording in chunks, with the states of LSTM, GRU and RNN "
        "as inputs and outputs; export.dynamic_axes must make one input axis besides the batch dynamic",
    )
    accuracy_level: str = setting(
        "0",
        "accuracy of products with packed weights (backend=weight_only); with export.decoder=true, it "
        "applies only to the decoder. 0: compute what the simulation does; 4: round activations to 8 "
        "bits; auto: 4 if it is faster on this machine and costs at most half a percent of the metric "
        "(for a decoder, of the perplexity) on calibration samples, or changes at most 1 % of the "
        "decisions if there are no labels",
        Choices(("0", "4", "auto")),
    )
    packed_weights: str = setting(
        "matmul_nbits",
        "storage of packed weights. With backend=weight_only, matmul_nbits: ONNX Runtime's own operator; "
        "dequantize_linear: the standard operator with blocks, which other runtimes read as well "
        "(opset 21; 25 for 2 bits). With backend=simulated, matmul_nbits: bytes that standard operators "
        "unpack; dequantize_linear: tensors of float8 (export.opset 19; 21 for mxfp8) or int8 (21 for "
        "mxint8 and bfp16)",
        Choices(("matmul_nbits", "dequantize_linear")),
    )
    bundle: bool = setting(
        False,
        "at the end, if the file meets its bounds, write a bundle of everything that a deployment "
        "needs; qatkit-verify checks it on the target machine",
    )
    bundle_as: str = setting(
        "folder", "form of the bundle. folder: bundle/; zip: bundle.zip", Choices(("folder", "zip"))
    )
    bundle_float: bool = setting(True, "include the float file in the bundle, for comparison")
    golden_images: int = setting(
        8,
        "number of test samples in the bundle, together with the outputs of the file",
        Range(1, 256),
    )
    sign: str | None = setting(
        None, "PEM file with the Ed25519 private key that signs the bundle; null: not signed", PLACE
    )
    demo: bool = setting(
        False, "include demo.html in the bundle, which runs the file on pictures in a browser, offline"
    )
    demo_runtime: str | None = setting(
        None,
        "dist folder of the npm package onnxruntime-web, which the demo includes; null: that of the "
        "nearest node_modules",
        PLACE,
    )
    encrypt_bundle: bool | None = setting(
        None,
        "encrypt the bundle as one file, bundle.zip.encrypted; null: only if there is a key "
        "(export.encrypt) and nothing is published",
    )
    publish: str | None = setting(
        None,
        "folder or URL (s3://bucket/prefix needs the extra publish) to which the bundle is published "
        "as NAME/VERSION if the run meets its bounds; an existing version is never overwritten; null: "
        "not published",
        PLACE,
    )
    version: str | None = setting(
        None, "version of the published bundle; null: the first digits of the SHA-256 of its manifest", PLACE
    )
    encrypt: str | None = setting(
        None,
        "key file (python -m qatkit.encryption.command key FILE) with which checkpoints, caches and "
        "ONNX files of the run are encrypted on disk; temporary files stay in memory; needs the "
        "extra sign; null: no encryption",
        PLACE,
    )

    @property
    def seals_bundle(self) -> bool:
        """Returns whether the bundle is encrypted: `encrypt_bundle`, or its default if it is null."""
        asked = self.encrypt_bundle
        return self.encrypt is not None and self.publish is None if asked is None else asked

    def kept(self) -> ExportConfig:
        """Returns settings for the same file without a bundle, its demo page and signature, and its publication."""
        return replace(
            self, bundle=False, demo=False, sign=None, publish=None, version=None, encrypt_bundle=None
        )


@dataclass
class EncodingsConfig:
    """The settings of mode=encodings, which writes the scales and zero points of a quantized ONNX file."""

    format: str = setting(
        "qatkit",
        "format of encodings.json. qatkit: complete; aimet_0.6.1, aimet_1.0.0, aimet_2.0.0: that "
        "version of AIMET's format, which has only integer types, and biases only in 2.0.0",
        Choices(("qatkit", "aimet_0.6.1", "aimet_1.0.0", "aimet_2.0.0")),
    )


@dataclass
class VerifyConfig:
    """The measurements on the exported file, and the bounds that it must meet (null: not checked)."""

    images: int | None = setting(
        None,
        "samples of the test split on which accuracy is measured, balanced over the classes; null: all",
        COUNT,
    )
    control: bool = setting(False, "also fine-tune a float control with the same schedule, for comparison")
    every: int | None = setting(
        None,
        "epochs of fine-tuning between exports; the epoch whose file has the best accuracy in ONNX "
        "Runtime on the held-out samples (verify.held_out) is kept, or the state before training; null: "
        "keep the last epoch",
        COUNT,
    )
    validation: bool = setting(
        False,
        "hold out training samples (verify.held_out) and also measure the file on them; a search sets "
        "this and compares trials by these figures; not needed with verify.every",
    )
    held_out: int | None = setting(
        None,
        "number of training samples that are held out to choose between epochs (verify.every) or trials "
        "(search.trials), and used neither for training nor for calibration; null: a fifth of the "
        "training samples, at most 1000",
        COUNT,
    )
    threads: int = setting(
        2, "threads of ONNX Runtime, except for accuracy, which is measured on all cores", COUNT
    )
    latency_batch: int = setting(
        1,
        "batch size in samples for the latency measurement, and of the file with export.dynamic_batch=false",
        COUNT,
    )
    latency_runs: int = setting(50, "timed runs per file", COUNT)
    parity_images: int = setting(
        512,
        "samples on which the file and the converted module are compared; more if the agreement is "
        "below verify.min_agreement by an amount that chance can explain",
        COUNT,
    )
    max_drop: float | None = setting(
        1.0,
        "maximum loss of INT8 against float in ONNX Runtime, in points (or the unit of the task's "
        "main metric)",
        Range(-100, 100),
    )
    decision: str = setting(
        "auto",
        "with task=outputs: the rule by which two outputs agree. cosine(LEAST): their cosine "
        "similarity is at least LEAST (0.99); argmax(AXIS): the same index is largest along the axis "
        "(-1); threshold(VALUE): the same elements exceed VALUE (0.5); equal: integers are equal; "
        "boxes(SCORE): a detector finds the same boxes above SCORE (0.3), as F1; strings(BLANK): a "
        "CTC recognizer with the blank class BLANK (0) reads the same text; mask(THRESHOLD): mean "
        "IoU of the pixels above THRESHOLD (0.5), or the share of pixels with the same class; or the "
        "dotted path of a function from outputs [N, ...] to integers or booleans; auto: argmax(1) "
        "for rows that add up to 1, threshold(0.5) for one value in 0..1, equal for integers, mask "
        "and boxes if the values are unambiguous, else cosine",
    )
    min_float_agreement: float | None = setting(
        0.9,
        "minimum share of unlabelled samples on which the float file and INT8 make the same decision "
        "(boxes: F1) in ONNX Runtime; for a model with states, each file computes its own states "
        "from step to step",
        FRACTION,
    )
    max_float_kl: float | None = setting(
        0.05,
        "maximum mean KL divergence in nats from the softmax of the float file to that of INT8, on "
        "unlabelled samples",
        POSITIVE,
    )
    min_float_sqnr: float | None = setting(
        12.0,
        "minimum signal-to-quantization-noise ratio (SQNR) of INT8's outputs against the float file's "
        "in dB, on unlabelled samples; states are treated as in verify.min_float_agreement",
        Range(-100, 200),
    )
    min_agreement: float | None = setting(
        0.999,
        "minimum share of samples on which the converted module and ONNX Runtime make the same decision; a "
        "different decision within half a step of the output counts as the same",
        FRACTION,
    )
    target_isa: str | None = setting(
        None,
        "avx2: verify.min_agreement must also be met on x86 processors without VNNI, where 8-bit "
        "products saturate, which is emulated; null: only on the processor that verifies",
        Choices(("avx2",)),
    )
    saturation_images: int = setting(
        256, "number of samples on which saturation is emulated, balanced over the classes", COUNT
    )
    max_size_ratio: float | None = setting(None, "maximum of INT8 bytes / float bytes", POSITIVE)
    min_speedup: float | None = setting(None, "minimum of float latency / INT8 latency", POSITIVE)
    outputs: bool = setting(
        False,
        "measure how close each output is to that of the float file on parity_images test samples: "
        "SQNR, cosine and L2 distance; always on with task=outputs and no labels",
    )
    dynamic: bool = setting(
        False,
        "also measure ONNX Runtime's dynamic int8 version of the same float file, to see whether "
        "quantization without calibration is enough",
    )
    audit: bool = setting(
        True,
        "check that no weight is dequantized at run time and that every quantized operator runs in "
        "int8. true: this and verify.max_size_ratio are already checked after the first export, and a "
        "run that misses them ends there",
    )
    runtimes: list[str] = setting(
        lambda: ["onnxruntime"],
        "runtimes in which the file is measured: onnxruntime, openvino (needs the extra openvino), or "
        "the dotted path of a qatkit_verify.runtimes.base.Runtime",
    )
    examples: int = setting(
        4,
        "number of test samples drawn in report.html, those on which INT8 and float differ most, if "
        "the task can draw any (class maps, boxes, spectrograms); 0: none, so that the page contains "
        "no pictures of the data",
        Range(0, 50),
    )
    checks: list[str] = setting(
        lambda: [
            "qatkit.verify.checks.latency.LatencyCheck",  # first, since data loading leaves a worker behind
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
    """The analyses that explain a loss of accuracy: errors of weights and activations, sensitive layers and so on."""

    isolation: bool = setting(
        False,
        "compare float, only weights quantized, only activations quantized, and both, on the same samples",
    )
    sensitivity: str = setting(
        "none",
        "sensitivity of every weight and activation. none: not computed; estimate: estimated for all "
        "of them in one pass over the samples; exact: each is also measured alone, once as the only "
        "quantized one and once as the only float one",
        Choices(("none", "estimate", "exact")),
    )
    top: int | None = setting(
        None,
        "number of weights and activations that sensitivity=exact measures, those with the highest "
        "estimates; null: all",
        COUNT,
    )
    layers: list[str] = setting(
        lambda: ["*"],
        'which operators are analysed: paths ("layer1.0.conv1") or globs ("encoder.layers.*.mlp.*")',
    )
    images: int = setting(
        1000,
        "samples of the test split for analysis.isolation and analysis.sensitivity, balanced over the classes",
        COUNT,
    )
    batch_size: int = setting(50, "samples per batch; determines the memory use", COUNT)
    tensors: int = setting(
        0,
        "number of samples on which each tensor is compared between float, simulation and ONNX "
        "Runtime; 0: no comparison",
        Range(0),
    )
    pictures: int = setting(
        0,
        "number of tensors whose histograms are drawn in report.html, among those that "
        "analysis.tensors compares; 0: none. Above 0, and with matplotlib (the extra `pictures`), the "
        "analyses are also drawn as PNG files",
        Range(0),
    )
    histograms: bool = setting(
        False,
        "write a PNG file for each weight and activation that analysis.tensors compares: a histogram "
        "of its values, with its range and steps",
    )
