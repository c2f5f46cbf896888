"""Tests of a run's bundle: verified without torch and qatkit, never made without a report, reproducible."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from command_line import ROOT, Launch
from PIL import Image
from tiny_run import calibrate_only, digits_test, logits, report_of, sha256

from qatkit.config.schema import Config, ExportConfig
from qatkit.handover.write import oldest_runtime
from qatkit.jobs.export_checkpoint import export
from qatkit.jobs.pipeline import train
from qatkit_verify.bundle.archive import unpacked_bundle
from qatkit_verify.bundle.golden import read_golden
from qatkit_verify.bundle.manifest import check_files, read_manifest
from qatkit_verify.command import main
from qatkit_verify.errors import ConfigError
from qatkit_verify.onnx_file import INT8, Graph, Node, OnnxFile, Tensor


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Returns the configuration of a run without training, whose bundle is written."""
    config = calibrate_only(tmp_path_factory.mktemp("handed") / "run")
    config.export = ExportConfig(bundle=True, golden_images=5)
    assert train(config) == 0
    return config


def bundle_of(config: Config) -> Path:
    return Path(str(config.output_dir)) / "bundle"


def again(config: Config, folder: Path, **asked: object) -> Config:
    """Returns the configuration that exports the run's checkpoint to `folder`, with settings of `export`."""
    export = replace(config.export, **asked)  # type: ignore[arg-type]
    checkpoint = f"{config.output_dir}/last.ckpt"
    return replace(config, checkpoint=checkpoint, output_dir=str(folder), export=export)


def test_the_files_are_those_of_the_run(run: Config) -> None:
    bundle, folder = bundle_of(run), Path(str(run.output_dir))
    pairs = {"model.onnx": "model.int8.onnx", "float.onnx": "model.float.onnx", "report.json": "report.json",
             "config.yaml": "config.yaml", "ranges.json": "ranges.json"}  # fmt: skip

    assert {name: sha256(bundle / name) for name in pairs} == {
        name: sha256(folder / mine) for name, mine in pairs.items()
    }
    listed = {
        one["name"]: one["sha256"] for one in json.loads((bundle / "manifest.json").read_text())["files"]
    }
    there = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert there == {*listed, "manifest.json"}
    assert all(sha256(bundle / name) == digest for name, digest in listed.items())
    assert (bundle / "labels.txt").read_text().splitlines() == [str(digit) for digit in range(10)]


def test_the_manifest_and_the_card_state_the_session_options(run: Config) -> None:
    bundle, options = bundle_of(run), {"session.qdq_matmulnbits_accuracy_level": "0"}
    manifest = read_manifest(bundle)
    assert manifest.session_options == report_of(Path(str(run.output_dir)))["session_options"] == options
    assert manifest.onnxruntime == onnxruntime.__version__

    card = (bundle / "card.md").read_text()
    assert 'options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")' in card
    assert 'options.AddConfigEntry("session.qdq_matmulnbits_accuracy_level", "0");' in card
    assert 'create("model.onnx", { extra: {"session.qdq_matmulnbits_accuracy_level": "0"} });' in card


@pytest.mark.parametrize(
    ("operator", "opset", "version"),
    [("QLinearConv", 22, "1.23"), ("QLinearConv", 23, "1.24"), ("ConvInteger", 13, "1.24")],
)
def test_the_oldest_runtime_is_the_first_with_the_files_kernels(
    operator: str, opset: int, version: str
) -> None:
    node = Node(operator, "", "", ("x",), ("y",), {})
    assert oldest_runtime(OnnxFile(8, {"": opset}, Graph((node,), {}))) == version


