"""Tests of the check of a bundle's streaming file, which compares its outputs with the whole file's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import seal
from spotters import STREAM, make, spotter

from qatkit_verify.chunks import kept_db
from qatkit_verify.command import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("chunks") / "bundle")
    seal(folder)
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def checked(folder: Path) -> tuple[int, dict[str, Any]]:
    """Returns the exit status and the result of the check of chunks, {} if the bundle has no such check."""
    answer = folder.parent / "answer.json"
    status = main([str(folder), "--runs", "3", "--threads", "1", "--min-speedup", "0", "--json", str(answer)])
    rows = {one["check"]: one for one in json.loads(answer.read_text())["checks"]}
    return status, rows.get("answers, in chunks", {})


def test_chunks_give_the_whole_files_answers(bundle: Path) -> None:
    status, found = checked(bundle)
    assert status == 0 and found["verdict"] == "ok"
    assert found["seen"].startswith("model.stream.onnx against model.onnx on 3 samples: ")
    assert found["figures"]["sqnr_db"] > 100


def test_a_bundle_without_such_a_file_has_no_such_line(bundle: Path) -> None:
    (bundle / STREAM).unlink()
    seal(bundle)
    assert checked(bundle) == (0, {})


def test_another_models_chunks_fall_short_by_sample(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spotter(bundle / STREAM, stream=True, gain=1.1)
    seal(bundle)
    status, found = checked(bundle)
    assert status == 1 and found["verdict"] == "falls short"
    # Outputs scaled by 1.1 have an SQNR of 20 dB, in every sample.
    assert found["figures"]["sqnr_db"] == pytest.approx(20, abs=1e-3)
    assert (
        "model.stream.onnx against model.onnx: the SQNR of 'y' after the last chunk is 20.0 dB"
        in found["seen"]
    )
    assert f"the worst golden sample is number {found['figures']['sample']} " in found["seen"]
    assert "answers, in chunks falls short; to fix it: export the bundle again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "its metadata entry 'qatkit.stream', which says how"),
        ("[1]", "is damaged (axis or states is missing)"),
        ('{"axis": 5, "states": {"state_0": "state_0_next"}}', "does not have one input with an axis 5"),
        (
            '{"axis": 1, "states": {"state_1": "state_0_next"}}',
            "it names inputs or outputs that the file does not have",
        ),
        ('{"axis": 1, "states": {"state_0": 3}}', "the axis is not a number, or a state is not a name"),
    ],
)
def test_a_file_that_does_not_say_its_states_falls_short(told: str | None, why: str, bundle: Path) -> None:
    spotter(bundle / STREAM, stream=True, told=told)
    seal(bundle)
    status, found = checked(bundle)
    assert (
        status == 1
        and found["seen"].startswith("model.stream.onnx cannot run in chunks")
        and why in found["seen"]
    )


def test_a_damaged_or_missing_file_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (bundle / STREAM).read_bytes()
    (bundle / STREAM).write_bytes(kept[:-40])
    assert main([str(bundle)]) == 2
    assert "model.stream.onnx has other contents" in capsys.readouterr().err
    seal(bundle)  # as a tool that packs the bundle again would
    assert checked(bundle)[1]["verdict"] == "falls short"
    (bundle / STREAM).unlink()
    assert main([str(bundle)]) == 2
    assert "model.stream.onnx is missing" in capsys.readouterr().err


def test_answers_that_are_no_numbers_are_far_away() -> None:
    whole = np.ones((2, 3))
    assert kept_db(whole, np.full_like(whole, np.nan)) == -200
    assert kept_db(0 * whole, whole) == -200 and kept_db(0 * whole, 0 * whole) == 200
