"""What is quantized, and how: the backend and its overrides, packed weights, quantizers and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import BITS, BLOCK, COUNT, PLACE, POSITIVE, SCALES, SWITCH, Choices, Range, setting
from qatkit.quant.spec import ACTIVATIONS, BIAS_TYPES, FORMAT_NAMES, SCALE_TYPES, SCALE_VALUES, SIGNED


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
