"""Tests of checkpoints with a checksum: any flipped bit is found, and other readers are unaffected."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from qatkit.encryption.sealed import damage, seal


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    torch.manual_seed(0)
    with path.open("wb") as stream:
        torch.save({"state_dict": {"weight": torch.randn(40, 50), "bias": torch.randn(3)}, "step": 7}, stream)
    seal(path)
    return path


def test_torch_and_zipfile_read_a_sealed_file(sealed: Path) -> None:
    assert damage(sealed) == ""
    stored = torch.load(sealed, weights_only=True)
    torch.manual_seed(0)
    assert torch.equal(stored["state_dict"]["weight"], torch.randn(40, 50)) and stored["step"] == 7
    assert zipfile.ZipFile(sealed).testzip() is None


def test_a_flipped_bit_is_found_wherever_it_is(sealed: Path) -> None:
    whole = sealed.read_bytes()
    places = {*np.random.default_rng(0).integers(0, 8 * len(whole), 300).tolist()}
    places |= {
        8 * (len(whole) - back) + back % 8 for back in range(1, 120)
    }  # central directory, its end record, comment
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        sealed.write_bytes(flipped)
        assert damage(sealed), f"bit {place} of {8 * len(whole)}"


@pytest.mark.parametrize("keep", [0, 1, 100, -1, -64, -73, -80])
def test_a_part_of_a_file_is_found(sealed: Path, keep: int) -> None:
    sealed.write_bytes(sealed.read_bytes()[:keep])
    assert damage(sealed)


def test_equal_checkpoints_are_equal_files(sealed: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.ckpt"
    with again.open("wb") as stream:
        torch.save(torch.load(sealed, weights_only=True), stream)
    seal(again)
    first = sealed.read_bytes()
    assert len(first) == len(again.read_bytes()) and damage(again) == ""


def test_a_file_without_a_digest_is_judged_by_archive_checksums(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    with path.open("wb") as stream:
        torch.save({"weight": torch.ones(1000)}, stream)
    assert damage(path) == ""
    content = bytearray(path.read_bytes())
    place = content.index(torch.ones(2).numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert "fails its checksum" in damage(path)


def test_what_is_no_archive_is_not_sealed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"text" * 20)
    with pytest.raises(ValueError, match="not a zip archive, or has a comment already"):
        seal(path)
