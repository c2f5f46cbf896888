"""Tests of recordings in a run: sources, splits, seeded augmentation, and what is refused early."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_words import WORDS, seed_of, spoken, word
from scipy.signal import resample_poly
from sounds import riff, wav

from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import COMMANDS, DIGITS_SPOKEN, TONES
from qatkit.data import DataModule
from qatkit.data.recordings import augmented
from qatkit.data.speech_commands import speech_commands, which_set
from qatkit.data.spoken_digits import spoken_digits
from qatkit.data.tones import tones
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError
from qatkit_verify.sound import SoundPreprocess

SOURCES: dict[str, Any] = {DIGITS_SPOKEN: spoken_digits, COMMANDS: speech_commands, TONES: tones}


def _data(source: str, root: Path | None = None, **settings: Any) -> DataModule:
    given = {"workers": 0, "batch_size": 4, "eval_batch_size": 8, "rate": 8000, "seconds": 0.5} | settings
    config = DataConfig(source=source, root=None if root is None else str(root), **given)
    return DataModule(config, SOURCES[source], 3, task=task_of("audio_classification"))


def test_spoken_digits_verify_on_the_first_five_of_each(tmp_path: Path) -> None:
    data = _data(DIGITS_SPOKEN, spoken(tmp_path, 7))
    assert data.classes == ("buzz", "hum", "rise")
    assert len(data.splits.test) == 3 * 2 * 5 and len(data.splits.train) == 3 * 2 * 2
    batches = [(x, y) for x, y in data.test_batches()]
    names = sorted(path.name for path in tmp_path.iterdir() if int(path.stem.rpartition("_")[2]) < 5)
    labels = [data.classes.index(name.partition("_")[0]) for name in names]
    assert torch.cat([y for _, y in batches]).tolist() == labels
    prepare = SoundPreprocess(8000, 4000, window=320, hop=160, mean=-9.0, std=5.0)
    first = word("buzz", seed_of(WORDS.index("buzz"), 0, 0))
    np.testing.assert_array_equal(batches[0][0][0].numpy(), prepare(first)[0])
    assert data.inputs.shape == (1, 24, 40) and data.inputs.text == "recordings [N, 1, 24, 40]"


def test_other_rates_are_resampled_with_a_note(tmp_path: Path) -> None:
    spoken(tmp_path, 6)
    wav(tmp_path / "hum_ann_5.wav", word("hum", 1, 6000), 16000)
    data = _data(DIGITS_SPOKEN, tmp_path, features_in="graph")
    assert "audio files resampled to 8000 Hz: 1 of 36, from 16000 Hz" in data.notes
    train: Any = data.splits.train
    place = next(i for i, file in enumerate(train.files) if file.path.endswith("hum_ann_5.wav"))
    wanted = resample_poly(word("hum", 1, 6000) / 2.0**15, 1, 2)
    np.testing.assert_allclose(train[place][0], wanted, rtol=0, atol=1e-6)


def _commands(root: Path) -> Path:
    for label, name in enumerate(("bed", "cat")):
        for place in range(40):
            speaker = hashlib.sha1(str(place).encode()).hexdigest()[:8]
            wav(root / name / f"{speaker}_nohash_0.wav", word("hum", label * 100 + place, 1000), 8000)
    wav(root / "_background_noise_" / "hum.wav", word("hum", 1), 8000)
    return root


def test_speech_commands_are_shared_out_by_their_lists(tmp_path: Path) -> None:
    root = _commands(tmp_path)
    names = sorted(path.relative_to(root).as_posix() for path in root.glob("[bc]*/*.wav"))
    (root / "testing_list.txt").write_text("\n".join([*names[:3], *names[40:45]]) + "\n")
    (root / "validation_list.txt").write_text("\n".join(names[3:10]))
    data = _data(COMMANDS, root)
    assert data.classes == ("bed", "cat")
    found: Any = data.splits
    assert [Path(one.path).name for one in found.test.files] == [
        Path(n).name for n in [*names[:3], *names[40:45]]
    ]
    assert len(found.train) == 80 - 8 - 7
    assert "recordings left out because they belong to the validation split: 7 of 80" in data.notes
    assert not any("hum" in one.path for one in [*found.train.files, *found.test.files])


def test_speech_commands_without_lists_keep_speakers_apart(tmp_path: Path) -> None:
    found: Any = _data(COMMANDS, _commands(tmp_path)).splits
    speakers = [{Path(one.path).name for one in part.files} for part in (found.train, found.test)]
    assert not speakers[0] & speakers[1] and all(speakers)
    # The function of the dataset's README, with 10 % each for testing and validation.
    assert which_set("a5d485dc_nohash_0.wav") == which_set("a5d485dc_nohash_4.wav")
    shares = [which_set(f"{i}_nohash_0.wav") for i in range(3000)]
    assert [shares.count(part) / 3000 for part in ("training", "testing", "validation")] == pytest.approx(
        [0.8, 0.1, 0.1], abs=0.02
    )


def test_a_list_of_other_files_is_refused(tmp_path: Path) -> None:
    root = _commands(tmp_path)
    (root / "testing_list.txt").write_text("bed/nobody_nohash_0.wav\n")
    with pytest.raises(
        ConfigError, match=r"testing_list\.txt names files that do not exist: bed/nobody_nohash_0"
    ):
        _data(COMMANDS, root)


def test_resumed_runs_see_the_same_augmented_batches() -> None:
    def opened() -> DataModule:
        return _data(TONES, augment="shift_gain_noise", train_images=12)

    whole = opened()
    epochs = whole.train_dataloader()
    first = [x for x, _ in epochs]
    stopped = opened()
    loader = iter(stopped.train_dataloader())
    next(loader)
    resumed = opened()
    resumed.load_state_dict(stopped.state_dict())
    rest = [x for x, _ in resumed.train_dataloader()]
    assert len(first) == 3 and len(rest) == 2
    assert all(torch.equal(a, b) for a, b in zip(first[1:], rest, strict=True))
    second = [x for x, _ in epochs]
    assert not any(torch.equal(a, b) for a in first for b in second)


def test_augmentation_moves_scales_and_adds_noise() -> None:
    samples = (word("rise", 0) / np.float32(2**15)).astype(np.float32)
    moved = augmented(samples, "shift", random.Random(1), 8000)
    by = random.Random(1).randint(-800, 800)
    core = moved[by : by + len(samples)] if by > 0 else moved[: len(samples) + by]
    np.testing.assert_array_equal(core, samples if by > 0 else samples[-by:])
    gained = augmented(samples, "shift_gain", random.Random(1), 8000)
    decibels = 20 * np.log10(np.abs(gained).max() / np.abs(moved).max())
    assert 0 < abs(decibels) <= 6
    noisy = augmented(samples, "shift_gain_noise", random.Random(1), 8000)
    below = 10 * np.log10(np.mean(samples**2) / np.mean((noisy - gained) ** 2))
    assert 9 < below < 41
    assert augmented(samples, "none", random.Random(1), 8000) is samples


def test_tones_are_the_same_for_a_seed() -> None:
    one, again = _data(TONES), _data(TONES)
    assert torch.equal(one.first_batch(4), again.first_batch(4)) and one.fingerprint == again.fingerprint
    assert one.classes == ("rising", "falling", "steady", "pulsed") and one.test_count == 512


def _damaged(root: Path, content: bytes) -> Path:
    spoken(root, 6)
    (root / "hum_ann_5.wav").write_bytes(content)
    return root


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (riff(np.zeros(3000, np.int16), 8000), "silent"),
        (riff(word("hum", 0, 100), 8000), "100 samples at 8000 Hz, fewer than a frame of 320"),
        (riff(word("hum", 0), 8000)[:500], "cut off after 456 of 6,000 bytes of samples"),
        (b"nothing of the kind", "neither WAV nor FLAC by its first bytes"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _data(DIGITS_SPOKEN, _damaged(tmp_path, content))
    told = f"1 of 6 audio files can't be used: hum_ann_5.wav ({why}); set data.bad=skip to leave them out"
    assert str(caught.value).endswith(told)


def test_files_that_cannot_be_used_are_skipped_on_request(tmp_path: Path) -> None:
    data = _data(DIGITS_SPOKEN, _damaged(tmp_path, b""), bad="skip")
    assert len(data.splits.train) == 5 and any("hum_ann_5.wav (empty)" in note for note in data.notes)


def test_one_class_alone_is_refused(tmp_path: Path) -> None:
    for number in range(8):
        wav(tmp_path / f"yes_ann_{number}.wav", word("hum", number), 8000)
    with pytest.raises(ConfigError, match="at least two classes; all are of the class yes"):
        _data(DIGITS_SPOKEN, tmp_path)


def test_classes_of_one_split_alone_are_refused(tmp_path: Path) -> None:
    spoken(tmp_path, 6)
    (tmp_path / "hum_ann_5.wav").unlink()
    (tmp_path / "hum_bob_5.wav").unlink()
    with pytest.raises(ConfigError, match="the same classes in both splits; only test has hum"):
        _data(DIGITS_SPOKEN, tmp_path)


def test_a_name_without_a_number_is_refused(tmp_path: Path) -> None:
    wav(spoken(tmp_path, 6) / "noise.wav", word("hum", 0), 8000)
    with pytest.raises(ConfigError, match=r"LABEL_SPEAKER_N.wav.*; noise.wav is named differently"):
        _data(DIGITS_SPOKEN, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"seconds": 0.01},
            r"data.seconds=0.01: expected a number from 0.04 \(one window of 320 samples\) to",
        ),
        ({"frame": 9000}, "data.frame=9000: expected a number of samples from 2 to 8192"),
        ({"coefficients": 12}, "data.coefficients=12: expected null with data.features=log_mel"),
        (
            {"features": "mfcc", "mels": 8},
            "data.coefficients=null: expected at most 8, the number of mel bands",
        ),
        ({"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}, "data.mean=.*: expected one number"),
        ({"image_size": 32}, "data.image_size=32: expected null with data.source=qatkit.data.tones.tones"),
        ({"augment": "flip"}, "data.augment=flip: expected one of none, shift"),
        ({"cache": "ram"}, "data.cache=ram: expected none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _data(TONES, **settings)


def test_pictures_and_recordings_are_not_mixed_up() -> None:
    config = DataConfig(workers=0)
    with pytest.raises(
        ConfigError,
        match=r"expected a source of recordings \(data=spoken_digits, data=speech_commands, data=tones\) or of arrays",
    ):
        DataModule(config, _digits(), 0, task=task_of("audio_classification"))
    with pytest.raises(ConfigError, match=r"data.augment=shift: expected one of none, flip"):
        DataModule(DataConfig(workers=0, augment="shift"), _digits(), 0)
    with pytest.raises(
        ConfigError, match=r"data.features=mfcc: expected null with data.source=qatkit.data.digits"
    ):
        DataModule(DataConfig(workers=0, features="mfcc"), _digits(), 0)


def _digits() -> Any:
    from qatkit.data import digits

    return digits
