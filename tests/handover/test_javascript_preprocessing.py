"""Tests of preprocess.mjs in Node against the preprocessing of training, for pictures of many sizes."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import qatkit_verify
from qatkit.data.preprocessing import Preprocessing
from qatkit_verify.preprocess import Preprocess

NODE = shutil.which("node")
MODULES = Path(qatkit_verify.__file__).parent / "javascript"
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on the PATH")

# height, width, image_size, resize: shrunk, enlarged, unchanged, one pixel
SHAPES = [
    (97, 130, 24, 32), (131, 60, 31, 31), (20, 33, 40, 44), (9, 7, 28, 30), (32, 32, 32, 32), (32, 41, 30, 32),
    (45, 45, 44, 44), (16, 5, 6, 6), (50, 40, 1, 1),
]  # fmt: skip
PROGRAM = """
import { readFileSync } from "node:fs";
const { preprocess } = await import(process.argv[1]);
for (const line of readFileSync(0, "utf8").trim().split("\\n")) {
  const { picture, how } = JSON.parse(line);
  console.log(Array.from(preprocess(picture, how).data).join(" "));
}
"""


def _pixels(shape: tuple[int, int, int], rough: bool) -> NDArray[np.uint8]:
    draw = np.random.default_rng(sum(shape))
    if rough:
        return draw.integers(0, 256, shape, dtype=np.uint8)
    slope = np.add.outer(np.arange(shape[0]) * 3, np.arange(shape[1]) * 2)
    return np.repeat(slope[..., None] % 256, shape[2], 2).astype(np.uint8)


def _in_node(cases: list[dict[str, Any]]) -> list[NDArray[np.float64]]:
    command = [str(NODE), "--input-type=module", "-e", PROGRAM, (MODULES / "preprocess.mjs").as_uri()]
    typed = "\n".join(json.dumps(case) for case in cases)
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=True, timeout=100)
    return [np.array(line.split(), np.float64) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_every_bit_is_that_of_training(interpolation: str) -> None:
    cases, expected = [], []
    for taken, given, rough in [(3, 3, True), (3, 3, False), (3, 1, True), (1, 3, False), (1, 1, True)]:
        for height, width, size, resize in SHAPES:
            pixels = _pixels((height, width, taken), rough)
            mean, std = (0.4914, 0.4822, 0.4465)[:given], (0.247, 0.2435, 0.2616)[:given]
            training = Preprocessing(size, resize, mean, std, interpolation)
            expected.append(training.eval_batch([torch.from_numpy(pixels).permute(2, 0, 1)]).numpy().ravel())
            how = training.as_dict() | {"input": {"dtype": "float32"}}
            picture = {"data": pixels.ravel().tolist(), "width": width, "height": height, "channels": taken}
            cases.append({"picture": picture, "how": how})
    for found, wanted in zip(_in_node(cases), expected, strict=True):
        np.testing.assert_array_equal(found, wanted.astype(np.float64))


def test_a_grey_picture_is_as_light_from_a_canvas() -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    seen = np.concatenate([np.repeat(grey[..., None], 3, 2), np.full((16, 16, 1), 255, np.uint8)], axis=2)
    how = Preprocessing(16, 16, (0.5,), (0.5,)).as_dict() | {"input": {"dtype": "uint8"}}
    [found] = _in_node([{"picture": {"data": seen.ravel().tolist(), "width": 16, "height": 16}, "how": how}])
    np.testing.assert_array_equal(found, grey.ravel())


def test_canvas_alpha_is_dropped_and_integer_inputs_are_pixels() -> None:
    pixels = _pixels((12, 9, 3), rough=True)
    seen = np.concatenate([pixels, np.full((12, 9, 1), 255, np.uint8)], axis=2)
    how = Preprocessing(9, 9, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).as_dict() | {"input": {"dtype": "uint8"}}
    picture = {"data": seen.ravel().tolist(), "width": 9, "height": 12}
    [found] = _in_node([{"picture": picture, "how": how}])
    top = 2  # (12 - 9) / 2 = 1.5 is between two rows, and Python rounds half to even
    np.testing.assert_array_equal(found, pixels[top : top + 9].transpose(2, 0, 1).ravel())


# height, width, image_size: shrunk, enlarged, one side each way, unchanged, output and input one pixel high
INPUTS = [
    (97, 130, (24, 40)), (20, 33, (40, 70)), (60, 20, (30, 44)), (32, 48, (32, 48)), (50, 40, (1, 6)), (1, 70, (9, 12)),
]  # fmt: skip
FITS: list[dict[str, Any]] = [
    {"fit": "crop"}, {"fit": "resize"}, {"fit": "letterbox"},
    {"fit": "letterbox", "align": "top_left", "pad_value": 127.5},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_every_bit_is_that_of_python_for_any_input(interpolation: str, dtype: str) -> None:
    cases, expected = [], []
    for number, ((height, width, size), fit) in enumerate(itertools.product(INPUTS, FITS)):
        pixels = _pixels((height, width, 3), rough=True)
        resize = (size[0] + 3, size[1] + 1) if fit["fit"] == "crop" else size
        prepared = Preprocessing(
            size, resize, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), interpolation, **fit, order=("rgb", "bgr")[number % 2],
            layout="nhwc" if number % 3 == 1 and dtype == "float32" else "nchw",
            pixels=("0..1", "0..255")[number % 5 > 2],
        )  # fmt: skip
        how = prepared.as_dict() | {"input": {"dtype": dtype}, "crop": "none"}
        expected.append(Preprocess.from_dict(how)(pixels).ravel().astype(np.float64))
        picture = {"data": pixels.ravel().tolist(), "width": width, "height": height, "channels": 3}
        cases.append({"picture": picture, "how": how})
    for found, wanted in zip(_in_node(cases), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
