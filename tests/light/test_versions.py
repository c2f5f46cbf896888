"""Tests of qatkit-verify with the oldest supported versions of its dependencies, and with older ones.

uv creates each environment with the light package only; if uv cannot fetch the packages, the test is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import ROOT
from PIL import Image
from tiny_run import calibrate_only, digits_test

from qatkit.config.schema import OverrideConfig
from qatkit.jobs.pipeline import train

LIGHT = ROOT / "packages" / "verify"
PROJECT = tomllib.loads((LIGHT / "pyproject.toml").read_text())["project"]
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
QUICK = ("--runs", "3", "--threads", "1", "--min-speedup", "0")
Verify = Callable[..., subprocess.CompletedProcess[str]]


def oldest() -> list[str]:
    """Returns the lower bounds of the package and its extras, except OpenVINO's, as exact versions."""
    extras = PROJECT["optional-dependencies"]
    bounds = [*PROJECT["dependencies"], *extras["pictures"], *extras["sign"]]
    assert all(">=" in bound for bound in bounds)
    return [re.sub(r">=", "==", bound) for bound in bounds]


def environment(folder: Path, *packages: str, module: str = "command") -> Verify:
    """Returns `verify(BUNDLE, ...)`, which runs in a new environment with these packages."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("no uv on the PATH")
    python = PROJECT["requires-python"].removeprefix(">=")
    for command in (["venv", "--quiet", "--python", python, str(folder)],
                    ["pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *packages]):  # fmt: skip
        done = subprocess.run(  # not here, where the project's pins apply
            [uv, *command], cwd=folder.parent, capture_output=True, text=True, check=False, timeout=900
        )
        if done.returncode:
            pytest.skip(f"uv {command[0]}: {done.stderr.strip().splitlines()[-1:]}")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def verify(*typed: str | Path) -> subprocess.CompletedProcess[str]:
        command = [folder / "bin" / "python", "-m", f"qatkit_verify.{module}", *typed]
        return subprocess.run(
            command,
            env=env | {"PYTHONPATH": str(LIGHT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return verify


def made(folder: Path, opset: int, *, int4: bool = False, **asked: Any) -> Path:
    """Returns the bundle of a run on digits."""
    config = calibrate_only(folder)
    config.export = replace(config.export, bundle=True, opset=opset, pack_int4=int4, **asked)
    if int4:
        config.backend.overrides = {"conv2": OverrideConfig(weight_dtype="int4")}
        config.verify.audit = False  # packed weights have no int8 kernel
    assert train(config) == 0
    return folder / ("bundle.zip" if config.export.bundle_as == "zip" else "bundle")


def pictures(folder: Path) -> Path:
    """Writes the test digits as picture files, and returns their folder."""
    images, labels = digits_test()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint((image[0] * 0.5 + 0.5) * 255).astype(np.uint8)).save(
            folder / str(label) / f"{number}.png"
        )
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a bundle whose file has int4 weights, which need opset 21."""
    return made(tmp_path_factory.mktemp("packed") / "run", 21, int4=True)


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a bundle of the highest opset."""
    return made(tmp_path_factory.mktemp("newest") / "run", 23)


def test_the_declared_lower_bounds_are_enough(tmp_path: Path, packed: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    bundles = [
        packed,
        made(tmp_path / "a", 13, sign=str(tmp_path / "key.pem")),
        made(tmp_path / "b", 17, io="uint8", bundle_as="zip"),
        made(tmp_path / "c", 22),
    ]
    verify = environment(tmp_path / "venv", *oldest())
    for bundle in bundles:
        told = tmp_path / "told.json"
        done = verify(bundle, "--pictures", pictures(tmp_path / "pictures"), "--json", told, *QUICK)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {one["check"]: one for one in json.loads(told.read_text())["checks"]}
        assert found["pictures"]["verdict"] == found["preprocessing"]["verdict"] == "ok"
        version = next(one.removeprefix("onnxruntime==") for one in oldest() if "onnxruntime" in one)
        assert found["loads"]["figures"]["onnxruntime"].startswith(version)
        assert not done.stderr


@pytest.mark.parametrize(
    ("packages", "kind", "needed"),
    [(("onnxruntime==1.17.3", "numpy==1.26.4"), "packed", "1.23"), (("onnxruntime==1.23.2",), "newest", "1.24")],
    ids=["int4", "opset 23"],
)  # fmt: skip
def test_too_old_an_onnx_runtime_is_one_line_with_the_needed_one(
    packages: tuple[str, ...], kind: str, needed: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bundle = request.getfixturevalue(kind)
    done = environment(tmp_path / "old", *packages)(bundle, *QUICK)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    version = packages[0].removeprefix("onnxruntime==")
    wanted = (
        f"error: onnxruntime={version}: expected {needed} or newer; this version cannot load opset 2[13], "
        "IR version 10"
    )
    assert re.fullmatch(wanted, done.stderr.rstrip()), done.stderr
    done = environment(tmp_path / "needed", f"onnxruntime=={needed}.*")(bundle, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("packages", "told"),
    [(("numpy",), r"onnxruntime=missing: .* \(No module named 'onnxruntime'\); run pip install --upgrade .*"),
     (("onnxruntime==1.17.3", "numpy==2.0.0"),
      r"onnxruntime=1.17.3: .* \(A module that was compiled using NumPy 1.x .*\); run pip install --upgrade .*")],
    ids=["missing", "of another NumPy"],
)  # fmt: skip
@pytest.mark.parametrize("module", ["command", "placement.measure"])
def test_an_onnx_runtime_that_can_not_be_imported_is_one_line(
    packages: tuple[str, ...], told: str, module: str, tmp_path: Path
) -> None:
    verify = environment(tmp_path / "venv", *packages, module=module)
    done = verify(tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert re.fullmatch(f"error: {told}", done.stderr.rstrip()), done.stderr
