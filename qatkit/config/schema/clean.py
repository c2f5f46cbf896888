"""Services for a given ONNX file, by themselves (mode=clean) or before another mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import PLACE, Choices, Range, Words, setting


@dataclass
class CleanConfig:
    """Changes of an ONNX file that keep its function, which ONNX Runtime proves; before another mode, only if set.

    Two settings change the function, `approximate` and `drop_pairs`; by how much is printed.
    """

    fix_shapes: Any = setting(
        None,
        'sizes of open axes: {NAME: 1} by the name of the size, {INPUT: {2: 224}} by axis (in a YAML file "INPUT[2]": '
        "224, too), {INPUT: [1, 3, 224, 224]} for all axes",
    )
    fold: str | None = setting(
        None,
        "constants are folded, identities, dropouts and unused nodes removed, duplicates merged (exact); and operators "
        "joined that round otherwise, such as a BatchNormalization with its Conv (all); null: all with mode=clean, "
        "before another mode exact with fix_shapes, else none",
        Choices(("none", "exact", "all")),
    )
    rewrite: list[str] = setting(
        list,
        "operators written otherwise: layer_norm, instance_norm, l2_norm and gelu join their parts; relu: of Clip and "
        "Max from 0 on; batch_norm_of_concat, into the convolutions before; batch_norm_to_conv; mean_to_pool; "
        "split_pool: a global pool of more than 512 values as two; split_to_slice; of quantized files fold_relu "
        "(QuantizeLinear clips as the Relu before it), dedicated_pairs (a QuantizeLinear and DequantizeLinear for each "
        "reader), weight_pairs (float weights behind both) and bfloat16_clip (before each cast to bfloat16)",
        Words(("layer_norm", "instance_norm", "l2_norm", "gelu", "relu", "batch_norm_of_concat", "batch_norm_to_conv",
               "mean_to_pool", "split_pool", "split_to_slice", "fold_relu", "bfloat16_clip",
               "dedicated_pairs", "weight_pairs")),
    )  # fmt: skip
    approximate: list[str] = setting(
        list,
        "operators replaced by what hardware computes, which changes the function; the error is printed: relu6 (Clip "
        "from 0 becomes Relu), sigmoid (HardSigmoid), and AMD's DPU versions leaky_relu, hard_sigmoid, average_pool, "
        "reduce_mean, clip, softmax",
        Words(("relu6", "leaky_relu", "sigmoid", "hard_sigmoid", "average_pool", "reduce_mean", "clip", "softmax")),
    )  # fmt: skip
    drop_pairs: list[str] = setting(
        list,
        "of a quantized file, which changes the function: pairs of QuantizeLinear and DequantizeLinear or of Casts to "
        "16 bits and back that are removed, [MAKER:READER], each an operator type, the name of a node, or * for any",
    )
    float32: bool = setting(False, "float16 tensors, inputs and outputs become float32")
    layout: Any = setting(
        None,
        "of inputs and outputs: {NAME: nhwc} moves channels from axis 1 to the end, {NAME: nchw} back, by a Transpose",
    )
    opset: int | None = setting(None, "of the cleaned file, higher or lower; null: as it is", Range(13, 23))
    unshare: bool = setting(False, "an initializer that several nodes read gets a copy for each")
    names: str = setting(
        "keep",
        "of nodes and tensors; safe: unique, and of the characters A-Z a-z 0-9 _ . / alone, but inputs and outputs "
        "keep theirs; all: those as well",
        Choices(("keep", "safe", "all")),
    )
    custom_ops: list[str] = setting(list, "libraries of custom operators, which every session gets")
    inputs: str | None = setting(
        None,
        "an .npz file with inputs by name, on which the cleaned file is compared; null: they are drawn",
        PLACE,
    )
