"""Services for a given ONNX file, by themselves (mode=clean) or before another mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import PLACE, Choices, Range, setting


@dataclass
class CleanConfig:
    """Changes of an ONNX file that keep its function, which ONNX Runtime proves; before another mode, only if set."""

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
