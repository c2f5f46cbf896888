"""Tests of integer inputs and outputs: input integers and logits match those of the float interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import ConvFlattenLinear, Mlp, Residual, Shipped, noise, settle, ship
from numpy.typing import NDArray
from onnx import helper

from qatkit.config.schema import OverrideConfig
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.quant.backends import FBGEMM, QNNPACK, Backend
from qatkit.verify.audit import audit
from qatkit.verify.graph_view import constant, read_model
from qatkit.verify.parity import parity
from qatkit_verify.errors import ConfigError
from qatkit_verify.latency import latency
from qatkit_verify.session import open_session, run_images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pixels(count: int, size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, size, size), dtype=np.uint8)


def normalised(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Normalizes images like torchvision's ToTensor and Normalize."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    return ((torch.from_numpy(images).float() / 255 - mean) / std).numpy()


def case(kind: str, backend: Backend = FBGEMM) -> tuple[Shipped, NDArray[np.uint8]]:
    torch.manual_seed(0)
    model, size = {"residual": (Residual(), 12), "conv_flatten_linear": (ConvFlattenLinear(), 8)}[kind]
    model, raw = settle(model, 3, size, size), pixels(16, size)
    return ship(model, torch.from_numpy(normalised(raw)), f"{kind}_{backend.name}_io", backend), raw


def quantization(path: Path) -> tuple[NDArray[np.float32], NDArray[np.integer[Any]], str]:
    """Returns scale, zero_point and output name of the file's own input quantization."""
    node = next(n for n in read_model(path).graph if n.name == "input_quant/QuantizeLinear")
    scale, zero_point = (constant(node.inputs[i]) for i in (1, 2))
    assert scale is not None and zero_point is not None
    return scale, zero_point, str(node.outputs[0].name)


@pytest.mark.parametrize("backend", [FBGEMM, QNNPACK], ids=["fbgemm", "qnnpack"])
def test_every_pixel_becomes_the_same_integer(backend: Backend, tmp_path: Path) -> None:
    """The float and the integer interface quantize all 256 pixel values of each channel alike.

    Less than 1 % of the integers may differ, by one step.
    """
    shipped, _ = case("residual", backend)
    to_integer_io(shipped.path, tmp_path / "io.onnx", MEAN, STD, (-1.0, 1.0))
    every = np.resize(np.arange(256, dtype=np.uint8), (2, 1, 12, 12))
    levels = np.repeat(every, 3, axis=1)
    scale, zero_point, name = quantization(shipped.path)
    info = np.iinfo(zero_point.dtype)
    want = np.clip(np.rint(normalised(levels) / scale) + zero_point.astype(int), info.min, info.max)

    model = onnx.load(str(tmp_path / "io.onnx"))
    kind = helper.np_dtype_to_tensor_dtype(zero_point.dtype)
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    got = ort.InferenceSession(model.SerializeToString()).run([name], {"input": levels})[0]
    difference = np.abs(got.astype(int) - want)
    assert difference.max() <= 1  # the bias is rounded to 1/127 of a level
    assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize("kind", ["residual", "conv_flatten_linear"])
def test_the_logits_are_those_of_the_float_ends(kind: str, tmp_path: Path) -> None:
    shipped, raw = case(kind)
    floats = run_images(open_session(shipped.path, threads=1), normalised(raw))
    target = tmp_path / "io.onnx"
    ends = to_integer_io(shipped.path, target, MEAN, STD, (float(floats.min()), float(floats.max())))
    session = ort.InferenceSession(target)
    assert (session.get_inputs()[0].type, session.get_outputs()[0].type) == ("tensor(uint8)",) * 2
    q = session.run(None, {"input": raw})[0]
    logits = (q.astype(np.float64) - ends.zero_point) * ends.scale
    step = (max(floats.max(), 0) - min(floats.min(), 0)) / 255
    assert ends.scale == pytest.approx(step, rel=1e-5)
    # Half an output step, and the effect of one step in a few input values.
    assert np.abs(logits - floats).mean() < 0.5 * step
    assert np.abs(logits - floats).max() < 1.5 * step
    np.testing.assert_allclose(
        run_images(open_session(target, threads=1), normalised(raw)), logits, atol=1e-6
    )


def test_verification_feeds_pixels_and_finds_integers(tmp_path: Path) -> None:
    shipped, raw = case("residual")
    target = tmp_path / "io.onnx"
    to_integer_io(shipped.path, target, MEAN, STD, (-1.0, 1.0))
    found = audit(target)
    assert found.ok and found.int8_share == 1.0
    assert (found.quantize, found.dequantize) == (0, 0)  # no float tensor is left
    # For values between two pixel values, parity feeds module and file the nearest pixel value.
    between = normalised(raw) + np.float32(0.3 / 255 / 0.229)
    result = parity(shipped.converted, target, [torch.from_numpy(between)], threads=1)
    assert result.step == pytest.approx(2 / 255) and result.step_source == "the output's quantization scale"
    assert result.optimized.max_steps <= 1.01 and result.unoptimized is not None
    assert result.unoptimized.max_steps <= 1.01
    times = latency({"float": shipped.path, "int8": target}, (3, 12, 12), threads=1, runs=2)
    assert times["int8"].median_ms > 0


def test_the_file_tells_what_its_integers_mean(tmp_path: Path) -> None:
    shipped, _ = case("residual", QNNPACK)
    ends = to_integer_io(shipped.path, tmp_path / "io.onnx", MEAN, STD, (-2.0, 1.0))
    told = json.loads(
        ort.InferenceSession(tmp_path / "io.onnx").get_modelmeta().custom_metadata_map["qatkit.io"]
    )
    assert told == {
        "mean": list(MEAN),
        "std": list(STD),
        "dtype": "int8",
        "scale": ends.scale,
        "zero_point": 42,
    }
    assert ends.scale == pytest.approx(3 / 255)  # zero_point: -128 + 2 / (3 / 255) = 42


def test_what_has_no_integer_ends_is_refused_and_nothing_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = tmp_path / "io.onnx"
    part = ship(settle(Residual(), 3, 12, 12), noise(4, 3, 12, 12), "io_part",
                overrides={"stem": OverrideConfig(float=True)})  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"export\.io=uint8: expected float32, because Conv reads the model's input in float",
    ):
        to_integer_io(part.path, target, MEAN, STD, (-1.0, 1.0))
    flat = ship(Mlp().eval(), noise(4, 12), "io_mlp")
    with pytest.raises(ConfigError, match="is not a batch of images with 3 channels"):
        to_integer_io(flat.path, target, MEAN, STD, (-1.0, 1.0))
    assert not target.exists()
