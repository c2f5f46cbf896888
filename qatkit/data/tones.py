"""Four kinds of tones in noise (rising, falling, steady and pulsed), for a trial without any file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import TONES
from qatkit.data.loading import seed_of
from qatkit.data.recordings import recordings_of
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit_verify.errors import ConfigError

KINDS = ("rising", "falling", "steady", "pulsed")
_SLOPES = {"rising": 400.0, "falling": -250.0}  # hertz per second
_TRAIN, _TEST, _LEVEL, _NOISE, _PULSES = 1024, 512, 0.2, 0.7, 6.0


class Tones:
    """A dataset of tones of one length; an item is (int16 [T], label).

    Args:
        count: number of tones.
        samples: number of samples of each tone.
        rate: samples per second.
        parts: the seed and the name of the split, from which the tones are drawn.

    Attributes:
        targets: the label of each tone.
    """

    def __init__(self, count: int, samples: int, rate: int, *parts: object) -> None:
        self.samples, self.rate, self.parts = samples, rate, parts
        self.targets = [index % len(KINDS) for index in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int16], int]:
        draw = np.random.default_rng(seed_of("tones", *self.parts, index))
        kind, time = KINDS[self.targets[index]], np.arange(self.samples) / self.rate
        turns = draw.uniform(300, 800) * time + _SLOPES.get(kind, 0.0) / 2 * time**2
        tone = np.sin(2 * np.pi * turns)
        if kind == "pulsed":
            tone *= np.sin(2 * np.pi * _PULSES * time) >= 0
        sound = _LEVEL * (tone + _NOISE * draw.standard_normal(self.samples))
        return np.rint(sound * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16), self.targets[index]


def tones(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns 1,024 tones for training and calibration and 512 for verification, each `data.seconds` long.

    Raises:
        ConfigError: a folder is given, although no files are read, or as for `recordings_of`.
    """
    if root is not None:
        raise ConfigError("data.root", root, "null with data=tones, which reads no files")
    settings = DataConfig(source=TONES) if request is None else request.settings
    sound = recordings_of(settings).sound
    train, test = (
        Tones(count, sound.samples, sound.rate, seed, part)
        for count, part in ((_TRAIN, "train"), (_TEST, "test"))
    )
    return Splits(train, test, KINDS, recordings=True)