@pytest.mark.parametrize(("zeros", "version"), [((0, 0), "1.23"), ((5, 5), "1.23"), ((5, -5), "1.27")])
def test_zero_points_of_channels_need_a_newer_runtime(zeros: tuple[int, int], version: str) -> None:
    pair = Node("DequantizeLinear", "", "", ("w", "s", "z"), ("wd",), {})
    conv = Node("Conv", "", "", ("x", "wd"), ("y",), {})
    raw = memoryview(np.array(zeros, np.int8).tobytes())
    for zero in (Tensor(INT8, (2,), raw, (), {}), Tensor(INT8, (2,), memoryview(b""), zeros, {})):
        assert oldest_runtime(OnnxFile(8, {"": 13}, Graph((pair, conv), {"z": zero}))) == version


def test_a_run_killed_before_its_bundle_makes_it_when_it_goes_on(run: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(str(run.output_dir), folder, ignore=shutil.ignore_patterns("bundle"))
    config = replace(run, output_dir=str(folder), resume="auto")
    assert train(config) == 0
    there = {path.relative_to(bundle_of(run)) for path in bundle_of(run).rglob("*")}
    assert {path.relative_to(bundle_of(config)) for path in bundle_of(config).rglob("*")} == there
    assert sha256(bundle_of(config) / "model.onnx") == sha256(bundle_of(run) / "model.onnx")


def test_golden_answers_are_those_of_test_images(run: Config) -> None:
    golden = read_golden(bundle_of(run) / "golden.npz")
    images, _ = digits_test()
    (given,), (answers,) = golden.inputs.values(), golden.on.values()

    places = [int(np.abs(images - one).reshape(len(images), -1).max(1).argmin()) for one in given]
    assert len(set(places)) == len(given) == 5
    np.testing.assert_allclose(images[places], given, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(logits(bundle_of(run) / "model.onnx", given), answers)
    parity = report_of(Path(str(run.output_dir)))["parity"]
    assert next(iter(golden.steps.values())) == parity["step"]


def test_it_passes_where_there_is_no_torch(run: Config, tmp_path: Path) -> None:
    blocked = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        allowed = name.partition('.')[0] not in\\\n"
        "            ('torch', 'lightning', 'rich', 'onnx', 'onnx_ir', 'hydra', 'PIL', 'qatkit', 'scipy', 'yaml')\n"
        "        if not allowed: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from qatkit_verify.command import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    typed = [
        str(bundle_of(run)),
        "--runs",
        "3",
        "--threads",
        "1",
        "--min-speedup",
        "0",
        "--json",
        "told.json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", blocked, *typed], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {one["check"]: one for one in json.loads((tmp_path / "told.json").read_text())["checks"]}
    assert verdicts["preprocessing"]["verdict"] == "ok"
    assert verdicts["answers, as written"]["figures"]["same"] == 5
    audit = report_of(Path(str(run.output_dir)))["audit"]
    assert verdicts["int8 kernels"]["figures"]["int8_share"] == pytest.approx(audit["int8_share"])


def test_pictures_give_the_accuracy_of_the_report(run: Config, tmp_path: Path) -> None:
    images, labels = digits_test()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "pictures" / str(label)).mkdir(parents=True, exist_ok=True)
        pixels = np.rint((image[0] * 0.5 + 0.5) * 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / str(label) / f"{number}.png")
    typed = [str(bundle_of(run)), "--runs", "3", "--threads", "1", "--min-speedup", "0"]
    asked = [*typed, "--pictures", str(tmp_path / "pictures"), "--json", str(tmp_path / "told.json")]

    assert main(asked) == 0
    (told,) = [
        one
        for one in json.loads((tmp_path / "told.json").read_text())["checks"]
        if one["check"] == "pictures"
    ]
    accuracy = report_of(Path(str(run.output_dir)))["accuracy"]["int8"]
    assert told["figures"] == {"top1": pytest.approx(accuracy["top1"]), "images": 360}

    shutil.move(tmp_path / "pictures" / "3", tmp_path / "pictures" / "three")
    assert main(asked) == 2  # not a class of labels.txt
    shutil.move(tmp_path / "pictures" / "three", tmp_path / "pictures" / "3")
    broken = next((tmp_path / "pictures" / "3").iterdir())
    broken.write_bytes(broken.read_bytes()[:40])
    assert main(asked) == 2


def test_the_same_checkpoint_gives_the_same_zip(run: Config, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert export(again(run, tmp_path / name, bundle_as="zip")) == 0

    assert sha256(tmp_path / "a" / "bundle.zip") == sha256(tmp_path / "b" / "bundle.zip")
    assert not list(tmp_path.rglob(".*"))


def test_a_checkpoints_bundle_gets_a_demo_page(
    run: Config, tmp_path: Path, launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime, out = tmp_path / "dist", tmp_path / "out"
    runtime.mkdir()
    for name in ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        (runtime / name).write_text(name)
    alone = tmp_path / "alone"
    shutil.copytree(str(run.output_dir), alone, ignore=shutil.ignore_patterns("bundle", "model.float.onnx"))
    for checkpoint, told in ((Path(str(run.output_dir)), False), (alone, True)):
        typed = (f"checkpoint={checkpoint}/last.ckpt", f"output_dir={out}", "export.demo=true",
                 f"export.demo_runtime={runtime}")  # fmt: skip
        assert launch(export, *typed, from_checkpoint=True) == 2
        assert "export.demo=true: expected false without export.bundle=true" in capfd.readouterr().err
        assert not out.exists()
        assert launch(export, *typed, "export.bundle=true", from_checkpoint=True) == 0
        assert "demoParts" in (out / "bundle" / "demo" / "int8.js").read_text()
        assert (out / "bundle" / "demo.html").is_file()
        assert (out / "bundle" / "demo" / "float.js").is_file() != told
        note = "has no model.float.onnx, so the demo page has no comparison with float"
        assert (note in capfd.readouterr().err) == told
        shutil.rmtree(out)


def test_without_evidence_there_is_none(run: Config, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("last.ckpt", "config.yaml", "model.float.onnx"):
        shutil.copy(Path(str(run.output_dir)) / name, alone / name)
    config = replace(again(run, tmp_path / "out"), checkpoint=str(alone / "last.ckpt"))
    with pytest.raises(
        ConfigError,
        match=(
            r"expected false, since the run in .* has not finished "
            r"\(there is no report\.json\)"
        ),
    ):
        export(config)

    with pytest.raises(ConfigError, match=r"is not the file that .* describes; export with the settings"):
        export(again(run, tmp_path / "other", opset=17))

    shutil.copy(Path(str(run.output_dir)) / "report.json", alone / "report.json")
    content = bytearray((alone / "model.float.onnx").read_bytes())
    content[100] ^= 1
    (alone / "model.float.onnx").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.float\.onnx has changed since the run wrote it"):
        export(config)
    assert not list(tmp_path.rglob("bundle*"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["folder", "zip"])
def test_a_kill_leaves_a_whole_bundle_or_none(run: Config, tmp_path: Path, form: str) -> None:
    draw, out = random.Random(form), tmp_path / "out"
    target = out / ("bundle" if form == "folder" else "bundle.zip")
    command = [
        sys.executable, str(ROOT / "export.py"), f"checkpoint={run.output_dir}/last.ckpt", "export.bundle=true",
        f"export.bundle_as={form}", "export.golden_images=200", f"output_dir={out}",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = time.monotonic()
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False).returncode == 0
    whole, first = time.monotonic() - start, digests(target)
    for _ in range(8):
        shutil.rmtree(out, ignore_errors=True)
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(draw.uniform(0.5, 1.0) * whole)
        process.kill()
        process.wait()
        assert not target.exists() or digests(target) == first
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False).returncode == 0
    assert digests(target) == first
    assert not [path for path in out.iterdir() if path.name.endswith(".part")]


def digests(target: Path) -> dict[str, str]:
    """Returns the digest of every file of a bundle, after checking that the bundle is complete."""
    with unpacked_bundle(target) as folder:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        return {one.name: one.sha256 for one in manifest.files}
