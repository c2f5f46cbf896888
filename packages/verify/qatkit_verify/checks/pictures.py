"""Measures top-1 on a folder of pictures or recordings, and compares it with the report's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from qatkit_verify.bundle.manifest import LABELS_FILE, PREPROCESS_FILE
from qatkit_verify.checks.base import OK, OPEN, SHORT, CheckInputs, Found
from qatkit_verify.classification import TOP1, decision
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.feeds import Array
from qatkit_verify.pictures import files_below, open_picture, picture_files
from qatkit_verify.preprocess import Preprocess
from qatkit_verify.session import in_its_batches, open_session
from qatkit_verify.sound import SoundPreprocess
from qatkit_verify.sound_files import SUFFIXES, Samples, read_sound
from qatkit_verify.untrusted import read_json, read_text

_BATCH = 32


def pictures(asked: CheckInputs) -> Found:
    """Measures top-1 on the pictures in `asked.pictures`: one folder per class, named as in labels.txt.

    Raises:
        ConfigError: the folder or its class folders do not exist, labels.txt lacks a class, a picture cannot
            be opened, or the bundle's model has no pictures as inputs.
    """
    assert asked.pictures is not None
    if not (asked.folder / PREPROCESS_FILE).is_file():
        reason = "the model of this bundle has no pictures as inputs; leave out --pictures"
        raise ConfigError("pictures", asked.pictures, reason=reason)
    how = read_json(asked.folder / PREPROCESS_FILE)
    if isinstance(how, dict) and "features" in how:
        reason = "the model of this bundle needs recordings, not pictures; use --recordings"
        raise ConfigError("pictures", asked.pictures, reason=reason)
    files = _labelled(asked, "pictures", asked.pictures, picture_files)
    prepare = Preprocess.from_dict(how)
    return _judged(
        asked, "pictures", files, lambda path: prepare(open_picture(path, upright=prepare.upright))
    )


def recordings(asked: CheckInputs) -> Found:
    """Measures top-1 on the WAV and FLAC files in `asked.recordings`: one folder per class, named as in labels.txt.

    Raises:
        ConfigError: as in `pictures`, or a file has another sampling rate.
    """
    assert asked.recordings is not None
    path = asked.folder / PREPROCESS_FILE
    how = read_json(path) if path.is_file() else None
    if not isinstance(how, dict) or "features" not in how:
        reason = "the model of this bundle has no recordings as inputs; leave out --recordings"
        raise ConfigError("recordings", asked.recordings, reason=reason)
    prepare = SoundPreprocess.from_dict(how)
    files = _labelled(asked, "recordings", asked.recordings, _sound_files)
    return _judged(asked, "recordings", files, lambda path: prepare(_samples(path, prepare.rate)))


def _sound_files(folder: Path) -> list[Path]:
    return [
        Path(one)
        for one in files_below(folder, lambda name: name.lower().endswith(SUFFIXES), "recordings")[0]
    ]


def _samples(path: Path, rate: int) -> Samples:
    try:
        sound = read_sound(str(path))
    except (OSError, ValueError, ImportError) as error:
        reason = f"the file is not a readable WAV or FLAC file ({first_line(error)})"
        raise ConfigError("recordings", path, reason=reason) from error
    if sound.rate != rate:
        told = f"the recording has {sound.rate} Hz, but the model of this bundle needs {rate} Hz"
        reason = f"{told}; resample the recording"
        raise ConfigError("recordings", path, reason=reason)
    return sound.samples


def _judged(
    asked: CheckInputs, kind: str, files: Sequence[tuple[Path, int]], tensor: Callable[[Path], Array]
) -> Found:
    """Classifies all files, which `tensor` preprocesses, and compares the accuracy with the report's."""
    session = open_session(asked.int8, threads=asked.threads, options=asked.options)
    (port,) = session.get_inputs()
    right, images = 0, len(files)
    for batch in _batches(files):
        given = {port.name: np.concatenate([tensor(path) for path, _ in batch])}
        (scores, *_) = in_its_batches(lambda part: session.run(None, dict(part)), given, asked.batch or 1)
        right += int((decision(np.asarray(scores)) == [label for _, label in batch]).sum())
    return _compared(asked, kind, right, images)


def _compared(asked: CheckInputs, kind: str, right: int, images: int) -> Found:
    found = TOP1.of(100 * right / images)
    assert found.value is not None
    seen = f"{found.name} {found.text} on {images:,} {kind}"
    figures = {found.key: found.value, "images": images}
    told = ((asked.report.get("accuracy") or {}).get("int8") or {}).get(found.key)
    if told is None:
        return Found(kind, OPEN, f"{seen}; the report has no accuracy for comparison", figures=figures)
    noise = 200 * math.sqrt(max(right * (images - right), 1) / images**3)  # two standard errors, in points
    seen += f"; the report has {found.of(told).text}"
    if found.value >= told - asked.max_drop - noise:
        return Found(kind, OK, seen, figures=figures)
    fix = (
        f"check that the {kind} resemble the training data and that each folder contains its own class (if the "
        f"answers above match, the file itself is unchanged), or raise --max-drop (now {asked.max_drop:g})"
    )
    return Found(kind, SHORT, seen, fix, figures)


def _labelled(
    asked: CheckInputs, kind: str, root: Path, files_of: Callable[[Path], list[Path]]
) -> list[tuple[Path, int]]:
    """Returns the files in the class folders, with their labels."""
    known = asked.folder / LABELS_FILE
    labels = read_text(known).splitlines() if known.is_file() else []
    if not root.is_dir():
        raise ConfigError(kind, root, f"a folder that contains one folder of {kind} per class")
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    numbers = {name: number for number, name in enumerate(labels)}
    if not labels:
        reason = f"the bundle has no {LABELS_FILE} that names the classes; leave out --{kind}"
        raise ConfigError(kind, root, reason=reason)
    if not folders:
        raise ConfigError(kind, root, f"a folder with one folder per class, such as {', '.join(labels[:3])}")
    for folder in folders:
        if folder.name not in numbers:
            raise ConfigError(
                kind, folder, f"folders named as in {LABELS_FILE}, such as {', '.join(labels[:3])}"
            )
    found = [(path, numbers[folder.name]) for folder in folders for path in files_of(folder)]
    if not found:
        raise ConfigError(kind, root, f"at least one {kind[:-1]}")
    return found


def _batches(files: Sequence[tuple[Path, int]]) -> Iterator[Sequence[tuple[Path, int]]]:
    return (files[start : start + _BATCH] for start in range(0, len(files), _BATCH))
