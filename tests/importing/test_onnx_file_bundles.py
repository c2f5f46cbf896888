"""Tests of bundles of models whose inputs are arrays instead of pictures.

The models may have any inputs and outputs. Bundles are verified without torch, and damage is detected.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import run_script
from onnx import helper
from onnx_models import FLOAT, Array, save

from qatkit.config.schema import Config, ExportConfig
from qatkit.run.build import check_arrays
from qatkit_verify.bundle.golden import Golden, read_golden, tolerances, write_golden
from qatkit_verify.bundle.manifest import entry, read_manifest, write_manifest
from qatkit_verify.bundle.ports import Port
from qatkit_verify.command import main
from qatkit_verify.errors import ConfigError

SETTINGS = (
    "recipe=onnx_ptq", "data.workers=0", "calibration=moving_average", "calibration.batch_size=8",
    "verify.latency_runs=3", "verify.threads=1", "trainer.progress=false", "verify.audit=false",
    "verify.min_float_agreement=0", "verify.min_float_sqnr=-100", "export.bundle=true", "export.golden_images=3",
)  # fmt: skip
# Runs qatkit-verify as if torch, qatkit, onnx and Pillow were not installed.
ALONE = (
    "import sys; sys.modules.update(dict.fromkeys(('torch', 'qatkit', 'onnx', 'onnx_ir', 'PIL'))); "
    "from qatkit_verify.command import main; sys.exit(main())"
)


def _file(path: Path) -> Path:
    """Writes a model with inputs ids and mask [n, 6], state [2, n, 8] and gain [8] without a batch axis."""
    draw = np.random.default_rng(3)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"], "/embed/Gather"),
        helper.make_node("Cast", ["mask"], ["kept"], "/Cast", to=FLOAT),
        helper.make_node("Unsqueeze", ["kept", "two"], ["wide"], "/Unsqueeze"),
        helper.make_node("Mul", ["embedded", "wide"], ["some"], "/Mul"),
        helper.make_node("ReduceMean", ["some"], ["mean"], "/Mean", axes=[1], keepdims=0),
        helper.make_node("ReduceMean", ["state"], ["held"], "/State", axes=[0], keepdims=0),
        helper.make_node("Add", ["mean", "held"], ["sum"], "/Add"),
        helper.make_node("Mul", ["sum", "gain"], ["scaled"], "/Gain"),
        helper.make_node("MatMul", ["scaled", "a"], ["hidden"], "/hidden/MatMul"),
        helper.make_node("Relu", ["hidden"], ["relu"], "/Relu"),
        helper.make_node("MatMul", ["relu", "b"], ["logits"], "/head/MatMul"),
        helper.make_node("Softmax", ["logits"], ["probabilities"], "/head/Softmax", axis=-1),
        helper.make_node("Add", ["state", "mean"], ["next_state"], "/Next"),
        helper.make_node("ArgMax", ["logits"], ["best"], "/Best", axis=1, keepdims=0),
    ]
    shapes = {"table": (50, 8), "a": (8, 16), "b": (16, 4)}
    constants: dict[str, Array] = {
        name: draw.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()
    }
    constants["two"] = np.array([2], np.int64)
    kinds = onnx.TensorProto
    inputs: dict[str, Array | tuple[int, Sequence[int | str]]] = {
        "ids": (kinds.INT64, ["n", 6]),
        "mask": (kinds.BOOL, ["n", 6]),
        "state": (FLOAT, [2, "n", 8]),
        "gain": (FLOAT, [8]),
    }
    return save(path, nodes, inputs, ["probabilities", "next_state", "best"], constants)


def _samples(root: Path, count: int = 40) -> Path:
    root.mkdir()
    draw = np.random.default_rng(1)
    for place in range(count):
        np.savez(
            root / f"{place:03}.npz",
            ids=draw.integers(0, 50, (1, 6)),
            mask=draw.uniform(size=(1, 6)) < 0.7,
            state=draw.normal(size=(2, 1, 8)).astype(np.float32),
            gain=np.linspace(0.5, 1.5, 8, dtype=np.float32),
        )
    return root


def _train(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    file = _file(folder / "arrays.onnx")
    root = folder / "data" if (folder / "data").is_dir() else _samples(folder / "data")
    command = ["train.py", *SETTINGS, f"onnx={file}", f"data.root={root}",
               f"output_dir={folder / 'run'}", *settings]  # fmt: skip
    return run_script(*command)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    done = _train(folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "bundle: " in done.stderr
    return folder


def _bundled_again(run: Path, out: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    checkpoint = f"checkpoint={run / 'run' / 'last.ckpt'}"
    return run_script("export.py", checkpoint, "export.bundle=true", f"output_dir={out}", *settings)


def test_a_bundle_is_made_of_data_that_have_moved(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "data", tmp_path / "moved")
    done = _bundled_again(run, tmp_path / "out", f"data.root={tmp_path / 'moved'}", "export.golden_images=3")
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("golden.npz", "model.json", "model.onnx"):
        assert (tmp_path / "out" / "bundle" / name).read_bytes() == (
            run / "run" / "bundle" / name
        ).read_bytes()


def test_a_bundle_is_not_made_of_other_data(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "data", tmp_path / "other")
    (tmp_path / "other" / "000.npz").unlink()
    done = _bundled_again(run, tmp_path / "out", f"data.root={tmp_path / 'other'}")
    told = f"expected the data of the run in {run / 'run'}; those in this folder differ"
    assert done.returncode == 2 and done.stderr.endswith(f"error: data.root={tmp_path / 'other'}: {told}\n")
    assert not (tmp_path / "out" / "bundle").exists()


def seal(bundle: Path) -> None:
    """Rewrites the manifest for the present contents of the bundle."""
    told = read_manifest(bundle)
    write_manifest(bundle, replace(told, files=tuple(entry(bundle, one.name) for one in told.files)))


def judged(bundle: Path, *typed: str) -> int:
    return main([str(bundle), "--runs", "3", "--threads", "1", "--min-speedup", "0", *typed])


def test_it_is_verified_with_onnxruntime_and_numpy_alone(run: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(run / "run" / "bundle"), "--runs", "3", "--threads", "1"]
    command += ["--min-speedup", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "4 inputs as in model.json (ids int64 [N, 6], mask bool [N, 6], state float32 [2, N, 8]"
        in done.stdout
    )
    assert re.search(r"answers, optimized +ok +3 runs, difference at most 0 steps", done.stdout)
    assert re.search(r"speed +ok .*float .* ms", done.stdout)


def test_golden_runs_are_test_samples_and_the_files_answers(run: Path) -> None:
    bundle = run / "run" / "bundle"
    golden, session = read_golden(bundle / "golden.npz"), ort.InferenceSession(str(bundle / "model.onnx"))
    tested = [dict(np.load(path)) for path in sorted((run / "data").glob("*.npz"))[1::2]]
    assert len(golden.runs) == 3 and golden.inputs == golden.runs[0] and golden.pixels == ()
    for place, one in enumerate(golden.runs):
        assert any(all(np.array_equal(one[key], sample[key]) for key in one) for sample in tested)
        assert {key: value.dtype.name for key, value in one.items()} == {
            "ids": "int64", "mask": "bool", "state": "float32", "gain": "float32",
        }  # fmt: skip
        answers = session.run(None, dict(one))
        for output, answer in zip(session.get_outputs(), answers, strict=True):
            np.testing.assert_allclose(golden.on[f"{place}/{output.name}"], answer, atol=1e-6)
    assert golden.steps["0/best"] == golden.steps["2/best"] == 0.5  # so another class is out of tolerance
    about = json.loads((bundle / "model.json").read_text())
    assert [(one["name"], one["batch_axis"]) for one in about["inputs"]] == [
        ("ids", 0), ("mask", 0), ("state", 1), ("gain", None),
    ]  # fmt: skip
    assert [(one["name"], one["type"]) for one in about["outputs"]] == [
        ("probabilities", "float32"), ("next_state", "float32"), ("best", "int64"),
    ]  # fmt: skip
    assert read_manifest(bundle).format == 2


def test_the_program_of_the_card_runs(run: Path, tmp_path: Path) -> None:
    bundle = run / "run" / "bundle"
    card = (bundle / "card.md").read_text()
    assert "| Input | state float32 \\[2, N, 8\\] |" in card
    assert "Measured on 20 test samples of qatkit.data.arrays.arrays" in card and "pictures" not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert 'stored["input:0/ids"],  # ids int64 [N, 6]' in code
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=bundle
    )
    assert done.stdout.splitlines() == [
        "probabilities float32 (1, 4)", "next_state float32 (2, 1, 8)", "best int64 (1,)",
    ]  # fmt: skip
    assert "In C++ and JavaScript, the inputs have the same names and arrays." in card
    assert not (bundle / "javascript").exists() and not (bundle / "preprocess.json").exists()


def test_a_damaged_array_is_seen(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(run / "run" / "bundle", bundle)
    stored = (bundle / "golden.npz").read_bytes()
    (bundle / "golden.npz").write_bytes(stored[:500] + bytes([stored[500] ^ 1]) + stored[501:])
    assert judged(bundle) == 2 and "golden.npz has other contents" in capsys.readouterr().err
    (bundle / "golden.npz").write_bytes(stored)
    golden, runs = read_golden(bundle / "golden.npz"), tuple[Mapping[str, Array], ...]()
    for key, change in (("ids", 7), ("state", 3.0)):  # with a manifest that fits the changed file
        runs = ({**golden.runs[0], key: (golden.runs[0][key] + change).astype(golden.runs[0][key].dtype)},)
        write_golden(bundle / "golden.npz", replace(golden, runs=runs + golden.runs[1:]))
        seal(bundle)
        assert judged(bundle) == 1
        assert "answers, as written falls short" in capsys.readouterr().out
    runs = ({**golden.runs[0], "ids": golden.runs[0]["ids"].astype(np.float32)}, *golden.runs[1:])
    write_golden(bundle / "golden.npz", replace(golden, runs=runs))
    seal(bundle)
    assert judged(bundle) == 2
    assert "golden=ids float32 [1, 6], mask bool [1, 6]" in capsys.readouterr().err
    outputs = {name: one for name, one in golden.on.items() if name != "2/best"}
    write_golden(
        bundle / "golden.npz", replace(golden, on=outputs, off=outputs, steps={**dict.fromkeys(outputs, 1.0)})
    )
    seal(bundle)
    assert judged(bundle) == 2 and "runs differ in their inputs or outputs" in capsys.readouterr().err


def test_pictures_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(run / "run" / "bundle", "--pictures", str(tmp_path)) == 2
    assert "the model of this bundle has no pictures as inputs" in capsys.readouterr().err


def test_another_model_json_is_seen(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(run / "run" / "bundle", bundle)
    about = json.loads((bundle / "model.json").read_text())
    about["inputs"][0]["type"] = "int32"
    (bundle / "model.json").write_text(json.dumps(about))
    seal(bundle)
    assert judged(bundle) == 1
    assert "the file differs: ids int32 [N, 6]" in capsys.readouterr().out


def test_a_file_of_a_fixed_batch_gets_whole_batches(tmp_path: Path) -> None:
    draw, root = np.random.default_rng(4), tmp_path / "data"
    root.mkdir()
    weights: dict[str, Array] = {
        name: draw.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in (("a", (8, 16)), ("b", (16, 4)))
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], "/first"),
        helper.make_node("Relu", ["h"], ["r"], "/Relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], "/last"),
    ]
    file = save(tmp_path / "plain.onnx", nodes, {"x": (FLOAT, ["n", 8])}, ["y"], weights)
    np.savez(root / "all.npz", x=draw.normal(size=(40, 8)).astype(np.float32))
    command = ["train.py", *SETTINGS, f"onnx={file}", f"data.root={root}", "export.golden_images=5",
               f"output_dir={tmp_path / 'run'}", "verify.latency_batch=4", "export.dynamic_batch=false"]  # fmt: skip
    done = run_script(*command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    bundle = tmp_path / "run" / "bundle"
    golden = read_golden(bundle / "golden.npz")
    assert [one.shape for run in golden.runs for one in run.values()] == [(4, 8)] * 2
    assert judged(bundle) == 0


def test_the_demo_page_is_for_pictures() -> None:
    config = Config(export=ExportConfig(bundle=True, demo=True))
    with pytest.raises(
        ConfigError,
        match=r"export.demo=true: expected false with data.source=.*, since the demo only shows pictures",
    ):
        check_arrays(config)


def test_a_signed_zip_is_verified(tmp_path: Path) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, private = tmp_path / "private.pem", Ed25519PrivateKey.generate()
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    done = _train(
        tmp_path, f"export.sign={key}", "export.bundle_as=zip", f"export.publish={tmp_path / 'store'}"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert judged(tmp_path / "run" / "bundle.zip") == 0
    assert list((tmp_path / "store").rglob("manifest.json"))


def test_samples_of_other_sizes_are_runs_of_their_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    runs = tuple({"x": draw.normal(size=(1, length)).astype(np.float32)} for length in (3, 5))
    answers = {f"{place}/y": one["x"] * 2 for place, one in enumerate(runs)}
    steps = dict.fromkeys(answers, 0.1)
    own, other = tolerances(answers, answers, steps)
    write_golden(tmp_path / "golden.npz", Golden((), runs[0], answers, answers, steps, own, other, runs))
    found = read_golden(tmp_path / "golden.npz")
    assert [one["x"].shape for one in found.runs] == [(1, 3), (1, 5)]
    np.testing.assert_array_equal(found.on["1/y"], answers["1/y"])


def test_a_port_is_read_with_its_type_and_axes() -> None:
    stored = {"name": "x", "type": "int32", "shape": [2, None], "batch_axis": 1}
    port = Port.from_dict(stored)
    assert port.as_dict() == stored and str(port) == "x int32 [2, N]"
    assert port.takes(np.zeros((2, 7), np.int32))
    assert not port.takes(np.zeros((2, 7), np.int64)) and not port.takes(np.zeros((3, 7), np.int32))
    for wrong in ({}, {**stored, "type": "words"}, {**stored, "shape": 3}):
        with pytest.raises(ConfigError, match=r"model.json=.*expected an entry with name, type, shape"):
            Port.from_dict(wrong)
