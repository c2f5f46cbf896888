"""Accuracy on a folder of pictures on this machine, compared with the report's accuracy on the test images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qatkit_verify.bundle.manifest import LABELS_FILE, PREPROCESS_FILE
from qatkit_verify.checks.base import OK, OPEN, SHORT, CheckInputs, Found
from qatkit_verify.classification import TOP1, decision
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import open_picture, picture_files
from qatkit_verify.preprocess import Preprocess
from qatkit_verify.session import in_its_batches, open_session
from qatkit_verify.untrusted import read_json, read_text

_BATCH = 32


def pictures(asked: CheckInputs) -> Found:
    """The pictures of `asked.pictures`, in a folder a class (named as in labels.txt).

    Raises:
        ConfigError: no such folder, no class folders, one that labels.txt does not have, or a picture that can't be
            opened.
    """
    assert asked.pictures is not None
    if not (asked.folder / PREPROCESS_FILE).is_file():
        allowed = "no folder for this bundle, whose model takes arrays and no pictures"
        raise ConfigError("pictures", asked.pictures, allowed)
    how = read_json(asked.folder / PREPROCESS_FILE)
    if isinstance(how, dict) and "features" in how:
        raise ConfigError(
            "pictures", asked.pictures, "no folder for this bundle, whose model takes recordings"
        )
    labels = (
        read_text(asked.folder / LABELS_FILE).splitlines() if (asked.folder / LABELS_FILE).is_file() else []
    )
    files = _labelled(asked.pictures, labels)
    prepare = Preprocess.from_dict(how)
    session = open_session(asked.int8, threads=asked.threads, options=asked.options)
    (port,) = session.get_inputs()
    right = 0
    for batch in _batches(files):
        tensor = prepare.batch([open_picture(path, upright=prepare.upright) for path, _ in batch])
        (scores, *_) = in_its_batches(
            lambda given: session.run(None, dict(given)), {port.name: tensor}, asked.batch or 1
        )
        right += int((decision(np.asarray(scores)) == [label for _, label in batch]).sum())
    return _judged(asked, right, len(files))


def _judged(asked: CheckInputs, right: int, images: int) -> Found:
    found = TOP1.of(100 * right / images)
    assert found.value is not None
    seen = f"{found.name} {found.value:.2f} on {images:,} pictures"
    figures = {found.key: found.value, "images": images}
    told = ((asked.report.get("accuracy") or {}).get("int8") or {}).get(found.key)
    if told is None:
        return Found("pictures", OPEN, f"{seen}; the report has no accuracy to compare with", figures=figures)
    noise = 200 * math.sqrt(max(right * (images - right), 1) / images**3)  # two standard errors, in points
    seen += f"; the report says {told:.2f}"
    if found.value >= told - asked.max_drop - noise:
        return Found("pictures", OK, seen, figures=figures)
    fix = (
        "other pictures than those that it was trained for, or folders that are no classes; where the answers above "
        f"are as they were, the file is the same (--max-drop is {asked.max_drop:g} points)"
    )
    return Found("pictures", SHORT, seen, fix, figures)


def _labelled(root: Path, labels: list[str]) -> list[tuple[Path, int]]:
    if not root.is_dir():
        raise ConfigError("pictures", root, "a folder with a folder of pictures for each class")
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    numbers = {name: number for number, name in enumerate(labels)}
    if not folders:
        raise ConfigError("pictures", root, f"a folder for each class, such as {', '.join(labels[:3])}")
    for folder in folders:
        if folder.name not in numbers:
            raise ConfigError(
                "pictures", folder, f"folders named as in {LABELS_FILE}, such as {', '.join(labels[:3])}"
            )
    found = [(path, numbers[folder.name]) for folder in folders for path in picture_files(folder)]
    if not found:
        raise ConfigError("pictures", root, "at least one picture")
    return found


def _batches(files: list[tuple[Path, int]]) -> Iterator[list[tuple[Path, int]]]:
    return (files[start : start + _BATCH] for start in range(0, len(files), _BATCH))
