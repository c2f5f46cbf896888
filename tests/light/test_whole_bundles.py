"""Tests that a bundle with changed, missing or added files, a wrong key or a bad zip is refused."""

from __future__ import annotations

import json
import random
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
from bundles import SCALE, make, seal

from qatkit_verify.bundle.archive import unpacked_bundle, write_zip
from qatkit_verify.bundle.golden import read_golden, write_golden
from qatkit_verify.bundle.manifest import GOLDEN_FILE, INT8_FILE, MANIFEST, SIGNATURE, read_manifest
from qatkit_verify.command import main


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle")


def status(path: Path, *typed: str) -> int:
    return main([str(path), "--runs", "3", "--threads", "1", "--min-speedup", "0", *typed])


def test_a_whole_bundle_passes_as_a_folder_and_as_a_zip(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_zip(bundle, tmp_path / "bundle.zip")
    answer = tmp_path / "answer.json"

    assert status(bundle) == 0
    assert status(tmp_path / "bundle.zip", "--json", str(answer)) == 0
    out = capsys.readouterr().out
    assert "1 of 1 convolutions and products run in int8" in out
    told = json.loads(answer.read_text())
    unjudged = sum(one["verdict"] == "not judged" for one in told["checks"])  # at least the preprocessing
    assert f"{10 - unjudged} of 10 checks passed, {unjudged} not judged" in out
    assert told["passed"] and {one["verdict"] for one in told["checks"]} <= {"ok", "not judged"}


def test_every_changed_byte_is_refused_with_the_files_name(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, draw = sorted(path for path in bundle.iterdir()), random.Random(0)
    for count in range(120):
        path = files[count % len(files)]
        content = path.read_bytes()
        place = draw.randrange(len(content))
        path.write_bytes(
            content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :]
        )
        assert status(bundle) == 2, (path.name, place)
        assert path.name in capsys.readouterr().err
        path.write_bytes(content)
    assert status(bundle) == 0


def test_a_file_that_is_missing_added_or_a_link_is_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sorted(bundle.iterdir()):
        kept = path.read_bytes()
        path.unlink()
        assert status(bundle) == 2
        assert path.name in capsys.readouterr().err
        path.symlink_to("/etc/hostname")
        assert status(bundle) == 2
        path.unlink()
        path.write_bytes(kept)
    capsys.readouterr()
    for name in ("extra.txt", ".hidden", "folder/deep.bin", "model.onnx.data"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_bytes(b"x")
        assert status(bundle) == 2
        assert f"{name} was added" in capsys.readouterr().err
        (bundle / name).unlink()


def test_another_answer_falls_short_and_says_by_how_much(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = read_golden(bundle / GOLDEN_FILE)
    golden.on["y"][2, 1] += 5 * SCALE
    write_golden(bundle / GOLDEN_FILE, golden)
    seal(bundle)

    assert status(bundle) == 1
    out = capsys.readouterr().out
    assert "difference at most 5 steps (tolerance 1)" in out and "falls short; to fix it: " in out


def test_golden_vectors_of_another_shape_are_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = read_golden(bundle / GOLDEN_FILE)
    golden.on["y"] = np.zeros((4, 5), np.float32)  # type: ignore[index]
    write_golden(bundle / GOLDEN_FILE, golden)
    seal(bundle)

    assert status(bundle) == 2
    assert "[4, 5]; found [4, 3]" in capsys.readouterr().err


def test_the_same_files_give_the_same_zip(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "other")
    for folder, name in ((bundle, "a.zip"), (tmp_path / "other", "b.zip")):
        write_zip(folder, tmp_path / name)

    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../outside", "not a valid file name"),
        ("/etc/outside", "not a valid file name"),
        ("a\\b", "not a valid file name"),
        ("a/../../outside", "not a valid file name"),
    ],
)
def test_a_zip_that_leads_out_of_its_folder_is_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    path = tmp_path / "evil.zip"
    write_zip(bundle, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")

    assert status(path) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "outside").exists()


def test_links_bombs_and_twins_in_a_zip_are_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    twin = zipfile.ZipInfo("MODEL.ONNX")
    bomb = zipfile.ZipInfo("bomb")
    bomb.compress_type = zipfile.ZIP_DEFLATED
    for told, content, reason in ((link, b"/etc/passwd", "is a link"), (twin, b"x", "each file once"),
                                  (bomb, bytes(10**7), "files of plausible sizes")):  # fmt: skip
        path = tmp_path / "evil.zip"
        write_zip(bundle, path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(told, content)
        assert status(path) == 2
        assert reason in capsys.readouterr().err


def test_a_zip_that_is_cut_off_or_no_zip_is_refused(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.zip"
    write_zip(bundle, path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        assert status(path) == 2


def test_a_zip_with_a_flipped_packed_byte_is_refused_in_one_line(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(bundle.iterdir()):
            archive.write(file, file.name)
    whole, draw = path.read_bytes(), random.Random(3)
    for _ in range(60):
        place = draw.randrange(len(whole) // 2)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        if status(path):
            assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_manifest_that_only_reads_the_same_is_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (bundle / MANIFEST).read_bytes()
    for changed in (
        b"\xef\xbb\xbf" + content,
        content.replace(b"\n", b"\r\n"),
        content.replace(b"\n", b"\r"),
    ):
        (bundle / MANIFEST).write_bytes(changed)
        assert status(bundle) == 2
        assert "manifest.json" in capsys.readouterr().err


def test_a_report_that_is_none_is_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "report.json").write_text("{")
    seal(bundle)
    assert status(bundle) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_file_of_a_fixed_batch_is_judged(
    tmp_path: Path, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(make(tmp_path / "fixed", batch=batch)) == 0
    assert "same top-1 class for 4 of 4, difference at most 0 steps" in capsys.readouterr().out


def test_newer_formats_and_manifests_without_a_model_are_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (bundle / MANIFEST).read_text()
    (bundle / MANIFEST).write_text(text.replace('"format": 1', '"format": 3'))
    assert status(bundle) == 2
    assert "a newer qatkit-verify" in capsys.readouterr().err

    (bundle / INT8_FILE).unlink()
    seal(bundle)
    assert status(bundle) == 2
    assert "model.onnx is not listed" in capsys.readouterr().err


def test_what_is_no_bundle_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing", tmp_path / "one.onnx"):
        assert status(path) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


class TestSigned:
    """Tests of signed bundles, which need the package `cryptography`."""

    @pytest.fixture
    def keys(self, tmp_path: Path) -> Path:
        """Returns a folder with the private keys a.pem and b.pem, and their public keys."""
        serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        for name in ("a", "b"):
            key = Ed25519PrivateKey.generate()
            private = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            public = key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            (tmp_path / f"{name}.pem").write_bytes(private)
            (tmp_path / f"{name}.public.pem").write_bytes(public)
        return tmp_path

    @pytest.fixture
    def signed(self, keys: Path) -> Path:
        from qatkit_verify.bundle.signature import private_key, public_of, sign

        key = private_key(keys / "a.pem")
        folder = make(keys / "signed", signer=public_of(key))
        sign(folder, key)
        return folder

    def test_the_right_key_passes_and_a_wrong_one_is_refused(
        self, signed: Path, keys: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert status(signed, "--key", str(keys / "a.public.pem")) == 0
        assert status(signed) == 0  # with the key that the manifest names
        assert status(signed, "--key", str(keys / "b.public.pem")) == 2
        assert "the public key of this bundle's signer" in capsys.readouterr().err

    def test_every_changed_byte_of_the_signature_is_refused(self, signed: Path) -> None:
        content = (signed / SIGNATURE).read_bytes()
        for place in range(len(content)):
            (signed / SIGNATURE).write_bytes(
                content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            )
            assert status(signed) == 2, place

    def test_a_bundle_that_was_changed_and_sealed_anew_is_refused(self, signed: Path, keys: Path) -> None:
        signer = read_manifest(signed).signer
        (signed / "labels.txt").write_text("dog\ncat\nfox\n")
        seal(signed, signer)
        assert status(signed) == 2
        seal(signed)  # without a signer
        assert status(signed) == 2
        (signed / SIGNATURE).unlink()
        assert status(signed) == 0  # treated as an unsigned bundle
        assert status(signed, "--key", str(keys / "a.public.pem")) == 2

    def test_other_files_are_no_keys(
        self, signed: Path, keys: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("a.pem", "nothing.pem", "signed/model.onnx"):
            assert status(signed, "--key", str(keys / name)) == 2
            assert "an Ed25519 public key as PEM" in capsys.readouterr().err


def test_a_zip_is_unpacked_where_it_goes_away_again(bundle: Path, tmp_path: Path) -> None:
    write_zip(bundle, tmp_path / "bundle.zip")
    with unpacked_bundle(tmp_path / "bundle.zip") as folder:
        assert (folder / MANIFEST).is_file()
    assert not folder.exists()


def test_a_missed_bound_of_the_run_has_to_be_accepted(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "verify.max_drop=1.0: INT8 top-1 70.00 is 3.20 points below float 73.20"
    report = bundle / "report.json"
    content = json.loads(report.read_text()) if report.is_file() else {}
    report.write_text(json.dumps({**content, "shortfalls": [line]}))
    seal(bundle)

    assert status(bundle) == 1
    out = capsys.readouterr().out
    assert f"missed 1 bound: {line}" in out and "bounds falls short; to fix it: " in out
    assert status(bundle, "--accept-missed-bounds") == 0
    assert "(accepted with --accept-missed-bounds)" in capsys.readouterr().out
