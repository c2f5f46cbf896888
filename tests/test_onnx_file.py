"""A float ONNX file from the command line to the bundle: the figures of the report, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import pytest
from float_files import by_hand
from onnx import TensorProto, helper

from qatkit import onnx_file
from qatkit.config import CalibrationConfig, Config, DataConfig, TrainerConfig, VerifyConfig, load_config
from qatkit.errors import ConfigError
from qatkit.export import modes
from qatkit.export.float_file import MAX_BYTES

ROOT = Path(__file__).parents[1]
MODES = ("dynamic", "static", "float16", "weight_only")


def settings(path: Path, mode: str, folder: Path, **changes: Any) -> Config:
    """Digits at their own 8 x 8 pixels; only the loss of accuracy is bounded."""
    config = Config(
        name="file",
        output_dir=str(folder),
        onnx=str(path),
        mode=mode,
        data=DataConfig(image_size=8, workers=0),
        calibration=CalibrationConfig(images=128),
        trainer=TrainerConfig(progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, audit=False, min_agreement=None),
    )
    return replace(config, **changes)


@pytest.mark.parametrize("mode", MODES)
def test_the_bundle_tells_the_truth(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert onnx_file.quantize(settings(float_files.trained(), mode, folder)) == 0

    made = f"model.{mode}.onnx"
    bundle = {made, "model.float.onnx", "model.json", "report.json", "report.html", "config.yaml"}
    assert set(os.listdir(folder)) == bundle
    report = json.loads((folder / "report.json").read_text())
    images = float_files.digits()[2]
    exact = float_files.logits(folder / "model.float.onnx", images)
    np.testing.assert_array_equal(exact, float_files.logits(float_files.trained(), images))
    assert report["accuracy"]["float"]["top1"] == pytest.approx(float_files.top1(float_files.trained()))
    entries = report["session_options"]
    assert report["accuracy"]["int8"]["top1"] == pytest.approx(
        float_files.top1(folder / made, entries=entries)
    )
    assert set(report["accuracy"]) == set(report["latency"]) == set(report["sizes"]) == {"float", "int8"}
    assert report["sizes"]["int8"] == (folder / made).stat().st_size
    parity = report["parity"]
    fast = float_files.logits(folder / made, images, entries=entries)
    plain = float_files.logits(folder / made, images, entries=entries, optimize=False)
    assert parity["unoptimized"] is None
    assert parity["optimized"]["agreement"] == (fast.argmax(1) == plain.argmax(1)).mean()
    assert parity["optimized"]["max_abs"] == pytest.approx(np.abs(fast - plain).max(), rel=1e-3, abs=1e-5)
    assert parity["against_float"]["agreement"] == (fast.argmax(1) == exact.argmax(1)).mean()
    assert parity["against_float"]["max_abs"] == pytest.approx(np.abs(fast - exact).max(), rel=1e-3, abs=1e-5)
    assert (report["notes"], report["divergence"], report["shortfalls"]) == ([], None, [])
    assert not {"model", "algorithm", "schedule", "checkpoint", "resume"} & set(report["config"])
    assert load_config(folder / "config.yaml").mode == mode
    page = (folder / "report.html").read_text()
    assert "simulated" not in page
    assert f"{report['label']}, ONNX Runtime" in page


def test_the_audit_sees_what_a_dynamic_file_computes(tmp_path: Path) -> None:
    """Its integer operators are int8, and none is called float that ONNX Runtime quantized itself."""
    onnx_file.quantize(settings(float_files.trained(), "dynamic", tmp_path))
    audit = json.loads((tmp_path / "report.json").read_text())["audit"]
    matrix = [node for node in audit["nodes"] if node["macs"]]
    kinds = {node["op"]: node["precision"] for node in matrix}
    assert kinds.pop("Conv", kinds.pop("FusedConv", "float")) == "float"  # the depthwise one
    assert kinds and set(kinds.values()) == {"int8"}


def _resized(path: Path, opset: int, mode: str) -> Path:
    """Conv, enlarged one and a half times, pooled by a quarter, MatMul."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.normal(size=(4, 3, 3, 3)), "fc": draw.normal(size=(36, 10)) / 6,
               "factors": np.array([1, 1, 1.5, 1.5])}  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Resize" if opset > 9 else "Upsample", ["y", "factors"], ["u"], "up", mode=mode),
        helper.make_node("MaxPool", ["u"], ["p"], "pool", kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "fc"], ["output"], "fc"),
    ]
    return by_hand(path, opset=opset, nodes=nodes, weights=weights)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("opset", [9, 10])
