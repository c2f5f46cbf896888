"""Tests of train.py with a float ONNX file as its model: PTQ and distillation, without labels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from command_line import run_script
from onnx import helper
from onnx_models import FLOAT, Array, onnx_type, save, sqnr
from PIL import Image

from qatkit import QATModule
from qatkit.config.schema import Config, ModelConfig
from qatkit.data import digits
from qatkit.data.inputs import ImageInputs
from qatkit.importing import import_onnx
from qatkit.run.export import write_file
from qatkit.tasks import task_of
from qatkit_verify.command import main as judged

SETTINGS = (
    "task=outputs", "data=digits", "data.image_size=8", "data.mean=[0.5]", "data.std=[0.5]", "data.workers=0",
    "calibration.images=64", "verify.control=false", "verify.latency_runs=3", "verify.threads=1",
    "trainer.accelerator=cpu", "trainer.progress=false", "schedule.distill=1",
    "verify.min_float_agreement=0", "verify.min_float_sqnr=0",
)  # fmt: skip


def _detector(path: Path, seed: int = 0) -> Path:
    """Writes a detector with two outputs per position: boxes with large values, and scores from 0 to 1."""
    draw = np.random.default_rng(seed)

    def weights(*shape: int) -> Array:
        drawn: Array = draw.normal(0, 1, shape) / np.sqrt(np.prod(shape[1:]))
        return drawn.astype(np.float32)

    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["a"], ["g"], "/stem/Sigmoid"),
        helper.make_node("Mul", ["a", "g"], ["s"], "/stem/Mul"),
        helper.make_node("Conv", ["s", "u"], ["c"], "/body/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "/body/Relu"),
        helper.make_node("Conv", ["r", "v"], ["b"], "/boxes/Conv"),
        helper.make_node("Mul", ["b", "scale"], ["boxes"], "/boxes/Mul"),
        helper.make_node("Conv", ["r", "t"], ["l"], "/scores/Conv"),
        helper.make_node("Sigmoid", ["l"], ["scores"], "/scores/Sigmoid"),
    ]
    constants = {
        "w": weights(8, 1, 3, 3),
        "u": weights(16, 8, 3, 3),
        "v": weights(4, 16, 1, 1),
        "t": weights(3, 16, 1, 1),
    }
    constants["scale"] = np.array(200, np.float32)
    return save(path, nodes, {"image": (FLOAT, ["n", 1, 8, 8])}, ["boxes", "scores"], constants)


def _train(folder: Path, *settings: str, status: int = 0) -> str:
    done = run_script("train.py", *SETTINGS, *settings, f"output_dir={folder}")
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def _images() -> Array:
    test = digits(None, False, 0).test
    pixels = np.stack([np.asarray(test[i][0]) for i in range(60)])
    return ((pixels / 255 - 0.5) / 0.5).astype(np.float32).reshape(60, 1, 8, 8)


def _quality(float_file: Path, folder: Path) -> list[float]:
    """Returns the SQNR in dB of each output of a run's INT8 file against the float file."""
    images = _images()
    exact = ort.InferenceSession(str(float_file)).run(None, {"image": images})
    session = ort.InferenceSession(str(folder / "model.int8.onnx"))
    found = session.run(None, {session.get_inputs()[0].name: images})
    return [sqnr(a, b) for a, b in zip(exact, found, strict=True)]


def test_relus_of_a_file_are_no_fault_before_calibration(tmp_path: Path) -> None:
    """With int8 activations, the zero_point after a ReLU is -128 even in the export before calibration."""
    file = _detector(tmp_path / "detector.onnx")
    told = _train(tmp_path / "run", f"model.name=onnx/{file}", "schedule=calibrate_only", "backend=qnnpack",
                  "backend.reduce_range=true")  # fmt: skip
    assert "4 of 4 Conv/Gemm/MatMul run in int8" in told
    assert min(_quality(file, tmp_path / "run")) > 20


