"""Tests of the search for onnxruntime-web, and of the error where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from qatkit.handover.demo.runtime import find_runtime
from qatkit_verify.errors import ConfigError

FILES = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def _package(root: Path, *names: str) -> Path:
    dist = root / "node_modules" / "onnxruntime-web" / "dist"
    dist.mkdir(parents=True)
    (dist.parent / "package.json").write_text('{"version": "1.2.3"}')
    for name in names:
        (dist / name).write_text(name)
    return dist


def test_the_nearest_node_modules_above_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = _package(tmp_path, *FILES)
    (tmp_path / "below" / "it").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "below" / "it")
    found = find_runtime(None)
    assert [found.script, found.glue, found.wasm] == [dist / name for name in FILES]
    assert found.version == "1.2.3"


@pytest.mark.parametrize("depth", ["dist", "package"])
def test_a_typed_path_is_the_dist_folder_or_its_package(tmp_path: Path, depth: str) -> None:
    dist = _package(tmp_path, *FILES)
    assert find_runtime(str(dist if depth == "dist" else dist.parent)).wasm == dist / FILES[2]


def test_nothing_there_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"export\.demo_runtime.*npm install --ignore-scripts onnxruntime-web"
    ):
        find_runtime(None)


def test_a_folder_that_is_not_whole_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    dist = _package(tmp_path, FILES[0])
    with pytest.raises(ConfigError, match=f"dist lacks {FILES[1]}, {FILES[2]}") as refused:
        find_runtime(str(dist))
    assert str(dist) in str(refused.value)
