"""Recordings of one folder, named LABEL_SPEAKER_N.wav, as the Free Spoken Digit Dataset has them.

Its README's split: recordings with N from 0 to 4 of each speaker and label verify, the others train and calibrate.
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
    """Returns the recordings of a folder, or of the folder `recordings` in it.

    Raises:
        ConfigError: no such folder, other names, none in a split, or as `recording_splits`.
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
            allowed = f"{FOLDERS[DIGITS_SPOKEN]}; {printable(path.name)} has another name"
            raise ConfigError("data.root", root, allowed)
        parts[int(name["number"]) in _TEST].append((str(path), name["label"]))
    for is_test, found in parts.items():
        if not found:
            numbers = f"N from {_TEST[0]} to {_TEST[-1]}" if is_test else f"N of {_TEST[-1] + 1} or more"
            raise ConfigError("data.root", root, f"{FOLDERS[DIGITS_SPOKEN]}; there is none with {numbers}")
    asked = request if request is not None else Request(DataConfig(source=DIGITS_SPOKEN))
    return recording_splits(str(Path(str(root))), parts[False], parts[True], asked, left_out_note(left_out))
