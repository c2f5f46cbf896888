"""Drawings of recordings as log-mel spectrograms, with the probabilities of likely classes in float and INT8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qatkit.records.examples import Panel, Shape, box, coloured
from qatkit.tasks.drawing import Drawing, Sample

if TYPE_CHECKING:
    from qatkit.tasks.base import Array
    from qatkit_verify.sound import SoundPreprocess

# matplotlib's colour map "magma" (CC0) at nine points; colours between them are interpolated.
_LOUDNESS = ("000004", "1c1044", "4f127b", "812581", "b5367a", "e55064", "fb8761", "fec287", "fcfdbf")
_TICK, _TEXT, _RIGHT, _OTHER = "#9a9aa5", "#e6e6ea", "#2e9e5b", "#5b7fbf"
_RANGE = 60.0 / 4.342944819032518  # drawn range below the loudest value: 60 dB, as ln of power
_WIDTH, _HEIGHT, _LEFT, _BELOW = 300, 200, 34, 18  # pixels of a panel, and of the margins for its ticks
_PITCHES = (125, 250, 500, 1000, 2000, 4000, 8000, 16000)  # Hz
_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds from tick to tick
_TICKS, _APART = 6, 12  # maximum number of ticks on the time axis; minimum pixels between two pitches
_SHOWN = 5  # maximum number of classes in a panel
_WINDOW = 0.04  # seconds, for a model whose input is the waveform


class Spectrograms(Drawing):
    """A drawing of a recording's log-mel bands over time, with bars for the probabilities."""

    measure = "of the probability is on other classes than in float"
    looked_at = 512

    def differs(self, exact: Array, found: Array) -> Array:
        import numpy as np

        moved: Array = 0.5 * np.abs(_probabilities(exact) - _probabilities(found)).sum(-1)
        return moved

    def panels(self, sample: Sample) -> Sequence[Panel]:
        import numpy as np

        exact, found = (_probabilities(one) for one in (sample.exact, sample.found))
        truth = None if sample.target is None else int(sample.target)
        shown = [int(place) for place in np.argsort(-np.maximum(exact, found), kind="stable")[:_SHOWN]]
        if truth is not None and truth not in shown:
            shown[-1] = truth
        names = [_name(sample.classes, place) for place in shown]
        drawn = [
            _bars(title, [(name, float(one[place]), place == truth) for name, place in zip(names, shown, strict=True)],
                  _name(sample.classes, int(one.argmax())))
            for title, one in (("float", exact), (sample.label, found))
        ]  # fmt: skip
        spoken = "recording" if truth is None else f"truth: {_name(sample.classes, truth)}"
        power = None if sample.sound is None else _log_power(sample.inputs, sample.sound)
        return drawn if power is None else [_spectrogram(spoken, *power), *drawn]

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        loudest = f"#{_LOUDNESS[-2]}"
        return (
            ("true class", _RIGHT),
            ("other classes", _OTHER),
            ("loud", loudest),
            ("60 dB softer", "#000004"),
        )


def _probabilities(logits: Array) -> Array:
    """Returns the softmax along the last axis, float64."""
    import numpy as np

    raised = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    whole: Array = raised / raised.sum(-1, keepdims=True)
    return whole


def _name(classes: Sequence[str], place: int) -> str:
    return classes[place] if place < len(classes) else str(place)


