"""Tests of ONNX files and settings that are refused: in one line, and nothing is written."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import run_script
from float_files import EXTERNAL, by_hand, settings, with_branches
from onnx import TensorProto, helper
from PIL import Image

from qatkit.config.schema import DataConfig
from qatkit.export import ort_modes
from qatkit.importing.read import MAX_BYTES
from qatkit.jobs import quantize_file
from qatkit_verify.errors import ConfigError


def missing(path: Path) -> None:
    pass


def text(path: Path) -> None:
    path.write_text("this is no model")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lost_weights(path: Path) -> None:
    by_hand(path, save=EXTERNAL)
    (path.parent / "weights.bin").unlink()


def short_weights(path: Path) -> None:
    by_hand(path, save=EXTERNAL)
    (path.parent / "weights.bin").write_bytes(b"12345678")


def too_large(path: Path) -> None:
    by_hand(path, save=EXTERNAL)
    os.truncate(path.parent / "weights.bin", MAX_BYTES)  # a sparse file: it takes no space


def quantized(path: Path) -> None:
    ort_modes.weight_only(float_files.trained(), path)


def dynamically_quantized(path: Path) -> None:
    ort_modes.dynamic(float_files.trained(), path)


def no_operator(path: Path) -> None:
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["p"]),
        helper.make_node("Flatten", ["p"], ["output"]),
    ]
    by_hand(path, nodes=nodes)


def unknown_operator(path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["input", "w", "b"], ["y"]),
        helper.make_node("Mystery", ["y"], ["output"], "riddle", domain="acme"),
    ]
    by_hand(path, nodes=nodes)


def unknown_operator_of_a_known_domain(path: Path) -> None:
    """Writes a file with an unknown operator of an imported domain, which only ONNX Runtime can refuse."""
    unknown_operator(path)
    model = onnx.load(str(path))
    model.opset_import.append(helper.make_opsetid("acme", 1))
    onnx.save(model, str(path))


def unknown_operator_in_a_branch(path: Path, *, matrix: bool = True, imported: bool = False) -> None:
    """Writes a file with an unknown operator in a branch never taken; ONNX Runtime refuses to load it.

    Args:
        path: file to write.
        matrix: whether the branch that is taken has a Conv.
        imported: whether the file imports an opset for the operator's domain.
    """
    model = onnx.load(str(with_branches(path, constant=True)))
    outer = next(node for node in model.graph.node if node.op_type == "If")
    then, other = (
        next(one.g for one in outer.attribute if one.name == f"{name}_branch") for name in ("then", "else")
    )
    if not matrix:
        then.node[0].CopyFrom(helper.make_node("Relu", ["input"], ["then"], "then"))
    other.node[0].op_type, other.node[0].domain, other.node[0].name = "Mystery", "acme", "riddle"
    if imported:
        model.opset_import.append(helper.make_opsetid("acme", 1))
    onnx.save(model, str(path))


def no_upgrade(path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["y"]),
        helper.make_node("Cast", ["y"], ["output"], to=TensorProto.FLOAT),
    ]
    by_hand(path, opset=5, nodes=nodes)


def made_with(**changes: Any) -> Callable[[Path], object]:
    return lambda path: by_hand(path, **changes)


EXTRA = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["N", 3])


INPUT = "a model with one input, float32 images [N, C, H, W] of 1 or 3 channels"


def spoiled(path: Path) -> None:
    model = onnx.load(str(by_hand(path)))
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, 0, 0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, str(path))


def batch_inside(path: Path) -> None:
    """Writes a model whose input allows any batch size and whose Reshape allows only 1."""
    shape = helper.make_node("Constant", [], ["s"], "s", value_ints=[1, 16])
    nodes = [
        helper.make_node("Conv", ["input", "w", "b"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["y"], ["p"], "pool"),
        shape,
        helper.make_node("Reshape", ["p", "s"], ["f"], "reshape"),
        helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
    ]
    by_hand(path, nodes=nodes)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (missing, "a float ONNX file that exists"),
    "text": (text, "the file can't be read as ONNX ("),
    "empty": (empty, "an ONNX file with a graph; this one has no operators"),
    "lost weights": (lost_weights, "the file weights.bin with its external data is missing"),
    "short weights": (short_weights, "the file weights.bin with its external data ends before the last value of "),
    "too large": (too_large, "a model of at most 2 GB, including external data"),
    "quantized": (quantized, "a float model; this one is quantized already (it contains DequantizeLinear)"),
    "dynamic": (
        dynamically_quantized,
        "a float model; this one is quantized already (it contains DynamicQuantizeLinear)",
    ),
    "not finite": (spoiled, "a model with finite weights; the weight 'w' of 'conv' (Conv) contains NaN or infinity"),
    "a batch inside": (batch_inside, "ONNX Runtime failed on images [2, 3, 8, 8] ("),
    "nothing to quantize": (no_operator, "a model that has operators to quantize (Conv, Gemm, MatMul, LSTM"),
    "unknown operator": (unknown_operator, f"ONNX Runtime {ort.__version__} can't load the file ("),
    "unknown operator in a branch": (
        unknown_operator_in_a_branch,
        f"ONNX Runtime {ort.__version__} can't load the file (This is",
    ),
    "no upgrade": (no_upgrade, "a file of opset 7 to "),
    "a branch": (
        with_branches,
        "a model with its Conv, Gemm and MatMul nodes in the main graph; this one has some inside If nodes",
    ),
    "two inputs": (made_with(inputs=[EXTRA]), f"{INPUT}; this one has the inputs input, mask"),
    "rank": (made_with(shape=["N", 192]),
             f"{INPUT}; the input 'input' is float32 [?, 192] (data=arrays supports any inputs)"),
    "channels": (made_with(shape=["N", 8, 8, 3]),
                 f"{INPUT}; the input 'input' is float32 [?, 8, 8, 3] (data.layout=nhwc supports it)"),
    "bytes": (made_with(kind=TensorProto.UINT8), f"{INPUT}; the input 'input' is uint8 [?, 3, 8, 8]"),
    "classes": (made_with(classes=7),
                "a model that returns logits [N, 10], one value for each class of the data; it returned [2, 7]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_used_is_one_line(case: str, tmp_path: Path) -> None:
    write, allowed = BAD_FILES[case]
    path = tmp_path / "file.onnx"
    write(path)
    with pytest.raises(ConfigError) as raised:
        quantize_file.quantize(settings(path, "dynamic", tmp_path / "run"))
    assert str(raised.value).removeprefix(f"onnx={path}: ").removeprefix("expected ").startswith(allowed)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (unknown_operator, {"riddle"}),
        (unknown_operator_in_a_branch, {"riddle"}),
        (partial(unknown_operator_in_a_branch, matrix=False), {"riddle"}),
        (partial(unknown_operator_in_a_branch, imported=True), {"outer"}),  # ONNX Runtime only names the If
        (unknown_operator_of_a_known_domain, set()),
    ],
    ids=["main graph", "beside a Conv", "beside no Conv", "known domain", "known domain, main graph"],
)
def test_an_unknown_operator_is_named_with_its_domain_and_node(
    write: Callable[[Path], object], named: set[str], tmp_path: Path
) -> None:
    path = tmp_path / ("folder" * 20) / "file.onnx"  # whatever the length of its path
    path.parent.mkdir()
    write(path)
    with pytest.raises(ConfigError) as raised:
        quantize_file.quantize(settings(path, "dynamic", tmp_path / "run"))
    message = str(raised.value)
    told = r"(ONNX Runtime [\d.]+ can't load|onnx's checker refuses) the file \("
    assert re.match(told, message.removeprefix(f"onnx={path}: "))
    assert {"Mystery", "acme"} | named <= set(re.findall(r"\w+", message))
    assert "\n" not in message and tempfile.gettempdir() not in message.replace(str(tmp_path), "")


BAD_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "size": ({}, {"data": {"image_size": 16}}, "data.image_size=16: expected null or 8, the input size of "),
    "sides": (
        {"shape": ["N", 3, 8, 16]},
        {"data": {"image_size": [16, 8]}},
        "data.image_size=[16, 8]: expected null or [8, 16], the input size of ",
    ),
    "one side": (
        {"shape": ["N", 3, 8, "W"]},
        {"data": {"image_size": [9, 20]}},
        "data.image_size=[9, 20]: expected null or [8, 20], the input size of ",
    ),
    "layout": ({}, {"data": {"layout": "nhwc"}}, "onnx="),
    "channels": ({}, {"data": {"mean": [0.5], "std": [0.5]}}, "data.mean=[0.5]: expected 3 numbers, since "),
    "mode": ({}, {"mode": "int4"}, "mode=int4: expected one of dynamic, static, float16, weight_only"),
    "no images": (
        {},
        {"calibration": {"images": 0}},
        "calibration.images=0: expected an integer of at least 1",
    ),
    "few images": (
        {"shape": [200, 3, 8, 8]},
        {"verify": {"latency_batch": 200}},
        "calibration.images=128: expected at least",
    ),
    "batch": (
        {"shape": [4, 3, 8, 8]},
        {"verify": {"latency_batch": 2}},
        "verify.latency_batch=2: expected 4, the fixed batch size of ",
    ),
    "fewer images than the batch": (
        {"shape": [100, 3, 8, 8]},
        {"verify": {"latency_batch": 100}, "data": {"train_images": 50, "image_size": 8, "batch_size": 10}},
        "calibration.batch_size=100: expected at most 50, the number of training images",
    ),
    "reduced range of floats": (
        {},
        {"mode": "float16", "backend": {"reduce_range": True}},
        "backend.reduce_range=true: expected false with mode=float16",
    ),
    "control": ({}, {"verify": {"control": True}}, "verify.control=true: expected false"),
    "backend": (
        {},
        {"backend": {"target": "qatkit.quant.backends.Backend"}},
        "backend.target=qatkit.quant.backends.Backend: ",
    ),
    "data": (
        {},
        {"data": {"source": "qatkit.data.image_folder", "root": "/nowhere"}},
        "data.root=/nowhere: ",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_that_do_not_fit_are_one_line(case: str, tmp_path: Path) -> None:
    made, changes, line = BAD_SETTINGS[case]
    config = settings(by_hand(tmp_path / "file.onnx", **made), "static", tmp_path / "run")
    for key, value in changes.items():
        setattr(config, key, replace(getattr(config, key), **value) if isinstance(value, dict) else value)
    with pytest.raises(ConfigError) as raised:
        quantize_file.quantize(config)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds another run"):
        quantize_file.quantize(settings(float_files.trained(), "dynamic", tmp_path))
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [
        (
            "export.py",
            ["onnx=x.onnx"],
            "mode=null: expected one of dynamic, static, float16, weight_only, clean, summary, encodings with "
            "onnx=FILE",
        ),
        (
            "export.py",
            ["onnx=x.onnx", "mode=int4"],
            "mode=int4: expected one of dynamic, static, float16, weight_only",
        ),
        ("export.py", ["onnx=x.onnx", "mode=static"], "onnx=x.onnx: expected a float ONNX file that exists"),
        (
            "export.py",
            ["onnx=x.onnx", "checkpoint=y.ckpt", "mode=static"],
            "onnx=x.onnx: expected null with checkpoint=y.ckpt",
        ),
        ("export.py", ["checkpoint=y.ckpt", "mode=static"], "mode=static: expected null without onnx=FILE"),
        (
            "export.py",
            ["onnx=x.onnx", "mode=static", "schedule.lr=1"],
            "schedule.lr=1: the key cannot be set with onnx=FILE",
        ),
        (
            "export.py",
            ["onnx=x.onnx", "mode=static", "model=vit_b_16"],
            "model=vit_b_16: the key cannot be set with onnx=FILE",
        ),
        (
            "train.py",
            ["onnx=x.onnx", "mode=static"],
            "mode=static: expected null with train.py (use export.py onnx=FILE mode=MODE)",
        ),
        (
            "train.py",
            ["mode=static"],
            "mode=static: expected null with train.py (use export.py onnx=FILE mode=MODE)",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_status_2(
    script: str, typed: list[str], line: str, tmp_path: Path
) -> None:
    done = run_script(script, *typed, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_damaged_image_is_named_and_not_the_mode(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in "0123456789":
            (tmp_path / "data" / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / part / name / "0.png")
    (tmp_path / "data" / "train" / "3" / "0.png").write_bytes(b"no image")
    data = DataConfig("qatkit.data.image_folder", str(tmp_path / "data"), 8, mean=[0.5], std=[0.5], workers=0)
    config = settings(by_hand(tmp_path / "file.onnx"), "static", tmp_path / "run", data=data)
    config.data.mean, config.data.std = [0.5] * 3, [0.5] * 3
    config.calibration.images = config.calibration.batch_size = 10
    with pytest.raises(ConfigError, match=r"^data\.root=.*3/0\.png"):
        quantize_file.quantize(config)
    assert not (tmp_path / "run").exists()
