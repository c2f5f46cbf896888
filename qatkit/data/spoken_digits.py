"""Recordings in one folder, named LABEL_SPEAKER_N.wav, as in the Free Spoken Digit Dataset.

The split follows its README: for each speaker and label, recordings with N from 0 to 4 verify, and the others
train and calibrate.
"""

from __future__ import annotations

import re
from pathlib import Path

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import DIGITS_SPOKEN
from qatkit.data.image_files import left_out_note, printable
from qatkit.data.recording_files import recording_splits
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import is_litter
from qatkit_verify.sound_files import SUFFIXES

_NAME = re.compile(r"(?P<label>.+)_(?P<speaker>[^_]+)_(?P<number>\d+)\.[^.]+")
_TEST = range(5)


def spoken_digits(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the recordings in a folder, or in its subfolder `recordings`.

    Raises:
        ConfigError: the folder does not exist, a file is named differently, a split is empty, or as for
            `recording_splits`.
    """
    top = data_folder(DIGITS_SPOKEN, root)
    folder = top / "recordings" if (top / "recordings").is_dir() else top
    parts: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    left_out = list[str]()
    for path in sorted(folder.iterdir()):
        if is_litter(path.name) or not path.name.lower().endswith(SUFFIXES):
            left_out.append(str(path))
            continue
        name = _NAME.fullmatch(path.name)
        if name is None:
            allowed = f"{FOLDERS[DIGITS_SPOKEN]}; {printable(path.name)} is named differently"
            raise ConfigError("data.root", root, allowed)
        parts[int(name["number"]) in _TEST].append((str(path), name["label"]))
    for is_test, found in parts.items():
        if not found:
            numbers = f"N from {_TEST[0]} to {_TEST[-1]}" if is_test else f"N of at least {_TEST[-1] + 1}"
            raise ConfigError("data.root", root, f"{FOLDERS[DIGITS_SPOKEN]}; no recording has {numbers}")
    asked = request if request is not None else Request(DataConfig(source=DIGITS_SPOKEN))
    return recording_splits(str(Path(str(root))), parts[False], parts[True], asked, left_out_note(left_out))