def _log_power(inputs: Any, told: Mapping[str, Any]) -> tuple[Array, SoundPreprocess] | None:
    """Returns ln of a recording's power [frames, bands] and its preprocessing; None for other inputs.

    For a model whose input is the waveform, the default bands are computed. For MFCCs, the bands are reconstructed
    from the coefficients.
    """
    import numpy as np

    from qatkit_verify.sound import SoundPreprocess, cosines
    from qatkit_verify.sound_limits import MFCC, WAVEFORM

    how, values = SoundPreprocess.from_dict(told), np.asarray(inputs)
    if values.shape != how.shape:
        return None
    if how.features == WAVEFORM:
        window = min(max(2, round(_WINDOW * how.rate)), how.samples)
        how = SoundPreprocess(how.rate, how.samples, window=window, hop=max(1, window // 2))
        values = how(values)[0]
    power = values[0].astype(np.float64) * how.std + how.mean
    if how.features == MFCC:
        power = power @ cosines(how.mels, how.coefficients).T
    return power, how


def _spectrogram(title: str, power: Array, how: SoundPreprocess) -> Panel:
    """Returns the panel of a recording, with time to the right and pitch in mel upwards."""
    import numpy as np

    wide, high = _WIDTH - _LEFT, _HEIGHT - _BELOW
    low = max(float(power.min()), float(power.max()) - _RANGE)
    share = (power - low) / max(float(power.max()) - low, 1e-9)
    levels = np.rint(255 * share.clip(0, 1)).astype(np.uint8)
    rows = (np.arange(high) * how.mels // high)[::-1]
    columns = np.arange(wide) * len(power) // wide
    canvas = np.zeros((_HEIGHT, _WIDTH), np.uint8)
    canvas[:high, _LEFT:] = levels[columns][:, rows].T
    return coloured(title, canvas, _colours(), [*_times(how, wide, high), *_pitches(how, high)])


def _times(how: SoundPreprocess, wide: int, high: int) -> list[Shape]:
    """Returns the ticks of the time axis; each frame is drawn at the middle of its window."""
    length = how.frames * how.hop / how.rate
    step = next((one for one in _STEPS if length / one <= _TICKS), length / _TICKS)
    first = (how.window - how.hop) / 2 / how.rate
    found = []
    for number in range(int((first + length) / step + 1e-9) + 1):
        place = _LEFT + (number * step - first) / length * wide
        if _LEFT <= place <= _WIDTH - 1:
            found.append(Shape(((place, high), (place, high + 4)), _TICK, closed=False))
            if place < _WIDTH - _LEFT / 2:
                found.append(_written(place, high + 3, f"{number * step:.4g} s"))
    return found


def _pitches(how: SoundPreprocess, high: int) -> list[Shape]:
    """Returns the ticks of the pitch axis.

    Band k of n is centred at (k + 1) / (n + 1) of half the sampling rate, in mel.
    """
    import math

    def mel(pitch: float) -> float:
        return 1127 * math.log1p(pitch / 700)

    found, above = list[Shape](), math.inf
    for pitch in _PITCHES:
        place = mel(pitch) / mel(how.rate / 2) * (how.mels + 1) - 0.5  # position in bands from the lower edge
        height = high * (1 - place / how.mels)
        if 0 <= height <= high - 4 and above - height >= _APART:
            above = height
            found.append(Shape(((_LEFT - 4, height), (_LEFT, height)), _TICK, closed=False))
            label = f"{pitch / 1000:g} kHz" if pitch >= 1000 else f"{pitch}"
            found.append(_written(-1, max(-3, height - 7), label))
    return found


def _bars(title: str, rows: Sequence[tuple[str, float, bool]], said: str) -> Panel:
    """Returns the panel of a model that predicts the class `said`.

    It has a bar for each row: the class, its probability, and whether it is the labelled class.
    """
    import numpy as np

    each, canvas = _HEIGHT // _SHOWN, np.zeros((_HEIGHT, _WIDTH), np.uint8)
    shapes = []
    for number, (name, share, right) in enumerate(rows):
        top, end = number * each, round(share * _WIDTH)
        canvas[top + each // 2 : top + each - 6, :end] = 2 if right else 1
        frame = _RIGHT if right else _OTHER
        shapes.append(box(0.5, top + each // 2, _WIDTH - 0.5, top + each - 6, frame))
        shapes.append(_written(0, top + 4, f"{name}: {100 * share:.1f} %"))
    return coloured(f"{title}: {said}", canvas, ("#000004", _OTHER, _RIGHT), shapes)


def _written(x: float, y: float, text: str) -> Shape:
    """Returns a shape of text whose upper left corner is at (x, y)."""
    return Shape(((x, y),), _TEXT, text, closed=False)


def _colours() -> list[str]:
    """Returns 256 colours "#rrggbb", from soft to loud."""
    import numpy as np

    marks = np.array([[int(one[at : at + 2], 16) for at in (0, 2, 4)] for one in _LOUDNESS], float)
    places = np.linspace(0, len(marks) - 1, 256)
    mixed = np.stack([np.interp(places, np.arange(len(marks)), marks[:, part]) for part in range(3)], 1)
    return ["#" + "".join(f"{round(one):02x}" for one in row) for row in mixed]
