"""Tests of WAV and FLAC files against soundfile, an independent reader, and of resampling against SciPy."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.signal import resample_poly
from sounds import riff, tone, wav

from qatkit.data.resampling import resampled
from qatkit_verify.sound_files import read_sound

soundfile: Any = pytest.importorskip("soundfile", reason="soundfile, the reference here, is not installed")


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("WAV", "PCM_U8"),
        ("WAV", "PCM_16"),
        ("WAV", "PCM_24"),
        ("WAV", "PCM_32"),
        ("WAV", "FLOAT"),
        ("WAV", "DOUBLE"),
        ("WAVEX", "PCM_16"),
        ("WAVEX", "PCM_24"),
        ("WAVEX", "FLOAT"),
        ("RF64", "PCM_16"),
        ("FLAC", "PCM_S8"),
        ("FLAC", "PCM_16"),
        ("FLAC", "PCM_24"),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_those_of_soundfile(form: str, kind: str, channels: int, tmp_path: Path) -> None:
    path = tmp_path / "sound"
    given = np.random.default_rng(1).uniform(-1, 1, (1001, channels))
    soundfile.write(str(path), given, 22050, kind, format=form)
    wanted, rate = soundfile.read(str(path), dtype="float64", always_2d=True)
    found = read_sound(str(path))
    assert found.rate == rate == 22050 and found.samples.dtype == np.float32
    np.testing.assert_array_equal(
        found.samples, wanted.astype(np.float32).mean(1, dtype=np.float64).astype("f4")
    )


@pytest.mark.parametrize(("kind", "dtype"), [("PCM_16", "int16"), ("PCM_24", "int32")])
def test_flac_gives_the_samples_of_wav_bit_for_bit(kind: str, dtype: str, tmp_path: Path) -> None:
    ends = np.iinfo(dtype)
    given = np.random.default_rng(2).integers(ends.min, ends.max, (2000, 2), dtype, endpoint=True)
    for form in ("WAV", "FLAC"):
        soundfile.write(str(tmp_path / form), given, 16000, kind, format=form)
    wav_file, flac = (read_sound(str(tmp_path / form)) for form in ("WAV", "FLAC"))
    assert wav_file.rate == flac.rate and wav_file.samples.tobytes() == flac.samples.tobytes()


def test_chunks_beside_the_samples_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(riff(tone(100), extra=(b"LIST", b"odd")))
    wanted, _ = soundfile.read(str(path), dtype="float32")
    np.testing.assert_array_equal(read_sound(str(path)).samples, wanted)


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFF024])
def test_a_length_that_a_pipe_left_open_ends_with_the_file(length: int, tmp_path: Path) -> None:
    path, samples = tmp_path / "a.wav", tone(100)
    path.write_bytes(riff(samples, length=length))
    np.testing.assert_array_equal(read_sound(str(path)).samples * 2**15, samples)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"ID3 and so on, an MP3 file", "neither WAV nor FLAC by its first bytes"),
        (riff(tone(100))[:-20], "cut off after 180 of 200 bytes of samples"),
        (riff(tone(0)), "no samples"),
        (riff(tone(9))[:36], "no samples"),
        (riff(tone(9), rate=0), "a sampling rate of 0"),
        (riff(tone(9), kind=2), "samples of 16 bits in format 2; only PCM of 8 to 32 bits and floats of"),
        (riff(tone(9), channels=0), "0 channels of 16 bits in 2 bytes"),
        (riff(np.array([0, np.nan, 1], np.float32), kind=3), "NaN or infinity among its samples"),
        (b"RIFF\0\0\0\0WAVEdata" + struct.pack("<I", 4) + bytes(4), "its samples come before their format"),
        (b"fLaC and no more", "."),
    ],
)
def test_a_broken_file_is_refused_with_its_reason(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    with pytest.raises(Exception, match=message) as told:
        read_sound(str(path))
    assert isinstance(told.value, ValueError | RuntimeError)


def test_a_flac_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(
        str(path), np.random.default_rng(3).uniform(-1, 1, 20_000), 16000, "PCM_16", format="FLAC"
    )
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(ValueError, match=r"the FLAC decoder failed|cut off after"):
        read_sound(str(path))
    path.write_bytes(b"fLaC" + bytes(60))
    with pytest.raises(ValueError, match="the FLAC decoder failed"):
        read_sound(str(path))


def test_flac_without_soundfile_is_an_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(str(path), np.zeros(50), 16000, format="FLAC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ImportError):
        read_sound(str(path))
    assert len(read_sound(str(wav(tmp_path / "b.wav", tone(50)))).samples) == 50


@pytest.mark.parametrize(("rate", "wanted"), [(8000, 16000), (44100, 16000), (22050, 8000), (48000, 16000)])
def test_resampling_is_that_of_scipy_and_keeps_a_sine(rate: int, wanted: int) -> None:
    seconds, pitch = 1, 440
    sine = np.sin(2 * np.pi * pitch * np.arange(rate * seconds) / rate).astype(np.float32)
    found = resampled(sine, rate, wanted)
    np.testing.assert_allclose(found, resample_poly(sine.astype(np.float64), wanted, rate), atol=1e-6)
    inner = slice(wanted // 10, -wanted // 10)  # without both ends, where the filter reaches into silence
    exact = np.sin(2 * np.pi * pitch * np.arange(len(found)) / wanted)
    np.testing.assert_allclose(found[inner], exact[inner], atol=2e-3)


def test_rates_without_a_factor_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1000003 Hz cannot be resampled to 16000 Hz"):
        resampled(np.zeros(10, np.float32), 1_000_003, 16000)