def test_pixels_stay_where_an_older_resize_put_them(opset: int, mode: str, tmp_path: Path) -> None:
    path = _resized(tmp_path / "old.onnx", opset, mode)
    config = settings(path, "float16", tmp_path / "run")
    config.verify.max_drop = None
    assert onnx_file.quantize(config) == 0
    images = float_files.digits()[2][:20]
    exact = float_files.logits(path, images)
    found = float_files.logits(tmp_path / "run" / "model.float.onnx", images)
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


def test_an_upgrade_that_changes_what_the_file_computes_is_refused(tmp_path: Path) -> None:
    """Hardmax meant another axis before opset 13, which the converter of opsets forgets."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.normal(size=(4, 3, 3, 3)), "fc": draw.normal(size=(10, 256))}
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Hardmax", ["y"], ["h"], "hardmax", axis=1),
        helper.make_node("Flatten", ["h"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
    ]
    path = by_hand(tmp_path / "old.onnx", opset=11, nodes=nodes, weights=weights)
    with pytest.raises(ConfigError, match=r"opset 13 or higher \(upgraded from 11, its logits differ by"):
        onnx_file.quantize(settings(path, "float16", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.float.onnx", "model.dynamic.onnx"])
def test_the_file_that_is_read_is_never_written_over(name: str, tmp_path: Path) -> None:
    path = by_hand(tmp_path / name)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"output_dir=.*holds a {name}; name another folder"):
        onnx_file.quantize(settings(path, "dynamic", tmp_path))
    assert path.read_bytes() == before and os.listdir(tmp_path) == [name]


def test_operators_inside_functions_are_found_and_quantized(tmp_path: Path) -> None:
    block = helper.make_function(
        "own", "Block", ["x", "w", "b"], ["y"],
        [helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
         helper.make_node("Relu", ["c"], ["y"], "relu")],
        [helper.make_opsetid("", 13)],
    )  # fmt: skip
    path = by_hand(tmp_path / "plain.onnx")
    model = onnx.load(str(path))
    conv, relu, *others = list(model.graph.node)
    call = helper.make_node("Block", list(conv.input), list(relu.output), "block", domain="own")
    del model.graph.node[:]
    model.graph.node.extend([call, *others])
    model.functions.append(block)
    model.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(model, str(tmp_path / "function.onnx"))
    config = settings(tmp_path / "function.onnx", "static", tmp_path / "run")
    config.verify.max_drop = None
    assert onnx_file.quantize(config) == 0
    audit = json.loads((tmp_path / "run" / "report.json").read_text())["audit"]
    assert audit["int8_share"] == 1.0


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    """A depthwise Conv stays float on purpose, whatever it is called."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.normal(size=(8, 3, 3, 3)),
        "d": draw.normal(size=(8, 1, 3, 3)),
        "fc": draw.normal(size=(10, 8)),
    }
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["y"], "blk[1]/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["y", "d"], ["z"], "blk[2]/Conv", pads=[1, 1, 1, 1], group=8),
        helper.make_node("GlobalAveragePool", ["z"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
    ]
    path = by_hand(tmp_path / "brackets.onnx", nodes=nodes, weights=weights)
    config = settings(path, "dynamic", tmp_path / "run")
    config.verify.max_drop, config.verify.audit = None, True
    assert onnx_file.quantize(config) == 0


def test_the_code_on_the_page_feeds_a_fixed_batch(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "fixed.onnx", shape=[4, 3, 8, 8])
    config = settings(path, "float16", tmp_path / "run")
    config.verify.max_drop, config.verify.latency_batch = None, 4
    assert onnx_file.quantize(config) == 0
    assert "batch = np.repeat(batch, 4, axis=0)" in (tmp_path / "run" / "report.html").read_text()


def test_a_shortfall_is_status_1(tmp_path: Path) -> None:
    config = settings(float_files.trained(), "weight_only", tmp_path)
    config.verify.max_size_ratio = 0.1
    assert onnx_file.quantize(config) == 1
    shortfall = json.loads((tmp_path / "report.json").read_text())["shortfalls"][0]
    assert shortfall.startswith("verify.max_size_ratio=0.1: the INT8 weights file is 0.2")


@pytest.mark.parametrize("mode", MODES)
def test_an_older_opset_is_upgraded_and_said(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = by_hand(tmp_path / "old.onnx", opset=11)
    config = settings(path, mode, tmp_path / "run")
    config.verify.max_drop = None
    assert onnx_file.quantize(config) == 0

    model = onnx.load(str(tmp_path / "run" / f"model.{mode}.onnx"))
    assert next(item.version for item in model.opset_import if item.domain == "") == 13
    note = "old.onnx has opset 11: upgraded to 13 before it was quantized"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["notes"] == [note]
    printed = capsys.readouterr()
    assert note in printed.out and note in printed.err
    assert note in (tmp_path / "run" / "report.html").read_text()
    images = float_files.digits()[2][:20]
    exact = float_files.logits(path, images)
    found = float_files.logits(tmp_path / "run" / f"model.{mode}.onnx", images)
    np.testing.assert_allclose(found, exact, atol=0.03 * np.abs(exact).max())


EXTERNAL = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}


def test_external_data_is_read(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "file.onnx", save=EXTERNAL)
    assert (tmp_path / "weights.bin").is_file()
    config = settings(path, "weight_only", tmp_path / "run")
    config.verify.max_drop = None
    assert onnx_file.quantize(config) == 0
    whole = by_hand(tmp_path / "whole.onnx")
    images = float_files.digits()[2][:20]
    found = float_files.logits(tmp_path / "run" / "model.float.onnx", images)
    np.testing.assert_array_equal(found, float_files.logits(whole, images))


def test_a_fixed_batch_is_kept(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "fixed.onnx", shape=[4, 3, 8, 8])
    config = settings(path, "static", tmp_path / "run")
    config.verify.max_drop, config.verify.latency_batch = None, 4
    assert onnx_file.quantize(config) == 0


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
    os.truncate(path.parent / "weights.bin", MAX_BYTES)  # a hole: it takes no space


def quantized(path: Path) -> None:
    modes.weight_only(float_files.trained(), path)


def dynamically_quantized(path: Path) -> None:
    modes.dynamic(float_files.trained(), path)


def no_operator(path: Path) -> None:
    nodes = [
        helper.make_node("GlobalAveragePool", ["input"], ["p"]),
        helper.make_node("Flatten", ["p"], ["output"]),
    ]
    by_hand(path, nodes=nodes)


def unknown_operator(path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["input", "w", "b"], ["y"]),
        helper.make_node("Mystery", ["y"], ["output"], domain="acme"),
    ]
    by_hand(path, nodes=nodes)


