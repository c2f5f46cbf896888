"""The names and limits of the features of recordings, for code that runs without NumPy."""

from __future__ import annotations

WAVEFORM, LOG_MEL, MFCC = "waveform", "log_mel", "mfcc"
FEATURES = (WAVEFORM, LOG_MEL, MFCC)
LARGEST_WINDOW, LARGEST_MELS, LONGEST, LEAST_OFFSET = 8192, 256, 2**24, 1e-12
