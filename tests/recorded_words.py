"""Small folders of recordings: words that are tones of their own pitch, written as WAV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sounds import wav

PITCHES = {"low": 0.03, "middle": 0.08, "high": 0.16}  # periods a sample


def word(name: str, seed: int, count: int = 3000) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Returns int16 samples of a word: its tone, softer and softer, in noise."""
    draw = np.random.default_rng(seed)
    time = np.arange(count)
    tone = np.sin(2 * np.pi * (PITCHES[name] * draw.uniform(0.9, 1.1) * time + draw.uniform()))
    sound = 8000 * tone * np.exp(-time / count) + 800 * draw.standard_normal(count)
    return np.rint(sound).astype(np.int16)


def spoken(
    root: Path, numbers: int = 9, speakers: tuple[str, ...] = ("ann", "bob"), rate: int = 8000
) -> Path:
    """Writes WORD_SPEAKER_N.wav files; of each word and speaker `numbers` ones."""
    for label, name in enumerate(PITCHES):
        for place, speaker in enumerate(speakers):
            for number in range(numbers):
                seed = (label * 10 + place) * 1000 + number
                wav(root / f"{name}_{speaker}_{number}.wav", word(name, seed), rate)
    return root
