"""Small folders of WAV recordings of three "words": a steady, a pulsed and a rising tone in noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sounds import wav

WORDS = ("hum", "buzz", "rise")


def word(name: str, seed: int, count: int = 3000) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Returns int16 samples of a word that fades out."""
    draw = np.random.default_rng(seed)
    time = np.arange(count)
    turns = draw.uniform(0.04, 0.08) * time + (5e-5 * time**2 if name == "rise" else 0)
    tone = np.sin(2 * np.pi * (turns + draw.uniform())) * ((time // 400) % 2 if name == "buzz" else 1)
    sound = 8000 * tone * np.exp(-time / count) + 800 * draw.standard_normal(count)
    return np.rint(sound).astype(np.int16)


def spoken(
    root: Path, numbers: int = 9, speakers: tuple[str, ...] = ("ann", "bob"), rate: int = 8000
) -> Path:
    """Writes `numbers` files WORD_SPEAKER_N.wav for each word and speaker."""
    for label, name in enumerate(WORDS):
        for place, speaker in enumerate(speakers):
            for number in range(numbers):
                wav(root / f"{name}_{speaker}_{number}.wav", word(name, seed_of(label, place, number)), rate)
    return root


def seed_of(label: int, speaker: int, number: int) -> int:
    """Returns the seed of a recording of `spoken` from the indices of its word and speaker and its number."""
    return (label * 10 + speaker) * 1000 + number
