"""Tests of the report's spectrograms: a tone appears at its pitch and time, and bars show probabilities."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qatkit.records.examples import Panel
from qatkit.tasks.audio_classification import AudioClassification
from qatkit.tasks.drawing import Sample
from qatkit.tasks.spectrograms import Spectrograms
from qatkit_verify.sound import SoundPreprocess

RATE, PITCH, START = 8000, 1000, 0.6  # Hz, Hz, seconds
EXACT, FOUND = np.array([2.0, 1.0, -3.0, 0.5]), np.array([1.0, 1.5, -3.0, 0.5])
CLASSES = ("hum", "buzz", "rise", "<hiss>")


def recording() -> Any:
    """Returns silence, then a tone."""
    time = np.arange(RATE) / RATE
    return np.where(time >= START, 0.5 * np.sin(2 * np.pi * PITCH * time), 0).astype(np.float32)


def drawn(how: SoundPreprocess, target: int | None = 0) -> list[Panel]:
    given = None if target is None else np.asarray(target)
    sample = Sample(how(recording())[0], None, given, EXACT, FOUND, CLASSES, "INT8", how.as_dict())
    return list(Spectrograms().panels(sample))


def pixels(panel: Panel) -> Any:
    image = Image.open(io.BytesIO(base64.b64decode(panel.pixels.partition(",")[2])))
    assert image.size == (panel.width, panel.height)
    return np.asarray(image.convert("RGB"), int).sum(-1)


def ticks(panel: Panel) -> dict[str, tuple[float, float]]:
    """Returns the end point of each label's tick, by label."""
    found: dict[str, tuple[float, float]] = {}
    for line, text in zip(panel.shapes, panel.shapes[1:], strict=False):
        if len(line.points) == 2 and text.label:
            found[text.label] = line.points[1]
    return found


@pytest.mark.parametrize("features", ["log_mel", "mfcc", "waveform"])
def test_a_tone_lies_at_its_pitch_and_time(features: str) -> None:
    how = SoundPreprocess(RATE, RATE, features, 320, 160, mels=40, coefficients=20, mean=-9.0, std=5.0)
    picture, at = drawn(how)[0], ticks(drawn(how)[0])
    assert picture.title == "truth: hum"
    bright = pixels(picture)[: int(at["0.2 s"][1]) - 4, int(at["1 kHz"][0]) :]
    loud = bright > 0.9 * bright.max()
    assert np.flatnonzero(loud.any(1)).mean() == pytest.approx(at["1 kHz"][1], abs=6)
    begins = at["1 kHz"][0] + np.flatnonzero((bright > 0.7 * bright.max()).any(0)).min()
    assert begins == pytest.approx(at["0.6 s"][0], abs=8)  # a frame is six pixels wide
    assert list(at) == ["0.2 s", "0.4 s", "0.6 s", "0.8 s", "125", "250", "500", "1 kHz", "2 kHz"]
    steps = [at[name][0] for name in list(at)[:4]]
    assert np.diff(steps) == pytest.approx([266 * 0.2 * RATE / (how.frames * how.hop)] * 3)


def test_bars_are_probabilities_of_the_same_classes() -> None:
    float_panel, int8_panel = drawn(SoundPreprocess(RATE, RATE), target=2)[1:]
    for panel, logits, said in ((float_panel, EXACT, "float: hum"), (int8_panel, FOUND, "INT8: buzz")):
        shares = np.exp(logits) / np.exp(logits).sum()
        assert panel.title == said
        labels = [one.label for one in panel.shapes if one.label]
        assert labels == [f"{CLASSES[at]}: {100 * shares[at]:.1f} %" for at in (0, 1, 3, 2)]
        rows = pixels(panel)
        for number, at in enumerate((0, 1, 3, 2)):
            assert (rows[40 * number + 26] > 3 * 4).sum() == pytest.approx(300 * shares[at], abs=1)


def test_samples_of_another_source_have_bars_alone() -> None:
    sample = Sample({"x": np.zeros((3, 4))}, None, None, EXACT, FOUND, (), "INT8")
    assert [one.title for one in Spectrograms().panels(sample)] == ["float: 0", "INT8: 1"]
    assert drawn(SoundPreprocess(RATE, RATE), target=None)[0].title == "recording"


def test_moved_probability_decides_what_is_drawn() -> None:
    drawing = AudioClassification().drawing()
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]))
    moved = np.log(np.array([[0.7, 0.1, 0.2], [0.2, 0.4, 0.4]])) + 1000
    assert drawing.differs(logits, moved) == pytest.approx([0.1, 0.3])
    assert math.isclose(drawing.differs(logits, logits).max(), 0)
