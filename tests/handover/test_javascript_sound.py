"""Tests of sound.mjs in Node against the features of training, value by value."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import qatkit_verify
from qatkit_verify.sound import SoundPreprocess

NODE = shutil.which("node")
MODULE = Path(qatkit_verify.__file__).parent / "javascript" / "sound.mjs"
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on the PATH")
PROGRAM = """
import { readFileSync } from "node:fs";
const { prepareSound } = await import(process.argv[1]);
const { samples, whole, hows } = JSON.parse(readFileSync(0, "utf8"));
for (const how of hows) for (const given of [samples, Int16Array.from(whole)]) {
  const { data, dims } = prepareSound(given, how);
  console.log(JSON.stringify({ data: Array.from(data), dims }));
}
"""
HOWS = [
    SoundPreprocess(8000, 3000, window=320, hop=160, mean=-9.0, std=5.0),
    SoundPreprocess(16000, 2000, "mfcc", 511, 77, mels=33, coefficients=13, log_offset=1e-9),
    SoundPreprocess(44100, 2500, window=1024, hop=500, mels=100),
    SoundPreprocess(8000, 2600, "waveform"),
]


def test_every_feature_is_that_of_training() -> None:
    draw, time = np.random.default_rng(0), np.arange(2500)
    sound = np.sin(0.3 * time) * np.linspace(0, 1.2, 2500) + 0.01 * draw.standard_normal(2500)
    samples = sound.astype(np.float32)  # some are above 1, and most lie between int16 steps
    whole = np.rint(sound.clip(-1, 0.99) * 2**15).astype(np.int16)
    typed = {"samples": samples.tolist(), "whole": whole.tolist(), "hows": [how.as_dict() for how in HOWS]}
    command = [str(NODE), "--input-type=module", "-e", PROGRAM, MODULE.as_uri()]
    done = subprocess.run(
        command, input=json.dumps(typed), capture_output=True, text=True, check=True, timeout=100
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = [how(given) for how in HOWS for given in (samples, whole)]
    for mine, training in zip(found, wanted, strict=True):
        assert mine["dims"] == list(training.shape)
        np.testing.assert_array_equal(mine["data"], training.ravel().astype(np.float64))
