"""Tests of sound files cut into frames for a model's input, compared with frames cut by NumPy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.signal import resample_poly
from sounds import riff, tone, wav
from state_net import gru_run, gru_weights, save_gru

from qatkit import models
from qatkit.config.schema import DataConfig, ModelConfig
from qatkit.config.schema.model import AUDIO
from qatkit.data import sound_survey
from qatkit.data.arrays import Port
from qatkit.data.audio import AudioFrames, audio
from qatkit.data.module import DataModule
from qatkit.data.request import Request
from qatkit.data.wave_input import wave_input
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError

X = Port("x", "float32", (None, 8), 0)


def _config(root: Path | None, **settings: Any) -> DataConfig:
    given = {"workers": 0, "batch_size": 2, "eval_batch_size": 2} | settings
    return DataConfig(source=AUDIO, root=None if root is None else str(root), **given)


def _data(root: Path, port: Port = X, about: dict[str, str] | None = None, **settings: Any) -> DataModule:
    task = task_of("outputs")
    return DataModule(_config(root, **settings), audio, 0, task=task, ports=(port,), about=about)


def _frames(data: DataModule, part: str, name: str = "x") -> list[np.ndarray[Any, Any]]:
    items = getattr(data, f"_{part}_images")
    return [items[index][0][name].numpy() for index in range(len(items))]


def _files(root: Path, *counts: int) -> list[np.ndarray[Any, Any]]:
    """Writes a.wav, b.wav, ... with these numbers of samples and returns the samples in [-1, 1]."""
    sounds = [tone(count, 0.01 * (index + 1)) for index, count in enumerate(counts)]
    for index, sound in enumerate(sounds):
        wav(root / f"{'abcdef'[index]}.wav", sound)
    return [(sound / 2**15).astype(np.float32) for sound in sounds]


def test_every_other_file_verifies_as_a_whole(tmp_path: Path) -> None:
    a, b, c = _files(tmp_path, 30, 20, 16)
    data = _data(tmp_path)
    np.testing.assert_array_equal(
        np.concatenate(_frames(data, "train")), [*a[:24].reshape(3, 8), *c.reshape(2, 8)]
    )
    np.testing.assert_array_equal(np.concatenate(_frames(data, "test")), b[:16].reshape(2, 8))
    assert "2 audio files (0.0 s) for calibration and training, 1 audio file" in data.notes[0]
    assert (
        "frames of 8 samples for 'x', one every 8 samples, at 16000 Hz (assumed; data.rate sets it)"
        in data.notes[0]
    )
    assert len(data.notes) == 1 and data.notes[0] in data.notes


def test_folders_train_and_test_are_the_splits(tmp_path: Path) -> None:
    (a,) = _files(tmp_path / "train" / "below", 16)
    (b,) = _files(tmp_path / "test", 24)
    data = _data(tmp_path)
    np.testing.assert_array_equal(np.concatenate(_frames(data, "train")), a.reshape(2, 8))
    np.testing.assert_array_equal(np.concatenate(_frames(data, "test")), b.reshape(3, 8))
    assert "verification files with the same samples" not in " ".join(data.notes)


def test_frames_overlap_by_the_hop(tmp_path: Path) -> None:
    a, _ = _files(tmp_path, 21, 20)
    found = np.concatenate(_frames(_data(tmp_path, hop=3), "train"))
    np.testing.assert_array_equal(found, np.lib.stride_tricks.sliding_window_view(a, 8)[::3])
    assert len(found) == 5


@pytest.mark.parametrize(
    ("shape", "axis", "wanted"),
    [
        ((None, 8), 0, (1, 8)),
        ((1, 8), 0, (1, 8)),
        ((None, 8), None, (1, 8)),
        ((None, 1, 8), 0, (1, 1, 8)),
        ((None, 8, 1), 0, (1, 8, 1)),
        ((1, 1, 1, 8), 0, (1, 1, 1, 8)),
        ((8,), None, (8,)),
    ],
)
def test_the_axis_of_time_is_found(
    shape: Any, axis: int | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    a, _ = _files(tmp_path, 16, 16)
    first, second = _frames(_data(tmp_path, Port("x", "float32", shape, axis)), "train")
    np.testing.assert_array_equal(first, a[:8].reshape(wanted))
    np.testing.assert_array_equal(second, a[8:].reshape(wanted))


@pytest.mark.parametrize(
    ("shape", "axis", "settings", "wanted"),
    [
        ((None, None), 0, {}, (1, 5)),
        ((None,), 0, {}, (5,)),
        ((1, None, 1), 0, {}, (1, 5, 1)),
        ((None, None, None), 0, {"axes": "nt1"}, (1, 5, 1)),
        ((None, None, None), 0, {"axes": "n1t"}, (1, 1, 5)),
    ],
)
def test_an_open_axis_has_the_frame_of_the_settings(
    shape: Any, axis: int | None, settings: dict[str, Any], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    _files(tmp_path, 16, 16)
    data = _data(tmp_path, Port("x", "float32", shape, axis), frame=5, **settings)
    frames = _frames(data, "train")
    assert [one.shape for one in frames] == [wanted] * 3
    assert data.array_axes() == {"x": None if len(shape) == 1 else 0}


def test_a_model_that_declares_no_input_takes_frames(tmp_path: Path) -> None:
    a, _ = _files(tmp_path, 16, 16)
    data = DataModule(_config(tmp_path, frame=4, axes="n1t"), audio, 0, task=task_of("outputs"))
    batch, _ = next(iter(data.image_batches([0, 1, 2, 3], 4)))
    np.testing.assert_array_equal(batch.numpy(), a.reshape(4, 1, 4))


def test_integers_have_the_numbers_of_the_file(tmp_path: Path) -> None:
    sound = np.array([-32768, 32767, -1, 0, 1, 12345, -12345, 7], np.int16)
    for name in "ab":
        wav(tmp_path / f"{name}.wav", sound)
    for dtype in ("int16", "int32"):
        (frame,) = _frames(_data(tmp_path, Port("x", dtype, (None, 8), 0)), "train")
        assert frame.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(frame[0], sound)
    data = _data(tmp_path, scale="int16")
    np.testing.assert_array_equal(_frames(data, "train")[0][0], sound.astype(np.float32))
    assert "in -32768..32767" in data.notes[0]
    assert (
        "verification files with the same samples as a calibration file: 1 of 1, b.wav equals a.wav"
        in data.notes[1]
    )


def test_samples_beyond_full_scale_are_clipped_to_integers(tmp_path: Path) -> None:
    loud = np.array([1.5, -1.5, 0.25, -0.25, 1, -1, 0, 0], np.float32)
    for name in "ab":
        (tmp_path / f"{name}.wav").write_bytes(riff(loud, kind=3))
    (frame,) = _frames(_data(tmp_path, Port("x", "int16", (None, 8), 0)), "train")
    np.testing.assert_array_equal(frame[0], [32767, -32768, 8192, -8192, 32767, -32768, 0, 0])


def test_files_of_other_rates_are_resampled_and_noted(tmp_path: Path) -> None:
    a, b = tone(40), tone(60)
    wav(tmp_path / "a.wav", a, 8000)
    wav(tmp_path / "b.wav", b, 24000)
    data = _data(tmp_path, about={"sample_rate": "12000"})
    wanted = [resample_poly(sound / 2**15, up, down) for sound, up, down in ((a, 3, 2), (b, 1, 2))]
    np.testing.assert_allclose(np.concatenate(_frames(data, "train")).ravel(), wanted[0][:56], atol=1e-6)
    np.testing.assert_allclose(np.concatenate(_frames(data, "test")).ravel(), wanted[1][:24], atol=1e-6)
    assert "at 12000 Hz (the model's sample_rate)" in data.notes[0]
    assert data.notes[1] == "audio files resampled to 12000 Hz: 2 of 2, from 8000, 24000 Hz"


@pytest.mark.parametrize(
    ("about", "settings", "rate"),
    [
        ({}, {}, 16000),
        ({"sr": "8000", "sample_rate": "44100"}, {}, 8000),
        ({"Sample Rate": "22050"}, {}, 22050),
        ({"rate": "8000", "sample_rate": "high", "sr": "1"}, {}, 16000),
        ({"sr": "8000"}, {"rate": 32000}, 32000),
    ],
)
def test_the_rate_is_that_of_settings_then_model(
    about: dict[str, str], settings: dict[str, int], rate: int
) -> None:
    assert wave_input(Request(_config(None, **settings), [X], {}, about)).rate == rate


def test_a_files_fixed_input_is_said_before_its_metadata(tmp_path: Path) -> None:
    import onnx

    file = save_gru(tmp_path / "gru.onnx", gru_weights())
    model = onnx.load(file)
    onnx.helper.set_model_props(model, {"sr": "44100", "author": "x"})
    onnx.save(model, str(file))
    assert models.declared(ModelConfig(f"onnx/{file}"), None).about == {"sr": "44100", "author": "x"}
    fixed = models.declared(
        ModelConfig(f"onnx/{file}", kwargs={"fix": {"sr": [8000], "h": [[1.0, 2.0]]}}), None
    ).about
    assert [*fixed.items()] == [("sr", "8000"), ("author", "x")]


def test_a_file_is_a_sequence_of_a_model_with_states(tmp_path: Path) -> None:
    weights = gru_weights()
    model = ModelConfig(f"onnx/{save_gru(tmp_path / 'gru.onnx', weights)}", kwargs={"states": {"h": "hN"}})
    a, b, c = _files(tmp_path / "data", 31, 20, 50)
    given: dict[str, Any] = {"ports": models.declared(model, None).ports, "states": models.states(model)}
    data = DataModule(_config(tmp_path / "data"), audio, 0, task=task_of("outputs"), **given)
    cut = [one[: len(one) // 6 * 6].reshape(-1, 6) for one in (a, b, c)]
    wanted = [gru_run(weights, one)[1][:-1] for one in cut]
    np.testing.assert_array_equal(np.concatenate(_frames(data, "train")), np.concatenate([cut[0], cut[2]]))
    states = np.concatenate(_frames(data, "train", "h"))
    np.testing.assert_allclose(states, np.concatenate([wanted[0], wanted[2]]), atol=1e-5)
    np.testing.assert_allclose(np.concatenate(_frames(data, "test", "h")), wanted[1], atol=1e-5)
    assert [len([*one.steps]) for one in data.sequences()] == [3]


def test_what_memory_does_not_hold_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _files(tmp_path, 30, 40, 50, 60)
    wanted = [np.concatenate(_frames(_data(tmp_path), part)) for part in ("train", "test")]
    monkeypatch.setattr(sound_survey, "KEPT", 4 * 70)
    data = _data(tmp_path)
    assert isinstance(data.splits.train, AudioFrames)
    assert [file.kept is None for file in data.splits.train.files] == [False, True]
    for part, values in zip(("train", "test"), wanted, strict=True):
        np.testing.assert_array_equal(np.concatenate(_frames(data, part)), values)


def test_a_file_too_large_for_memory_leaves_room_for_others(tmp_path: Path) -> None:
    _files(tmp_path, 80, 30, 20)
    survey = sound_survey.SoundSurvey(str(tmp_path), 16000, 1, "refuse")
    survey._room = 4 * 60
    found = survey.usable(sorted(map(str, tmp_path.glob("*.wav"))))
    assert sorted((one.count, one.kept is None) for one in found) == [(20, False), (30, False), (80, True)]


def test_flac_and_wav_of_the_same_samples_are_the_same_frames(tmp_path: Path) -> None:
    soundfile: Any = pytest.importorskip("soundfile", reason="soundfile, which reads FLAC, is not installed")
    sound = np.random.default_rng(4).integers(-(2**15), 2**15, (40, 2), np.int16)
    for place, form in (("a.flac", "FLAC"), ("b.wav", "WAV")):
        soundfile.write(str(tmp_path / place), sound, 16000, "PCM_16", format=form)
    data = _data(tmp_path)
    train, test = (np.concatenate(_frames(data, part)) for part in ("train", "test"))
    assert train.tobytes() == test.tobytes()
    np.testing.assert_array_equal(train.ravel(), (sound.mean(1) / 2**15).astype(np.float32))


def _spoiled(root: Path) -> None:
    _files(root, 16, 16)
    wav(root / "short.wav", tone(7))
    wav(root / "silent.wav", np.zeros(20, np.int16))
    wav(root / "prime.wav", tone(20), 1_000_003)
    (root / "empty.wav").write_bytes(b"")
    (root / "cut.wav").write_bytes(riff(tone(20))[:-4])
    (root / "notes.txt").write_text("text")


def test_files_that_cannot_be_used_are_listed(tmp_path: Path) -> None:
    _spoiled(tmp_path)
    listed = re.escape(
        "5 of 7 audio files can't be used: cut.wav (cut off after 36 of 40 bytes of samples), empty.wav (empty), "
        "prime.wav (1000003 Hz cannot be resampled to 16000 Hz), short.wav (7 samples at 16000 Hz, fewer than "
        "a frame of 8), silent.wav (silent)"
    )
    with pytest.raises(ConfigError, match=f"{listed}; set data.bad=skip to leave them out"):
        _data(tmp_path)
    data = _data(tmp_path, bad="skip")
    assert len(_frames(data, "train")) == 2 and len(_frames(data, "test")) == 2
    assert re.search(f"data.bad=skip: {listed}", data.notes[1])
    assert data.notes[2] == "files and folders left out by name: 1 (notes.txt)"


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ((), {}, "a folder with WAV or FLAC files; .* has none$"),
        (("a.mp3", "b.ogg"), {}, r"has none \(it has .mp3, .ogg\)"),
        (
            ("a.wav",),
            {},
            "two usable WAV or FLAC files, since no file may be used for both calibration and verification; it has 1",
        ),
        (("a.wav",), {"root": "/no/such"}, "a folder with WAV or FLAC files; there is no such folder"),
        (("a.wav", "b.wav"), {"frame": 9}, r"data.frame=9: expected null or 8 for the input 'x' \[N, 8\]"),
        (
            ("a.wav", "b.wav"),
            {"axes": "n1t"},
            r"data.axes=n1t: expected null, or the axes of the input 'x' \[N, 8\]",
        ),
        (("a.wav", "b.wav"), {"frame": 0}, "data.frame=0: expected an integer of at least 1"),
        (("a.wav", "b.wav"), {"axes": "tn"}, "data.axes=tn: expected one of nt, n1t, nt1, t"),
        (("a.wav", "b.wav"), {"scale": "int8"}, "data.scale=int8: expected one of unit, int16"),
        (
            ("a.wav", "b.wav"),
            {"count": 9},
            f"data.count=9: expected null with data.source={AUDIO}; only data=drawn reads",
        ),
        (("a.wav", "b.wav"), {"image_size": 9}, "data.image_size=9: expected null"),
    ],
)
def test_a_folder_or_setting_that_does_not_fit_is_refused(
    names: tuple[str, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name in names:
        wav(tmp_path / name, tone(16))
    with pytest.raises(ConfigError, match=message):
        _data(Path(settings.pop("root", tmp_path)), **settings)


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (
            Port("x", "float32", (None, 76, 32, 1), 0),
            r"'x' \[N, 76, 32, 1\] has 2 axes that may be time, but a wave has",
        ),
        (
            Port("x", "float32", (None, None, None), 0),
            "2 axes that may be time.* or set the time axis with data.axes",
        ),
        (Port("x", "float32", (None, 1), 0), r"'x' \[N, 1\] has no axis that may be time"),
        (
            Port("x", "float32", (1, 1, 257), 0),
            "257 values, the size of a spectrum of 512 samples rather than of a wave",
        ),
        (
            Port("x", "float32", (None, None), 0),
            r"data.frame=null: expected a number of samples, since the input 'x' \[",
        ),
        (
            Port("x", "uint8", (None, 8), 0),
            r"'x' \[N, 8\] is uint8, but samples of a wave must be floats or signed integers of at least 16",
        ),
        (Port("x", "bool", (None, 8), 0), "is bool, but samples of a wave"),
    ],
)
def test_an_input_that_takes_no_wave_is_refused(port: Port, message: str, tmp_path: Path) -> None:
    _files(tmp_path, 16, 16)
    with pytest.raises(ConfigError, match=message):
        _data(tmp_path, port)


def test_a_frame_as_long_as_a_spectrum_may_be_named_a_wave(tmp_path: Path) -> None:
    _files(tmp_path, 300, 300)
    data = _data(tmp_path, Port("x", "float32", (1, 1, 257), 0), axes="n1t")
    assert [one.shape for one in _frames(data, "train")] == [(1, 1, 257)]


def test_integers_in_unit_scale_are_refused(tmp_path: Path) -> None:
    _files(tmp_path, 16, 16)
    with pytest.raises(ConfigError, match=r"data.scale=unit: expected null or int16 for the input"):
        _data(tmp_path, Port("x", "int16", (None, 8), 0), scale="unit")


def test_other_inputs_have_to_be_fixed_or_states(tmp_path: Path) -> None:
    _files(tmp_path, 16, 16)
    ports = (X, Port("sr", "int64", (), None))
    with pytest.raises(
        ConfigError, match=r"the inputs of the model are x, sr, but audio files give only one; fix the others"
    ):
        DataModule(_config(tmp_path), audio, 0, task=task_of("outputs"), ports=ports)


def test_flac_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wav(tmp_path / "a.wav", tone(16))
    (tmp_path / "b.flac").write_bytes(b"fLaC and more")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(
        ConfigError, match=r"b.flac is a FLAC file and needs the extra audio; install it with .*audio"
    ):
        _data(tmp_path, bad="skip")