def no_upgrade(path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["y"]),
        helper.make_node("Cast", ["y"], ["output"], to=TensorProto.FLOAT),
    ]
    by_hand(path, opset=5, nodes=nodes)


def made_with(**changes: Any) -> Callable[[Path], object]:
    return lambda path: by_hand(path, **changes)


EXTRA = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["N", 3])
INPUT = "a model of one input, float32 images [N, C, H, W] of 1 or 3 channels"


def spoiled(path: Path) -> None:
    model = onnx.load(str(by_hand(path)))
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, 0, 0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, str(path))


def batch_inside(path: Path) -> None:
    """Its input takes any number of images, a Reshape within one only."""
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
    "text": (text, "an ONNX file ("),
    "empty": (empty, "an ONNX file with a graph; this one holds no operator"),
    "lost weights": (lost_weights, "a model with its external data beside it; weights.bin is missing"),
    "short weights": (short_weights, "a model with readable external data ("),
    "too large": (too_large, "a model of at most 2 GB, external data included"),
    "quantized": (quantized, "a float model; this one is quantized already (it has DequantizeLinear)"),
    "dynamic": (dynamically_quantized, "a float model; this one is quantized already (it has DynamicQuantizeLinear)"),
    "not finite": (spoiled, "finite weights; 'w' holds NaN or infinity"),
    "a batch inside": (batch_inside, "a model that runs on images [2, 3, 8, 8] ("),
    "nothing to quantize": (no_operator, "a model with an operator to quantize: Conv, Gemm or MatMul"),
    "unknown operator": (unknown_operator, "a model that ONNX Runtime runs ("),
    "no upgrade": (no_upgrade, "opset 13 or higher; it has 5 and can't be upgraded ("),
    "two inputs": (made_with(inputs=[EXTRA]), f"{INPUT}; it has input, mask"),
    "rank": (made_with(shape=["N", 192]), f"{INPUT}; its input 'input' is float [?, 192]"),
    "channels": (made_with(shape=["N", 8, 8, 3]), f"{INPUT}; its input 'input' is float [?, 8, 8, 3]"),
    "bytes": (made_with(kind=TensorProto.UINT8), f"{INPUT}; its input 'input' is uint8 [?, 3, 8, 8]"),
    "not square": (made_with(shape=["N", 3, 8, 16]), f"{INPUT}, height and width equal; it has 8 x 16"),
    "two outputs": (made_with(outputs=[helper.make_tensor_value_info("r", TensorProto.FLOAT, None)]),
                    "a model of one output, logits [N, classes]; it has output, r"),
    "classes": (made_with(classes=7), "logits [N, 10], one for each class of the data; it gives [2, 7]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_used_is_one_line(case: str, tmp_path: Path) -> None:
    write, allowed = BAD_FILES[case]
    path = tmp_path / "file.onnx"
    write(path)
    with pytest.raises(ConfigError) as raised:
        onnx_file.quantize(settings(path, "dynamic", tmp_path / "run"))
    assert str(raised.value).startswith(f"onnx={path}: {allowed}")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


BAD_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "size": ({}, {"data": {"image_size": 16}}, "data.image_size=16: null or 8, the input of "),
    "channels": ({}, {"data": {"mean": [0.5], "std": [0.5]}}, "data.mean=[0.5]: 3 numbers: "),
    "mode": ({}, {"mode": "int4"}, "mode=int4: dynamic | static | float16 | weight_only"),
    "no images": ({}, {"calibration": {"images": 0}}, "calibration.images=0: 1 or higher"),
    "few images": (
        {"shape": [200, 3, 8, 8]},
        {"verify": {"latency_batch": 200}},
        "calibration.images=128: at least",
    ),
    "batch": ({"shape": [4, 3, 8, 8]}, {}, "verify.latency_batch=1: 4, the fixed batch of "),
    "fewer images than the batch": (
        {"shape": [100, 3, 8, 8]},
        {"verify": {"latency_batch": 100}, "data": {"train_images": 50, "image_size": 8, "batch_size": 10}},
        "calibration.batch_size=100: at most the 50 training images",
    ),
    "reduced range of floats": (
        {},
        {"mode": "float16", "backend": {"reduce_range": True}},
        "backend.reduce_range=True: false with mode=float16",
    ),
    "control": ({}, {"verify": {"control": True}}, "verify.control=True: false"),
    "backend": (
        {},
        {"backend": {"target": "qatkit.backends.Backend"}},
        "backend.target=qatkit.backends.Backend: ",
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
        onnx_file.quantize(config)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds another run"):
        onnx_file.quantize(settings(float_files.trained(), "dynamic", tmp_path))
    assert os.listdir(tmp_path) == ["report.json"]


def run(script: str, *typed: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *typed]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=200)


def test_the_command_line_quantizes_a_file(tmp_path: Path) -> None:
    typed = ["mode=static", "data.image_size=8", "data.train_images=128", "calibration.images=200"]
    quick = ["trainer.progress=false", "verify.latency_runs=3"]
    done = run("export.py", f"onnx={float_files.trained()}", *typed, *quick, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "quantizing: static",
        "warning: calibration.images=200: the train split has 128 images, all are used",
        "verifying the files in ONNX Runtime",
    ]
    assert "INT8 static, ONNX Runtime" in done.stdout
    (folder,) = (tmp_path / "outputs" / "trained").iterdir()
    saved = load_config(folder / "config.yaml")
    assert (saved.mode, saved.data.image_size, saved.verify.audit) == ("static", 8, False)
    assert (folder / "report.json").is_file()


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [
        (
            "export.py",
            ["onnx=x.onnx"],
            "mode=None: with onnx=FILE one of dynamic | static | float16 | weight_only",
        ),
        ("export.py", ["onnx=x.onnx", "mode=int4"], "mode=int4: dynamic | static | float16 | weight_only"),
        ("export.py", ["onnx=x.onnx", "mode=static"], "onnx=x.onnx: a float ONNX file that exists"),
        (
            "export.py",
            ["onnx=x.onnx", "checkpoint=y.ckpt", "mode=static"],
            "onnx=x.onnx: null with checkpoint=y.ckpt",
        ),
        ("export.py", ["checkpoint=y.ckpt", "mode=static"], "mode=static: given together with onnx=FILE"),
        (
            "export.py",
            ["onnx=x.onnx", "mode=static", "schedule.lr=1"],
            "schedule.lr=1: no part of an ONNX file's run",
        ),
        (
            "export.py",
            ["onnx=x.onnx", "mode=static", "model=vit_b_16"],
            "model=vit_b_16: no part of an ONNX file's",
        ),
        (
            "train.py",
            ["onnx=x.onnx", "mode=static"],
            "onnx=x.onnx: null: export.py takes onnx=FILE mode=MODE",
        ),
        ("train.py", ["mode=static"], "mode=static: null: export.py takes onnx=FILE mode=MODE"),
    ],
)
def test_a_mistake_on_the_command_line_is_status_2(
    script: str, typed: list[str], line: str, tmp_path: Path
) -> None:
    done = run(script, *typed, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []
