"""Tests of whole runs with a key: no plaintext on disk, even after a kill, and the usual files."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from command_line import ROOT, python
from tiny_run import sha256

from qatkit.encryption.cipher import decrypt, is_encrypted, new_key, read_key
from qatkit.encryption.memory import _file_system
from qatkit_verify.command import main as command

pytest.importorskip("cryptography", reason="the extra sign is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(_file_system(Path("/dev/shm")) != "tmpfs", reason="/dev/shm is no tmpfs"),
]

COMMON = (
    *("model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=32", "data.workers=0", "calibration.images=64"),
    *("schedule.epochs=1", "schedule.float_epochs=1", "trainer.checkpoint_every=5", "trainer.progress=false"),
    *("verify.max_drop=null", "verify.latency_runs=3", "verify.threads=1", "name=tiny"),
)  # fmt: skip
TYPED = (
    *(*COMMON, "trainer.accelerator=cpu", "calibration.cache=run.cache"),
    *("algorithm=adaround", "algorithm.adaround.steps=20"),
)
TEXTS = (".json", ".html", ".yaml", ".txt", ".lock")
# Byte strings that reveal unencrypted weights: safetensors' header, torch's names, ONNX's producer.
MARKS = (b'"data_offsets"', b"conv1.weight", b"conv2.weight", b"pytorch", b"_quant", b"fc.weight")


def train(folder: Path, *typed: str, always: tuple[str, ...] = TYPED) -> subprocess.CompletedProcess[str]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return python(str(ROOT / "train.py"), *always, *typed, cwd=folder, timeout=900)


def in_the_clear(folder: Path) -> list[str]:
    """Returns the files that contain readable weights, whole or in part."""
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and not any(text in path.name for text in TEXTS)
        and any(mark in path.read_bytes() for mark in MARKS)
    ]  # fmt: skip


def left_in_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("qatkit-in-memory-*"))


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields an in-memory folder for the temporary files (qatkit-...) of this test's runs only."""
    with tempfile.TemporaryDirectory(prefix="qatkit-test-", dir="/dev/shm") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run without a key."""
    folder = tmp_path_factory.mktemp("plain")
    done = train(folder, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert {Path(path).name for path in in_the_clear(folder)} == {
        "last.ckpt", "float.ckpt", "model.int8.onnx", "model.float.onnx", "run.cache"
    }  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the same run with a key."""
    folder = tmp_path_factory.mktemp("sealed")
    new_key(folder / "key")
    done = train(folder, "output_dir=run", "export.encrypt=key")
    assert done.returncode == 0, done.stderr
    return folder


def opened(file: Path, key: Path, target: Path) -> Path:
    decrypt(file, target, read_key(str(key)))
    return target


def test_an_encrypted_run_leaves_no_plaintext_and_equal_files(
    plain: Path, sealed: Path, tmp_path: Path
) -> None:
    assert not in_the_clear(sealed)
    for name in (
        "run/last.ckpt",
        "run/float.ckpt",
        "run/model.int8.onnx",
        "run/model.float.onnx",
        "run.cache",
    ):
        assert is_encrypted(sealed / name)
    for name in ("run/model.int8.onnx", "run/model.float.onnx"):
        assert sha256(opened(sealed / name, sealed / "key", tmp_path / "plain")) == sha256(plain / name)


def test_a_checkpoint_is_exported_with_its_key_alone(plain: Path, sealed: Path, tmp_path: Path) -> None:
    typed = (str(ROOT / "export.py"), "checkpoint=run/last.ckpt", f"output_dir={tmp_path / 'again'}")
    assert python(*typed, cwd=sealed).returncode == 0  # config.yaml names the key
    file = opened(tmp_path / "again" / "model.int8.onnx", sealed / "key", tmp_path / "plain")
    assert sha256(file) == sha256(plain / "run" / "model.int8.onnx")
    new_key(tmp_path / "other")
    for given in (f"export.encrypt={tmp_path / 'other'}", "export.encrypt=null", "export.encrypt=nowhere"):
        done = python(*typed, given, cwd=sealed)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"error: {given}: ")
    mode = (str(ROOT / "export.py"), "onnx=run/model.float.onnx", "mode=weight_only", f"output_dir={tmp_path / 'mode'}",
            "data.image_size=8", "data.workers=0", "export.encrypt=key", "verify.latency_runs=3")  # fmt: skip
    done = python(*mode, cwd=sealed)
    assert done.returncode in (0, 1), done.stderr
    assert is_encrypted(tmp_path / "mode" / "model.weight_only.onnx") and not in_the_clear(tmp_path / "mode")


def test_a_killed_encrypted_run_leaves_no_plaintext_and_resumes(plain: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    draw, kills = random.Random(0), 0
    while True:
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            *TYPED,
            "output_dir=run",
            "export.encrypt=key",
            "resume=auto",
        ]
        process = subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        try:
            _, told = process.communicate(timeout=None if kills == 5 else draw.uniform(10, 40))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
        assert not in_the_clear(tmp_path)
        end = time.monotonic() + 30
        while left_in_memory() and time.monotonic() < end:
            time.sleep(0.1)
        assert not left_in_memory()
        # A run killed in its last moments, after writing its report, has nothing left to resume.
        if process.returncode != -signal.SIGKILL or (tmp_path / "run" / "report.json").is_file():
            break
    assert process.returncode in (0, -signal.SIGKILL), told
    for name in ("model.int8.onnx", "model.float.onnx"):
        file = opened(tmp_path / "run" / name, tmp_path / "key", tmp_path / "plain.onnx")
        assert sha256(file) == sha256(plain / "run" / name)


def test_a_plain_run_or_one_of_another_key_is_not_resumed(plain: Path, sealed: Path, tmp_path: Path) -> None:
    for source, given, told in (
        (plain, "key", "null, since .*(last|float).ckpt was written without encryption"),
        (sealed, "other", "the key that .* was encrypted with; this is another key"),
        (sealed, "null", "the key that .* was encrypted with"),
    ):
        folder = tmp_path / given
        shutil.copytree(source, folder)
        shutil.copy(sealed / "key", folder / "key")
        new_key(folder / "other")
        (folder / "run" / "report.json").unlink()
        done = train(folder, "resume=run/last.ckpt", f"export.encrypt={given}")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"error: export.encrypt={given}: ")
        assert re.search(told, done.stderr), done.stderr


def test_encrypted_runs_make_plain_or_encrypted_bundles_as_asked(sealed: Path, tmp_path: Path) -> None:
    typed = (
        "export.encrypt=key",
        "export.bundle=true",
        "schedule.epochs=0",
        "calibration.cache=null",
    )
    shutil.copy(sealed / "key", tmp_path / "key")
    done = train(
        tmp_path, *typed, "output_dir=run", f"export.publish={tmp_path / 'published'}", "export.version=1"
    )
    assert done.returncode == 0, done.stderr
    files = below(tmp_path / "run" / "bundle")
    assert {"model.onnx", "float.onnx", "manifest.json"} <= files.keys()
    onnx.checker.check_model(str(files["model.onnx"]))
    there = tmp_path / "published" / "tiny" / "1"
    published = {name: sha256(path) for name, path in below(there).items()}
    assert published == {name: sha256(path) for name, path in files.items()}
    done = train(tmp_path, *typed, "output_dir=other", "export.encrypt_bundle=true")
    assert done.returncode == 0, done.stderr
    assert not in_the_clear(tmp_path / "other")
    archive = opened(tmp_path / "other" / "bundle.zip.encrypted", tmp_path / "key", tmp_path / "bundle.zip")
    assert set(zipfile.ZipFile(archive).namelist()) == files.keys()


def test_a_bundle_published_encrypted_is_never_plaintext(sealed: Path, tmp_path: Path) -> None:
    shutil.copy(sealed / "key", tmp_path / "key")
    typed = (
        *("export.encrypt=key", "export.bundle=true", "export.encrypt_bundle=true", "schedule.epochs=0"),
        *("calibration.cache=null", f"export.publish={tmp_path / 'published'}", "export.version=1"),
    )
    done = train(tmp_path, *typed, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert not in_the_clear(tmp_path)
    there = below(tmp_path / "published" / "tiny" / "1")
    assert set(there) == {"bundle.zip.encrypted", "manifest.json"}
    assert sha256(there["bundle.zip.encrypted"]) == sha256(tmp_path / "run" / "bundle.zip.encrypted")
    archive = opened(there["bundle.zip.encrypted"], tmp_path / "key", tmp_path / "bundle.zip")
    assert zipfile.ZipFile(archive).read("manifest.json") == there["manifest.json"].read_bytes()
    assert command([str(archive), "--runs", "3", "--threads", "1", "--min-speedup", "0"]) == 0

    again = train(tmp_path, *typed, "output_dir=again", "seed=1")  # refused before any long work
    assert (
        again.returncode == 2
        and "export.version=1: expected a version that does not exist in" in again.stderr
    )
    assert sha256(there["bundle.zip.encrypted"]) == sha256(tmp_path / "run" / "bundle.zip.encrypted")
    later = ("-m", "qatkit.handover.publish", "run/bundle.zip.encrypted", "later", "--name", "tiny", "--key")
    assert python(*later, "key", cwd=tmp_path).returncode == 0
    (later_one,) = (tmp_path / "later" / "tiny").iterdir()
    assert set(below(later_one)) == set(there)


def test_export_of_an_encrypted_run_makes_an_encrypted_bundle(sealed: Path, tmp_path: Path) -> None:
    shutil.copytree(sealed, tmp_path / "sealed")
    typed = (str(ROOT / "export.py"), "checkpoint=run/last.ckpt", "export.bundle=true")
    done = python(*typed, f"output_dir={tmp_path / 'out'}", cwd=tmp_path / "sealed")
    assert done.returncode == 0, done.stderr
    assert not in_the_clear(tmp_path)
    archive = opened(tmp_path / "out" / "bundle.zip.encrypted", sealed / "key", tmp_path / "bundle.zip")
    names = set(zipfile.ZipFile(archive).namelist())
    done = python(
        *typed, f"output_dir={tmp_path / 'clear'}", "export.encrypt_bundle=false", cwd=tmp_path / "sealed"
    )
    assert done.returncode == 0, done.stderr
    assert below(tmp_path / "clear" / "bundle").keys() == names


def test_an_encrypted_rescue_leaves_no_plaintext_and_equal_rungs(own_memory: Path, tmp_path: Path) -> None:
    typed = (
        "rescue=ladder",
        "target.max_drop=100",
        "output_dir=run",
        "trainer.accelerator=cpu",
        "schedule.epochs=0",
    )
    new_key(tmp_path / "key")
    ladders = {}
    for name, more in (("plain", ()), ("sealed", (f"export.encrypt={tmp_path / 'key'}",))):
        (tmp_path / name).mkdir()
        done = train(tmp_path / name, *typed, *more, always=COMMON)
        assert done.returncode == 0, done.stderr
        rungs = json.loads((tmp_path / name / "run" / "ladder.json").read_text())["rungs"]
        ladders[name] = [{**row, "seconds": None, "latency_ms": None, "ratio": None} for row in rungs]
    assert ladders["sealed"] == ladders["plain"] and len(ladders["plain"]) == 6
    kept = {path.relative_to(tmp_path / "plain") for path in map(Path, in_the_clear(tmp_path / "plain"))}
    assert len(kept) > 10
    assert all(is_encrypted(tmp_path / "sealed" / path) for path in kept)
    assert not in_the_clear(tmp_path / "sealed") and not list(own_memory.glob("qatkit-*"))
    file = opened(tmp_path / "sealed" / "run" / "model.int8.onnx", tmp_path / "key", tmp_path / "file")
    assert sha256(file) == sha256(tmp_path / "plain" / "run" / "model.int8.onnx")


def test_two_encrypted_processes_train_alike_and_survive_a_kill(own_memory: Path, tmp_path: Path) -> None:
    typed = (
        "trainer=ddp",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "schedule.epochs=4",
        "output_dir=run",
    )
    new_key(tmp_path / "key")
    for name in ("plain", "sealed", "killed"):
        (tmp_path / name).mkdir()
    assert train(tmp_path / "plain", *typed, always=COMMON).returncode == 0
    key = f"export.encrypt={tmp_path / 'key'}"
    done = train(tmp_path / "sealed", *typed, key, always=COMMON)
    assert done.returncode == 0, done.stderr
    assert not in_the_clear(tmp_path / "sealed") and not list(own_memory.glob("qatkit-*"))

    command = [sys.executable, str(ROOT / "train.py"), *COMMON, *typed, key]
    process = subprocess.Popen(command, cwd=tmp_path / "killed", stderr=subprocess.DEVNULL)
    checkpoint, written, end = tmp_path / "killed" / "run" / "last.ckpt", set[int](), time.monotonic() + 300
    while len(written) < 2 and time.monotonic() < end:  # two checkpoints: both processes are training
        written |= {checkpoint.stat().st_mtime_ns} if checkpoint.is_file() else set()
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    end = time.monotonic() + 60
    while list(own_memory.glob("qatkit-*")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not list(own_memory.glob("qatkit-*")) and not in_the_clear(tmp_path / "killed")
    done = train(tmp_path / "killed", *typed, key, "resume=auto", always=COMMON)
    assert done.returncode == 0, done.stderr
    for name in ("sealed", "killed"):
        file = opened(tmp_path / name / "run" / "model.int8.onnx", tmp_path / "key", tmp_path / name / "file")
        assert sha256(file) == sha256(tmp_path / "plain" / "run" / "model.int8.onnx")


def below(folder: Path) -> dict[str, Path]:
    """Returns the files in a folder by relative path."""
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
