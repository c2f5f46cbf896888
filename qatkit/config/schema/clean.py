"""The group `clean`: changes to a given ONNX file, by themselves (mode=clean) or before another mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import PLACE, Choices, Range, Words, setting


@dataclass
class CleanConfig:
    """Changes to an ONNX file that preserve its function; a comparison in ONNX Runtime verifies this.

    Before another mode, only the changes that are set are made. The settings `approximate` and `drop_pairs`
    change the function; the size of the change is printed.
    """

    fix_shapes: Any = setting(
        None,
        "sizes of dynamic axes: {NAME: 1} by the name of the size, {INPUT: {2: 224}} by axis (in a "
        'YAML file also "INPUT[2]": 224), {INPUT: [1, 3, 224, 224]} for all axes; null: no size is '
        "fixed",
    )
    fold: str | None = setting(
        None,
        "which simplifications are made. none: no simplification; exact: fold constants, remove "
        "identities, dropouts and unused nodes, merge duplicates; all: also join operators where "
        "this changes the rounding, such as a BatchNormalization with its Conv; null: all with "
        "mode=clean; before another mode, exact with fix_shapes, else none",
        Choices(("none", "exact", "all")),
    )
    rewrite: list[str] = setting(
        list,
        "operators to rewrite. layer_norm, instance_norm, l2_norm, gelu: join the operators they "
        "consist of; relu: write a Clip from 0 without an upper bound, or a Max with 0, as Relu; "
        "batch_norm_of_concat: merge a BatchNormalization after a Concat into the convolutions "
        "before; batch_norm_to_conv: write a BatchNormalization as a depthwise convolution; "
        "mean_to_pool: write a mean over all positions as GlobalAveragePool; split_pool: pool more "
        "than 512 values in two steps; split_to_slice: write a Split as Slices. For quantized files, "
        "fold_relu: drop a Relu whose QuantizeLinear already clips; dedicated_pairs: give each "
        "reader its own QuantizeLinear and DequantizeLinear; weight_pairs: store weights in float, "
        "with a QuantizeLinear before their DequantizeLinear; bfloat16_clip: clip to bfloat16's "
        "largest number before each cast to bfloat16",
        Words(("layer_norm", "instance_norm", "l2_norm", "gelu", "relu", "batch_norm_of_concat", "batch_norm_to_conv",
               "mean_to_pool", "split_pool", "split_to_slice", "fold_relu", "bfloat16_clip",
               "dedicated_pairs", "weight_pairs")),
    )  # fmt: skip
    approximate: list[str] = setting(
        list,
        "operators to replace by approximations that hardware computes; the error is printed. relu6: "
        "a Clip from 0 becomes a Relu; sigmoid: a Sigmoid becomes a HardSigmoid; leaky_relu, "
        "hard_sigmoid, average_pool, reduce_mean, clip, softmax: these operators are computed as on "
        "AMD's DPU",
        Words(("relu6", "leaky_relu", "sigmoid", "hard_sigmoid", "average_pool", "reduce_mean", "clip", "softmax")),
    )  # fmt: skip
    drop_pairs: list[str] = setting(
        list,
        "pairs to remove from a quantized file, which changes the function: a QuantizeLinear and its "
        "DequantizeLinear, or a Cast to 16 bits and the Cast back. [MAKER:READER, ...] names the "
        "operators before and after a pair, each by its type or the name of its node; * matches any",
    )
    float32: bool = setting(False, "turn all float16 tensors into float32, including inputs and outputs")
    layout: Any = setting(
        None,
        "layout of inputs and outputs: {NAME: nhwc} moves channels from axis 1 to the end with a "
        "Transpose, {NAME: nchw} moves them back; null: unchanged",
    )
    opset: int | None = setting(
        None, "opset of the cleaned file, higher or lower; null: keep it", Range(13, 23)
    )
    unshare: bool = setting(False, "give each node its own copy of an initializer that several nodes read")
    names: str = setting(
        "keep",
        "names of nodes and tensors. keep: unchanged; safe: unique and only with the characters A-Z "
        "a-z 0-9 _ . /, except inputs and outputs; all: inputs and outputs as well",
        Choices(("keep", "safe", "all")),
    )
    custom_ops: list[str] = setting(
        list, "paths of shared libraries with custom operators, which are registered in every session"
    )
    inputs: str | None = setting(
        None,
        "npz file with inputs by name, on which the cleaned file is compared with the original; null: random inputs",
        PLACE,
    )
