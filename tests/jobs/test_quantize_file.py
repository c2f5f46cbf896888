"""Tests of float ONNX files from the command line to the bundle: the files and the figures of the report."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import pytest
from command_line import Launch, run_script
from float_files import EXTERNAL, by_hand, settings, with_branches
from onnx import helper

from qatkit.config.compose import load_config
from qatkit.config.schema import Config, DataConfig
from qatkit.jobs import export_checkpoint, quantize_file
from qatkit_verify.errors import ConfigError

TOOLS = ("dynamic", "float16", "weight_only")


@pytest.mark.parametrize("mode", TOOLS)
def test_the_bundle_tells_the_truth(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert quantize_file.quantize(settings(float_files.trained(), mode, folder)) == 0

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


def test_static_is_a_run_of_the_graph(tmp_path: Path) -> None:
    """Checks that the file is the given one, edited: every Conv and Gemm keeps its name and runs in int8."""
    folder, source = tmp_path / "run", by_hand(tmp_path / "file.onnx")
    config = settings(source, "static", folder)
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    names = {
        "model.static.onnx",
        "model.float.onnx",
        "model.json",
        "report.json",
        "report.html",
        "config.yaml",
    }
    assert set(os.listdir(folder)) == names | {"ranges.json", "last.ckpt"}
    assert (folder / "model.float.onnx").read_bytes() == source.read_bytes()
    before, after = (onnx.load(str(path)).graph for path in (source, folder / "model.static.onnx"))
    kept = {node.name for node in after.node}
    assert {node.name for node in before.node if node.op_type in ("Conv", "Gemm")} <= kept
    report = json.loads((folder / "report.json").read_text())
    assert {"float", "simulated", "int8"} == set(report["accuracy"])
    assert report["parity"]["reference"] == "the converted module"
    assert report["audit"]["int8_share"] == 1.0
    images = float_files.digits()[2]
    exact, found = (float_files.logits(path, images) for path in (source, folder / "model.static.onnx"))
    assert np.abs(found - exact).max() < 0.05 * np.ptp(exact)
    saved = replace(
        load_config(folder / "config.yaml"),
        checkpoint=str(folder / "last.ckpt"),
        output_dir=str(tmp_path / "again"),
        resume=None,
    )
    assert export_checkpoint.export(saved) == 0
    again = tmp_path / "again" / "model.static.onnx"
    assert again.read_bytes() == (folder / "model.static.onnx").read_bytes()


def test_the_audit_sees_what_a_dynamic_file_computes(tmp_path: Path) -> None:
    """Checks that every integer operator counts as int8, and only the depthwise Conv as float."""
    quantize_file.quantize(settings(float_files.trained(), "dynamic", tmp_path))
    audit = json.loads((tmp_path / "report.json").read_text())["audit"]
    matrix = [node for node in audit["nodes"] if node["macs"]]
    kinds = {node["op"]: node["precision"] for node in matrix}
    assert kinds.pop("Conv", kinds.pop("FusedConv", "float")) == "float"  # the depthwise Conv
    assert kinds and set(kinds.values()) == {"int8"}


def _resized(path: Path, opset: int, mode: str) -> Path:
    """Writes a file of a Conv, a resize by a factor of 1.5, a MaxPool with stride 4 and a MatMul."""
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
    assert quantize_file.quantize(config) == 0
    images = float_files.digits()[2][:20]
    exact = float_files.logits(path, images)
    found = float_files.logits(tmp_path / "run" / "model.float.onnx", images)
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


def test_an_opset_upgrade_that_changes_outputs_is_refused(tmp_path: Path) -> None:
    """Checks Hardmax: before opset 13 its axis had another meaning, and the opset converter ignores that."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.normal(size=(4, 3, 3, 3)), "fc": draw.normal(size=(10, 256))}
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Hardmax", ["y"], ["h"], "hardmax", axis=1),
        helper.make_node("Flatten", ["h"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
    ]
    path = by_hand(tmp_path / "old.onnx", opset=11, nodes=nodes, weights=weights)
    with pytest.raises(
        ConfigError, match=r"opset 13 or higher \(after the upgrade from opset 11, its logits differ by"
    ):
        quantize_file.quantize(settings(path, "float16", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.float.onnx", "model.dynamic.onnx"])
def test_the_file_that_is_read_is_never_written_over(name: str, tmp_path: Path) -> None:
    path = by_hand(tmp_path / name)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"output_dir=.*the folder holds a {name}; choose another folder"):
        quantize_file.quantize(settings(path, "dynamic", tmp_path))
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
    assert quantize_file.quantize(config) == 0
    audit = json.loads((tmp_path / "run" / "report.json").read_text())["audit"]
    assert audit["int8_share"] == 1.0


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    """Checks that the audit accepts a depthwise Conv that stays float on purpose, whatever its name is."""
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
    assert quantize_file.quantize(config) == 0


def test_the_code_on_the_page_feeds_a_fixed_batch(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "fixed.onnx", shape=[4, 3, 8, 8])
    config = settings(path, "float16", tmp_path / "run")
    config.verify.max_drop, config.verify.latency_batch = None, 4
    assert quantize_file.quantize(config) == 0
    assert "batch = image[None].repeat(4, axis=0)" in (tmp_path / "run" / "report.html").read_text()


def test_a_shortfall_is_status_1(tmp_path: Path) -> None:
    config = settings(float_files.trained(), "weight_only", tmp_path)
    config.verify.max_size_ratio = 0.1
    assert quantize_file.quantize(config) == 1
    shortfall = json.loads((tmp_path / "report.json").read_text())["shortfalls"][0]
    assert shortfall.startswith("verify.max_size_ratio=0.1: the INT8 weights file has 0.2")


@pytest.mark.parametrize("mode", TOOLS)
def test_an_older_opset_is_upgraded_and_said(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = by_hand(tmp_path / "old.onnx", opset=11)
    config = settings(path, mode, tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0

    model = onnx.load(str(tmp_path / "run" / f"model.{mode}.onnx"))
    assert next(item.version for item in model.opset_import if item.domain == "") == 13
    note = "old.onnx has opset 11 and was upgraded to 13 before quantization"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["notes"] == [note]
    printed = capsys.readouterr()
    assert note in printed.out and note in printed.err
    assert note in (tmp_path / "run" / "report.html").read_text()
    images = float_files.digits()[2][:20]
    exact = float_files.logits(path, images)
    found = float_files.logits(tmp_path / "run" / f"model.{mode}.onnx", images)
    np.testing.assert_allclose(found, exact, atol=0.03 * np.abs(exact).max())


def test_a_branch_that_is_always_taken_is_part_of_the_graph(tmp_path: Path) -> None:
    path = with_branches(tmp_path / "branches.onnx", constant=True)
    config = settings(path, "dynamic", tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "run" / "model.dynamic.onnx")).graph.node}
    assert "ConvInteger" in kinds and "If" not in kinds


def test_external_data_is_read(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "file.onnx", save=EXTERNAL)
    assert (tmp_path / "weights.bin").is_file()
    config = settings(path, "weight_only", tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    whole = by_hand(tmp_path / "whole.onnx")
    images = float_files.digits()[2][:20]
    found = float_files.logits(tmp_path / "run" / "model.float.onnx", images)
    np.testing.assert_array_equal(found, float_files.logits(whole, images))


def test_a_fixed_batch_is_kept(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "fixed.onnx", shape=[4, 3, 8, 8])
    config = settings(path, "static", tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["fixed_batch"] == 4
    assert load_config(tmp_path / "run" / "config.yaml").verify.latency_batch == 4
    assert config.verify.latency_batch == 1  # the caller's config is unchanged


def test_the_command_line_quantizes_a_file(tmp_path: Path) -> None:
    typed = ["mode=static", "data.image_size=8", "data.train_images=128", "calibration.images=200"]
    quick = ["trainer.progress=false", "verify.latency_runs=3"]
    done = run_script("export.py", f"onnx={float_files.trained()}", *typed, *quick, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "warning: calibration.images=200: the train split has only 128, and all of them are used"
        in done.stderr
    )
    assert "INT8, ONNX Runtime" in done.stdout
    (folder,) = (tmp_path / "outputs" / "trained").iterdir()
    saved = load_config(folder / "config.yaml")
    assert saved.model.name == f"onnx/{float_files.trained()}" and saved.schedule.epochs == 0
    assert (saved.data.image_size, saved.verify.audit, saved.calibration.batch_size) == (8, False, 8)
    assert (saved.mode, saved.verify.min_agreement) == ("static", 0.9)
    report = json.loads((folder / "report.json").read_text())
    top1 = float_files.top1(folder / "model.static.onnx", entries=report["session_options"])
    assert report["accuracy"]["int8"]["top1"] == pytest.approx(top1)
    assert report["accuracy"]["float"]["top1"] == pytest.approx(float_files.top1(float_files.trained()))


TOLD: dict[str, Any] = {
    "image_size": 8,
    "resize": 8,
    "mean": [0.5],
    "std": [0.5],
    "interpolation": "bilinear",
}


def test_a_bundle_tells_how_the_images_of_its_file_were_prepared(tmp_path: Path) -> None:
    """Checks a file of 28 x 28 pixels: settings left open come from model.json, the others apply as set."""
    path = by_hand(tmp_path / "model.float.onnx", shape=["N", 3, 28, 28])
    told = {"image_size": 28, "resize": 32, "mean": [0.1, 0.2, 0.3], "std": [0.9, 0.8, 0.7],
            "interpolation": "bicubic", "channels": 3}  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps({"preprocessing": told, "classes": []}))
    changed: dict[str, Any] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    for name, set_to in (("kept", {}), ("changed", changed)):
        config = settings(path, "float16", tmp_path / name, data=replace(DataConfig(workers=0), **set_to))
        config.verify.max_drop = None
        assert quantize_file.quantize(config) == 0
        prepared = json.loads((tmp_path / name / "model.json").read_text())["preprocessing"]
        assert prepared == told | set_to | {"upright": False}  # as this run opened its images
        notes = json.loads((tmp_path / name / "report.json").read_text())["notes"]
        said = (
            "the model.json next to model.float.onnx says mean [0.1, 0.2, 0.3], std [0.9, 0.8, 0.7]; this run "
            "uses images with mean [0.5, 0.5, 0.5], std [0.5, 0.5, 0.5], and measures its accuracy on them"
        )
        assert notes == ([said] if set_to else [])


def test_the_command_line_leaves_a_bundle_its_own_images(launch: Launch, tmp_path: Path) -> None:
    """Checks that the keys of data=cifar10_folder give way to model.json, while keys that are typed apply."""
    seen: list[Config] = []
    path = by_hand(tmp_path / "model.float.onnx", shape=["N", 3, 28, 28])
    told = {"image_size": 28, "resize": 32, "mean": [0.1], "std": [0.9], "interpolation": "bilinear"}
    (tmp_path / "model.json").write_text(json.dumps({"preprocessing": told}))
    typed = [f"onnx={path}", "mode=float16", "data=cifar10_folder", "data.root=x"]
    for more in ([], ["data.mean=[0.5]", "data.std=[0.25]"]):
        assert launch(seen.append, *typed, *more, from_checkpoint=True) == 0
    left, set_to = (config.data for config in seen)
    assert (left.image_size, left.resize, left.mean, left.std) == (None, None, None, None)
    assert (set_to.image_size, set_to.resize, set_to.mean, set_to.std) == (None, None, [0.5], [0.25])
    (tmp_path / "model.json").unlink()
    assert launch(seen.append, *typed, from_checkpoint=True) == 0
    assert seen[-1].data.image_size == 32


@pytest.mark.parametrize(
    "text",
    ["{}", '{"format": "layers"}', json.dumps({"preprocessing": TOLD | {"image_size": 9, "resize": 9}})],
)
def test_a_model_json_of_another_input_says_nothing(text: str, tmp_path: Path) -> None:
    path = by_hand(tmp_path / "file.onnx")
    (tmp_path / "model.json").write_text(text)
    config = settings(path, "float16", tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    prepared = json.loads((tmp_path / "run" / "model.json").read_text())["preprocessing"]
    own = {"mean": [0.5] * 3, "std": [0.5] * 3, "upright": False}  # of the digits
    assert prepared == {"channels": 3} | TOLD | own