def test_qat_of_a_file_comes_nearer_to_float_than_ptq(tmp_path: Path) -> None:
    file = _detector(tmp_path / "detector.onnx")
    int4 = "+backend.overrides={*:{weight_dtype:int4}}"
    model = f"model.name=onnx/{file}"
    _train(tmp_path / "ptq", model, "schedule=calibrate_only", int4, "export.opset=21", "verify.audit=false")
    told = _train(tmp_path / "qat", model, "schedule=qat_adamw", "schedule.lr=2e-3", "schedule.epochs=4", int4,
                  "export.opset=21", "verify.audit=false")  # fmt: skip
    assert "same outputs (cosine of at least 0.99)" in told and "logits" not in told and "top-1" not in told
    ptq, qat = _quality(file, tmp_path / "ptq"), _quality(file, tmp_path / "qat")
    assert all(after > before + 2 for before, after in zip(ptq, qat, strict=True)), (ptq, qat)
    report: dict[str, Any] = json.loads((tmp_path / "qat" / "report.json").read_text())
    assert report["task"]["name"] == "outputs" and report["parity"]


def test_a_run_edits_the_file_and_uses_its_names(tmp_path: Path) -> None:
    file = _detector(tmp_path / "detector.onnx")
    pattern = "+backend.overrides={/scores/Conv:{float:true}}"
    told = _train(tmp_path / "run", f"model.name=onnx/{file}", "schedule=calibrate_only", pattern)
    assert "3 of 4 Conv" in told
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert any("/scores/Conv" in site for site, _ in report["skipped"])
    graph = onnx.load(str(tmp_path / "run" / "model.int8.onnx")).graph
    given = onnx.load(str(file)).graph
    assert [one.name for one in graph.input] == ["image"]
    assert [one.name for one in graph.output] == ["boxes", "scores"]
    names = {node.name for node in given.node}
    assert names - {node.name for node in graph.node} == {"/stem/Sigmoid", "/stem/Mul"}  # one 8-bit SiLU now
    added = {node.op_type for node in graph.node if node.name not in names}
    assert added == {"QuantizeLinear", "DequantizeLinear", "QuickGelu"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("model.name=onnx/absent.onnx",),
            "model.name=onnx/absent.onnx: expected a float ONNX file that exists",
        ),
        (("model.weights=DEFAULT",), "model.weights=DEFAULT: expected null with model.name=onnx/"),
        (
            ("+model.kwargs={fix:{rate:1}}",),
            "model.kwargs.fix=rate: expected an input of detector.onnx (image)",
        ),
        (
            ("data.image_size=9", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"),
            "data.image_size=9: expected null or",
        ),
        (
            ("schedule.distill=0", "schedule.epochs=1"),
            "schedule.distill=1, which learns from the float model",
        ),
        (
            ("+model.kwargs={custom_ops:no.so}", "export.bundle=true"),
            "export.bundle=true: expected false with model.kwargs.custom_ops",
        ),
        (("+model.kwargs={custom_ops:no.so}",), "custom_ops=no.so: expected an existing library"),
    ],
)
def test_mistakes_are_one_line(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = _detector(tmp_path / "detector.onnx")
    given = (
        settings
        if any(one.startswith("model.name") for one in settings)
        else (f"model.name=onnx/{file}", *settings)
    )
    told = _train(tmp_path / "run", "schedule=calibrate_only", *given, status=2)
    assert message in told and "Traceback" not in told
    assert not (tmp_path / "run" / "report.json").exists()


def test_a_file_without_weights_is_called_by_its_name(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    file = save(tmp_path / "plain.onnx", [node], {"x": (FLOAT, ["n", 1, 8, 8])}, ["y"])
    told = _train(tmp_path / "run", "schedule=calibrate_only", f"model.name=onnx/{file}", status=2)
    assert f"onnx={file}: the model has no Conv" in told and "ImportedModel" not in told


def test_outputs_agree_by_their_direction() -> None:
    task = task_of("outputs")
    exact = np.random.default_rng(0).normal(0, 1, (4, 3, 5))
    assert task.agree(exact, exact * 3).all()
    turned = exact.copy()
    turned[1] = -turned[1]
    assert task.agree(exact, turned).tolist() == [True, False, True, True]
    assert task.agree(exact * 0, exact * 0).all() and not task.agree(exact * 0, exact).any()


def test_a_new_file_where_the_given_one_has_no_form(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "/product")
    for kind, told in ((np.float16, "computes in float16 instead of float32"), (np.float32, "")):
        weight = np.random.default_rng(1).normal(0, 1, (6, 4)).astype(kind)
        file = save(tmp_path / "m.onnx", [node], {"x": (onnx_type(weight), ["n", 6])}, ["y"], {"w": weight})
        config = Config(model=ModelConfig(name=f"onnx/{file}"))
        batch = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (8, 6)).astype(np.float32))
        module = QATModule(import_onnx(file), batch)
        module.calibrate([batch])
        converted = module.convert().graph
        notes = write_file(converted, config, ImageInputs((6,)), tmp_path / "int8.onnx")
        assert len(notes) == bool(told) and all(told in note for note in notes)
        session = ort.InferenceSession(str(tmp_path / "int8.onnx"))
        (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        np.testing.assert_allclose(found, converted(batch).detach().numpy(), atol=1e-5)


def _inverting(path: Path) -> Path:
    """Writes a file with two convolutions around an operator that the importer cannot translate."""
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"], "/first/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["a", "diagonal"], ["regular"], "/regular"),
        helper.make_node("Inverse", ["regular"], ["inverse"], "/inverse", domain="com.microsoft"),
        helper.make_node("Conv", ["inverse", "u"], ["y"], "/last/Conv", pads=[1, 1, 1, 1]),
    ]
    constants: dict[str, Array] = {
        "w": draw.normal(0, 1, (8, 1, 3, 3)).astype(np.float32) / 3,
        "u": draw.normal(0, 1, (8, 8, 3, 3)).astype(np.float32) / 8,
        "diagonal": 10 * np.eye(8, dtype=np.float32),
    }
    imports = [helper.make_opsetid("com.microsoft", 1)]
    return save(path, nodes, {"image": (FLOAT, ["n", 1, 8, 8])}, ["y"], constants, imports=imports)


