"""Tests of audio features against NumPy's FFT, SciPy's DCT and formulas; the order of sums has no effect."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.fft
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.exact_math import cosine_of_turns, natural_log
from qatkit_verify.sound import SoundPreprocess, waves

LOG_MEL = SoundPreprocess(8000, 4000, window=320, hop=160)
MFCC = SoundPreprocess(8000, 4000, "mfcc", 320, 160, coefficients=13, mean=-3.0, std=2.5)


def _recording(count: int, seed: int = 0) -> NDArray[np.int16]:
    draw, time = np.random.default_rng(seed), np.arange(count)
    sound = 9000 * np.sin(0.2 * time + 1e-5 * time**2) + 500 * draw.standard_normal(count)
    return np.rint(sound).astype(np.int16)


def _by_fft(samples: NDArray[np.float64], how: SoundPreprocess) -> NDArray[np.float64]:
    """Returns the log power of the mel bands, by NumPy's FFT and textbook triangles."""
    hann = 0.5 * (1 - np.cos(2 * np.pi * np.arange(how.window) / how.window))
    starts = range(0, how.samples - how.window + 1, how.hop)
    power = np.stack([np.abs(np.fft.rfft(hann * samples[s : s + how.window])) ** 2 for s in starts])
    mel = 2595 * np.log10(1 + np.fft.rfftfreq(how.window, 1 / how.rate) / 700)
    edges = np.linspace(0, 2595 * np.log10(1 + how.rate / 2 / 700), how.mels + 2)
    bands = [np.interp(mel, edges[j : j + 3], [0, 1, 0]) for j in range(how.mels)]
    return np.asarray(np.log(power @ np.stack(bands, 1) + how.log_offset))


@pytest.mark.parametrize("count", [2500, 4000, 5000])
def test_features_are_those_of_the_formulas(count: int) -> None:
    recording = _recording(count)
    samples = np.zeros(4000)
    samples[: min(count, 4000)] = recording[:4000] / 2**15
    bands = _by_fft(samples, LOG_MEL)
    np.testing.assert_allclose(LOG_MEL(recording)[0, 0], bands, rtol=0, atol=2e-4)
    wanted = (scipy.fft.dct(bands, norm="ortho", axis=1)[:, :13] + 3) / 2.5
    np.testing.assert_allclose(MFCC(recording)[0, 0], wanted, rtol=0, atol=2e-4)


def test_bits_do_not_depend_on_the_batch_or_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = [_recording(3000 + 300 * i, i) for i in range(4)]
    together = LOG_MEL.batch(recordings)
    assert together.dtype == np.float32 and together.shape == (4, *LOG_MEL.shape) == (4, 1, 24, 40)
    alone = np.concatenate([LOG_MEL(one) for one in recordings])
    assert together.tobytes() == alone.tobytes()

    order = np.random.default_rng(1).permutation(320)
    real = np.lib.stride_tricks.sliding_window_view

    def shuffled(steps: NDArray[Any], window: int, axis: int) -> NDArray[Any]:
        return np.take(real(steps, window, axis=axis), order, -1)

    turned = tuple(part[order] for part in waves(320))
    monkeypatch.setattr(np.lib.stride_tricks, "sliding_window_view", shuffled)
    monkeypatch.setattr("qatkit_verify.sound.waves", lambda window: turned)
    assert LOG_MEL.batch(recordings).tobytes() == together.tobytes()


def test_sums_of_the_transform_are_whole_numbers() -> None:
    steps, (cosine, _) = _recording(320).astype(np.int64), waves(320)
    exact = sum(int(a) * int(b) for a, b in zip(steps, cosine[:, 7], strict=True))
    assert float(steps @ cosine[:, 7]) == exact and np.array_equal(cosine, np.rint(cosine))
    # The sums grow with the window, which has at most 8192 samples.
    loudest = 2**15 * np.abs(waves(1024)[0]).sum(0).max() * (8192 / 1024)
    assert loudest < 2**53


def test_floats_and_integers_give_the_same_bits() -> None:
    recording = _recording(3500)
    floats = (recording / np.float32(2**15)).astype(np.float32)
    assert LOG_MEL(floats).tobytes() == LOG_MEL(recording).tobytes()
    raw = SoundPreprocess(8000, 4000, "waveform")
    assert raw(recording).shape == (1, 4000)
    np.testing.assert_array_equal(raw(recording)[0], np.pad(floats, (0, 500)))


def test_logarithms_and_cosines_are_exact_to_the_last_bits() -> None:
    draw = np.random.default_rng(0)
    values = np.exp(draw.uniform(-27, 27, 20000))
    np.testing.assert_allclose(natural_log(values), np.log(values), rtol=4e-16, atol=3e-16)
    numerators = draw.integers(-4000, 4000, 5000)
    wanted = [math.cos(2 * math.pi * math.fmod(int(n), 641) / 641) for n in numerators]
    np.testing.assert_allclose(cosine_of_turns(numerators, 641), wanted, rtol=0, atol=2e-14)


def test_a_record_is_what_json_said() -> None:
    for one in (LOG_MEL, MFCC, SoundPreprocess(16000, 16000, "waveform", 640, 320)):
        assert SoundPreprocess.from_dict(one.as_dict()).as_dict() == one.as_dict()
    assert "coefficients" not in LOG_MEL.as_dict() and set(MFCC.as_dict()) > {"mels", "mean", "log_offset"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": "cqt"}, "features=cqt: expected waveform | log_mel | mfcc"),
        ({"rate": 0}, "rate=0: expected an integer from 1 to 400000"),
        ({"window": 4001}, "window=4001: expected at most the number of samples (4000)"),
        ({"std": 0.0}, "std=0.0: expected a positive number"),
        ({"log_offset": None}, "log_offset=null: expected a number from 1e-12 to 1"),
        ({"mean": float("nan")}, "mean=nan: expected a number"),
        ({"coefficients": 41}, "coefficients=41: expected at most the number of mels (40)"),
    ],
)
def test_values_that_no_version_knows_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SoundPreprocess.from_dict(MFCC.as_dict() | change)
    assert str(caught.value) == f"preprocess.json: {message}"


@pytest.mark.parametrize(
    "given",
    [np.zeros((2, 8), np.float32), np.zeros(0, np.float32), np.zeros(8, np.int32), np.full(8, np.nan)],
)
def test_arrays_that_are_no_recordings_are_refused(given: NDArray[Any]) -> None:
    with pytest.raises(ConfigError, match="recording="):
        LOG_MEL(given)
