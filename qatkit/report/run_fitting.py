"""The code in a page's programs that fits a picture to the model's size, as `qatkit_verify.fitting` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qatkit_verify.fitting import PAD_VALUE, by_sides, sides

Prepare = Mapping[str, Any]


def python_sides(prepare: Prepare) -> str:
    """Returns the lines that compute `sides`, the width and height to which `image` is resized."""
    fit, (height, width) = prepare.get("fit", "crop"), sides(prepare["image_size"])
    if fit == "resize":
        return f"sides = [{width}, {height}]\n"
    if fit == "letterbox":
        return (
            f"both = (image.height, {height}), (image.width, {width})\n"
            "of, to = max(both, key=lambda side: side[0] / side[1])  # the side that limits the scale\n"
            "sides = [max(1, (2 * side * to + of) // (2 * of)) for side in image.size]\n"
        )
    high, wide = sides(prepare["resize"] or prepare["image_size"])
    if high == wide:
        return f"sides = [side * {high} // min(image.size) for side in image.size]  # the shorter one becomes {high}\n"
    return (
        f"covers = {high} * image.width >= {wide} * image.height\n"
        f"of, to = (image.height, {high}) if covers else (image.width, {wide})\n"
        f"sides = [side * to // of for side in image.size]  # covers {high} x {wide}\n"
    )


def python_fitted(prepare: Prepare) -> str:
    """Returns the lines of Python that crop or pad the resized `pixels` [C, H, W] to the model's input size."""
    fit, (height, width) = prepare.get("fit", "crop"), sides(prepare["image_size"])
    if fit == "resize":
        return ""
    if fit == "letterbox":
        filled = f"np.full(({len(prepare['mean'])}, {height}, {width}), {_pad_value(prepare)}, np.float32)"
        place = f"({height} - high) // 2, ({width} - wide) // 2" if _centred(prepare) else "0, 0"
        return (
            f"filled, (high, wide) = {filled}, pixels.shape[1:]\n"
            f"top, left = {place}\n"
            "filled[:, top : top + high, left : left + wide] = pixels\n"
            "pixels = filled\n"
        )
    if height == width:
        start = f"(round((side - {height}) / 2) for side in pixels.shape[1:])  # centre crop"
    else:
        start = f"(round((side - to) / 2) for side, to in zip(pixels.shape[1:], ({height}, {width})))  # centre crop"
    return f"top, left = {start}\npixels = pixels[:, top : top + {height}, left : left + {width}]\n"


def cpp_fitted(prepare: Prepare) -> str:
    """Returns a description of the pixels that the C++ program expects."""
    fit, how = (
        prepare.get("fit", "crop"),
        f"({prepare['interpolation']}{'' if prepare['interpolation'] == 'nearest' else ', antialiased'})",
    )
    if fit == "resize":
        return f"resized {how}"
    if fit == "letterbox":
        place = "in the middle" if _centred(prepare) else "at the top left"
        return f"scaled until it fits in {how},\n// {place} of pixels of {_pad_value(prepare)}"
    high, wide = sides(prepare["resize"] or prepare["image_size"])
    if high == wide:
        return f"its shorter side brought\n// to {high} {how}, then its centre"
    return f"scaled until it covers\n// {by_sides((high, wide))} {how}, then its centre"


def _centred(prepare: Prepare) -> bool:
    return bool(prepare.get("align", "center") == "center")


def _pad_value(prepare: Prepare) -> str:
    return f"{float(prepare.get('pad_value', PAD_VALUE)):g}"