def test_a_run_leaves_what_pytorch_lacks_in_the_files(tmp_path: Path) -> None:
    file = _inverting(tmp_path / "inverting.onnx")
    _train(tmp_path / "run", f"model.name=onnx/{file}", "schedule=calibrate_only")
    for name in ("model.int8.onnx", "model.float.onnx"):
        nodes = onnx.load(str(tmp_path / "run" / name)).graph.node
        assert sum(node.op_type == "Inverse" for node in nodes) == 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert any(
        site == "/inverse" and "stays in float and runs in ONNX Runtime, because" in why
        for site, why in report["skipped"]
    )
    images, session = _images(), ort.InferenceSession(str(tmp_path / "run" / "model.float.onnx"))
    (exact,) = ort.InferenceSession(str(file)).run(None, {"image": images})
    (found,) = session.run(None, {session.get_inputs()[0].name: images})
    assert sqnr(exact, found) > 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("schedule=qat_adamw",), "the weights of '/first/Conv' reach its outputs only through '/inverse'"),
        (
            ("schedule=calibrate_only", "export.dynamic_batch=false"),
            "export.dynamic_batch=false: the setting needs a new export, but only ONNX Runtime can compute '/inverse'",
        ),
    ],
)
def test_what_needs_a_gradient_or_a_new_file(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = _inverting(tmp_path / "inverting.onnx")
    told = _train(tmp_path / "run", f"model.name=onnx/{file}", *settings, status=2)
    assert message in told and "Traceback" not in told and "calibrating" not in told


def _channels_last(path: Path, *sides: int | str) -> Path:
    """Writes a detector that takes pixels [n, *sides, 3] in 0..255 and returns boxes per position."""
    draw = np.random.default_rng(1)
    constants = {"w": draw.normal(0, 0.01, (8, 3, 3, 3)).astype(np.float32),
                 "v": draw.normal(0, 0.5, (4, 8, 1, 1)).astype(np.float32)}  # fmt: skip
    nodes = [
        helper.make_node("Transpose", ["image"], ["t"], "/first", perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"], "/stem/Relu"),
        helper.make_node("Conv", ["r", "v"], ["boxes"], "/boxes/Conv"),
    ]
    return save(path, nodes, {"image": (FLOAT, ["n", *sides, 3])}, ["boxes"], constants)


def _letterboxed() -> Array:
    """Returns the test digits, resized to the left 6 x 6 of 6 x 12 pixels, in three equal channels."""
    test, found = digits(None, False, 0).test, []
    for image, _ in (test[i] for i in range(len(test))):
        canvas = Image.new("L", (12, 6), 114)
        canvas.paste(Image.fromarray(np.asarray(image).squeeze()).resize((6, 6), Image.Resampling.BILINEAR))
        found.append(np.repeat(np.asarray(canvas, np.float32)[..., None], 3, axis=2))
    return np.stack(found)


@pytest.mark.parametrize("sides", [(6, 12), ("height", "width")], ids=["fixed", "open"])
def test_a_detector_takes_oblong_images_with_channels_last(
    sides: tuple[int | str, ...], tmp_path: Path
) -> None:
    file, run = _channels_last(tmp_path / "detector.onnx", *sides), tmp_path / "run"
    _train(run, f"model.name=onnx/{file}", "schedule=calibrate_only", "data.image_size=[6,12]", "data.layout=nhwc",
           "data.fit=letterbox", "data.align=top_left", "data.channels=bgr", "data.pixels=0..255", "data.mean=null",
           "data.std=null", "export.bundle=true")  # fmt: skip
    images, report = _letterboxed(), json.loads((run / "report.json").read_text())
    exact, found = (
        ort.InferenceSession(str(path)).run(None, {"image": images})[0]
        for path in (file, run / "model.int8.onnx")
    )
    told = report["fidelity"]["int8"] if report["fidelity"] else report["accuracy"]["int8"]
    assert told["images"] == len(images)
    assert sqnr(exact, found) > 25
    bundle = run / "bundle"
    assert judged([str(bundle), "--runs", "3", "--threads", "1", "--min-speedup", "0"]) == 0
    prepared = json.loads((bundle / "preprocess.json").read_text())
    assert (prepared["crop"], prepared["layout"], prepared["channel_order"]) == ("none", "NHWC", "BGR")
    assert prepared["input"]["shape"] == ["N", 6, 12, 3]
    (code,) = re.findall(r"```python\n(.*?)```", (bundle / "card.md").read_text(), re.DOTALL)
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(bundle / "image.jpg")
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=bundle
    )
    assert printed.stdout == "boxes float32 (1, 4, 6, 12)\n"
    assert all(
        word not in (bundle / "card.md").read_text() for word in ("argsort", "sort((a, b)", "classify")
    )


def test_bytes_in_take_the_pixels_of_mean_and_std_of_255(tmp_path: Path) -> None:
    draw, run = np.random.default_rng(2), tmp_path / "run"
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"], "/stem/Relu"),
        helper.make_node("Conv", ["r", "v"], ["boxes"], "/boxes/Conv"),
    ]
    weights = {"w": draw.normal(0, 0.3, (8, 1, 3, 3)).astype(np.float32),
               "v": draw.normal(0, 0.3, (4, 8, 1, 1)).astype(np.float32)}  # fmt: skip
    one = save(tmp_path / "one.onnx", nodes, {"image": (FLOAT, ["n", 1, 8, 8])}, ["boxes"], weights)
    _train(run, f"model.name=onnx/{one}", "schedule=calibrate_only", "data.pixels=0..255", "data.mean=[127.5]",
           "data.std=[51]", "export.io=uint8", "export.bundle=true")  # fmt: skip
    session = ort.InferenceSession(str(run / "model.int8.onnx"))
    ends = json.loads(session.get_modelmeta().custom_metadata_map["qatkit.io"])
    assert ends["mean"] == [pytest.approx(0.5)] and ends["std"] == [pytest.approx(0.2)]
    test = digits(None, False, 0).test
    pixels = np.stack([np.asarray(test[i][0]) for i in range(60)]).reshape(60, 1, 8, 8)
    (found,) = session.run(None, {"image": pixels})
    (exact,) = ort.InferenceSession(str(one)).run(None, {"image": (pixels.astype(np.float32) - 127.5) / 51})
    assert sqnr(exact, (found.astype(np.float32) - ends["zero_point"]) * ends["scale"]) > 20
    assert judged([str(run / "bundle"), "--runs", "3", "--threads", "1", "--min-speedup", "0"]) == 0
