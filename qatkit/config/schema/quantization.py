"""The groups `backend`, `weights`, `quantizer` and `calibration`: what is quantized, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import BITS, BLOCK, COUNT, PLACE, POSITIVE, SCALES, SWITCH, Choices, Range, setting
from qatkit.quant.spec import ACTIVATIONS, BIAS_TYPES, FORMAT_NAMES, SCALE_TYPES, SCALE_VALUES, SIGNED


@dataclass
class OverrideConfig:
    """The changes of one override; null keeps the backend's choice.

    Exactly one form is allowed: float, int8, or at least one of the other settings.
    """

    float: bool = setting(False, "keep the matched operators in float")
    int8: bool = setting(
        False,
        "also compute SiLUs in 8 bits, as Sigmoid and Mul, if the backend keeps them as one float "
        "operator between QuantizeLinear/DequantizeLinear pairs",
    )
    weight_dtype: str | None = setting(
        None,
        "number type of the weights; integers of fewer than 8 bits are stored in bytes, which int8 "
        "kernels read; float16 and the types after it need backend=simulated",
        Choices((*SIGNED, *FORMAT_NAMES)),
    )
    weight_granularity: Any = setting(
        None, "granularity of the weight scales of these operators, like backend.weight_granularity", SCALES
    )
    weight_symmetric: bool | None = setting(
        None, "symmetric weights for these operators, like backend.weight_symmetric"
    )
    weight_scale_dtype: str | None = setting(
        None, "type of the weight scales, like backend.weight_scale_dtype", Choices(SCALE_TYPES)
    )
    # Any: one number, or a list of numbers.
    weight_scale: Any = setting(
        None,
        "fixed scale of the weights, which calibration and training leave unchanged; a list: one per "
        "output channel",
    )
    weight_zero_point: Any = setting(
        None,
        "zero point for weight_scale, if the weights are not symmetric; a list: one per output channel",
    )
    weight_range: Any = setting(
        None, "[LOW, HIGH] of the weights, instead of their actual range: rmin and rmax of other tools"
    )
    weight_axis: int | None = setting(
        None,
        "axis of the output channels in the weight as stored in the file; each index along it has its "
        "own scale",
    )
    # Any: OmegaConf does not merge mappings of a dataclass with a union in it.
    reduce_range: Any = setting(
        None, "reduced range of the weights of these operators, like backend.reduce_range", SWITCH
    )
    activation_dtype: str | None = setting(
        None,
        "number type of the operators' outputs or of the selected tensors. For uint4, int16 and "
        "uint16, ONNX Runtime computes in float: the file clips to 16 steps, or rounds to 16 bits. "
        "float16 and the types after it need backend=simulated",
        Choices((*ACTIVATIONS, *FORMAT_NAMES)),
    )
    activation_symmetric: bool | None = setting(
        None, "symmetric activations, like backend.activation_symmetric"
    )
    scale_type: str | None = setting(
        None,
        "restriction on the scales of the weights and outputs of these operators, like backend.scale_type",
        Choices(SCALE_VALUES),
    )
    bias_dtype: str | None = setting(
        None, "bias type of these operators, like backend.bias_dtype", Choices(BIAS_TYPES)
    )
    activation_reduce_range: bool | None = setting(
        None, "use one bit less for activations: spread the range over 128 of 256 steps"
    )
    activation_scale: Any = setting(
        None, "fixed scale of the activation, which calibration and training leave unchanged"
    )
    activation_zero_point: int | None = setting(
        None, "zero point for activation_scale, if the activation is not symmetric"
    )
    activation_range: Any = setting(
        None, "[LOW, HIGH] of the activation, instead of the calibrated range: rmin and rmax of other tools"
    )


@dataclass
class BackendConfig:
    """The quantization rules of the deployment target, and overrides for chosen operators and tensors."""

    target: str = setting("qatkit.quant.backends.FBGEMM", "dotted path of a qatkit.quant.backends.Backend")
    reduce_range: bool | str = setting(
        "auto",
        "reduced range of the weights, so that the file computes the same on x86 processors without "
        "VNNI, whose kernels add pairs of products in 16 bits. auto: 8 bits, with scales at which no "
        "pair can saturate; true: 7 bits; false: 8 bits, which may saturate there",
        SWITCH,
    )
    weight_dtype: str | None = setting(
        None,
        "number type of all weights; float16 and the types after it need backend=simulated; null: the "
        "backend's choice",
        Choices((*SIGNED, *FORMAT_NAMES)),
    )
    activation_dtype: str | None = setting(
        None,
        "number type of all activations, including the model's inputs; float16 and the types after it "
        "need backend=simulated; null: the backend's choice",
        Choices((*ACTIVATIONS, *FORMAT_NAMES)),
    )
    activation_symmetric: bool | None = setting(
        None,
        "symmetric activations. Signed types: the zero point is 0. Unsigned types: it is the middle "
        "(128 for uint8), or 0 after a ReLU. null: the backend's choice",
    )
    # Any: a string or a mapping.
    weight_granularity: Any = setting(
        None,
        "granularity of the weight scales: one per tensor, per output channel, or "
        "(backend=weight_only) per block of an output channel's inputs; null: the backend's choice",
        SCALES,
    )
    weight_symmetric: bool | None = setting(
        None,
        "weights without zero points, with zero in the middle of their range; null: the backend's choice",
    )
    weight_scale_dtype: str | None = setting(
        None,
        "type of the weight scales (backend=weight_only). float32, float16: stored in this type; "
        "uint8: quantized themselves, with one float32 per output channel (double quantization); "
        "null: the backend's choice",
        Choices(SCALE_TYPES),
    )
    scale_type: str | None = setting(
        None,
        "restriction on the scales of weights and activations. float: any number; pow2: powers of "
        "two; float16: float16 numbers; int16: 15-bit integers times powers of two. Scales of int32 "
        "biases are the products of both; null: the backend's choice",
        Choices(SCALE_VALUES),
    )
    bias_dtype: str | None = setting(
        None,
        "bias type of operators with quantized weights and activations. int32: scale = input scale times "
        "weight scale; int16, int8: with scales of their own, for NPUs; float: float32, with which ONNX "
        "Runtime computes most of these operators in float; null: int32",
        Choices(BIAS_TYPES),
    )
    every_operator: bool = setting(
        False, "quantize the output of every operator, as naive tools do, to see what that costs"
    )
    overrides: dict[str, OverrideConfig] = setting(
        dict,
        "selector: {setting: value}; a selector is a name (of a module, or of a node of a given ONNX "
        'file), a glob ("encoder.layers.*.mlp.*"), re/PATTERN, op/TYPE ("op/linear", "op/Gemm"), '
        "subgraph/NAME, tensor/NAME or input/K/SELECTOR (docs/overrides.md)",
    )
    overrides_file: str | None = setting(
        None,
        "YAML or JSON file with further overrides, {selector: {setting: value}}, for names that the "
        "command line does not accept; backend.overrides takes precedence; null: no file",
        PLACE,
    )
    exclude: list[Any] = setting(
        list,
        "selectors of operators that stay float; {from: [...], to: [...]} selects all operators on "
        "the paths between",
    )
    only: list[Any] = setting(
        list, "selectors of the only operators to quantize, written like backend.exclude; []: all"
    )
    # Any: a mapping with the key "from", which cannot be the field of a dataclass.
    subgraphs: dict[str, Any] = setting(
        dict,
        "name: {from: [...], to: [...]} for subgraph/NAME: every operator on a path between these "
        "operators, which are included",
    )


@dataclass
class WeightsConfig:
    """The low-bit weights of onnx=FILE mode=weight_only (train.py has backend=weight_only for them)."""

    bits: int | None = setting(
        None,
        "bits per weight. Weights of 4 bits or fewer stay packed in matrix multiplications, and 3 bits take "
        "the space of 4; 8-bit weights are unpacked when the file is loaded; null: int8 with one scale "
        "per channel, by ONNX Runtime's tools",
        BITS,
    )
    block: Any = setting(
        None,
        "number of inputs of an output channel that share a scale; a channel with fewer inputs has "
        "one scale; per_channel: one scale per output channel; null: 32",
        BLOCK,
    )
    symmetric: bool | None = setting(None, "weights without zero points; null: with zero points")
    scale_dtype: str | None = setting(
        None,
        "type of the scales: float32, float16, or uint8 (the scales are quantized themselves); null: float32",
        Choices(SCALE_TYPES),
    )


@dataclass
class QuantizerConfig:
    """The fake quantize classes, which decide how scales and rounding are found."""

    activation: str = setting(
        "qatkit.quant.fake_quantize.FakeQuantize",
        "dotted path of the fake quantize class of activations, a qatkit.quant.fake_quantize.FakeQuantize",
    )
    weight: str = setting(
        "qatkit.quant.weight_fake_quantize.WeightFakeQuantize",
        "dotted path of the fake quantize class of weights, a "
        "qatkit.quant.weight_fake_quantize.WeightFakeQuantize",
    )


@dataclass
class CalibrationConfig:
    """The settings of calibration, which finds the activation ranges before fine-tuning."""

    observer: str = setting(
        "qatkit.quant.observers.MovingAverageMinMaxObserver",
        "dotted path of the class that finds the range of an activation, a qatkit.quant.observers.Observer",
    )
    images: int = setting(512, "number of calibration samples from the train split", COUNT)
    batch_size: int = setting(64, "samples per batch", COUNT)
    percentile: float | None = setting(
        None,
        "percentage of the values that lie inside the range, for observers that use it; null: the "
        "observer's default",
        Range(50, 100, above=True),
    )
    deviations: float | None = setting(
        None,
        "half the width of the range in standard deviations, for observers that use it; null: the "
        "observer's default",
        POSITIVE,
    )
    weights: str = setting(
        "auto",
        "how weight ranges are found. max: up to the largest value; mse: with the least squared "
        "error (up to 8 bits); auto: mse for weights of 4 bits or fewer, else max",
        Choices(("auto", "max", "mse")),
    )
    search: str = setting(
        "none",
        "choice between calibration methods. none: the observer's own method; layerwise: for each "
        "tensor, the percentile with the least error at the outputs of the operators that read it; "
        "tournament: one method for all tensors, or the best for each, whichever makes the best file "
        "in ONNX Runtime on held-out calibration samples",
        Choices(("none", "layerwise", "tournament")),
    )
    mean_shifts: str = setting(
        "correct",
        "what to do about operators whose rounded weights shift the means of their outputs (because "
        "their inputs are far from zero). correct: subtract the shifts from the biases; report: only "
        "report them",
        Choices(("correct", "report")),
    )
    mixed_scales: str = setting(
        "float",
        "how to treat tensors whose small values are lost with a single 8-bit scale (boxes next to scores, the"
        " input of a logarithm). float: keep the operators around them in float; report: only report "
        "them",
        Choices(("float", "report")),
    )
    cache: str | None = setting(
        None,
        "file that is written after calibration, and read instead of calibrating if it exists; null: no file",
        PLACE,
    )
    encodings: str | None = setting(
        None,
        "file with scales and zero points by tensor name, which are fixed while the other tensors "
        "are calibrated: encodings.json (mode=encodings), a file in AIMET's format, or a quantized "
        "ONNX file; null: none",
        PLACE,
    )
    random: bool = setting(
        False,
        "calibrate on noise instead of the calibration samples, if you have none; the ranges fit no "
        "real data",
    )
