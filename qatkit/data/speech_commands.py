"""Recordings in one folder per class, as in Google Speech Commands (Warden, 2018, https://arxiv.org/abs/1804.03209).

    ROOT/CLASS/SPEAKER_nohash_N.wav      ROOT/testing_list.txt, ROOT/validation_list.txt: lines CLASS/NAME.wav

Files in the testing list verify, files in the validation list are left out, and all others train and
calibrate. Without lists, the rule of the data set's README applies: a hash of the speaker's name puts 10 % of
the speakers into testing and 10 % into validation, so no speaker is in two splits. `_background_noise_` is
not a class.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import COMMANDS
from qatkit.data.image_files import left_out_note, printable
from qatkit.data.recording_files import recording_splits
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import class_folders, files_below
from qatkit_verify.sound_files import SUFFIXES
from qatkit_verify.untrusted import read_text

_NOISE, _LISTS = "_background_noise_", {"testing": "testing_list.txt", "validation": "validation_list.txt"}
_PERCENT, _MOST = 10.0, 2**27 - 1  # constants of the README's function which_set
_SHOWN = 3


def speech_commands(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the recordings in the class folders of `root`.

    Raises:
        ConfigError: the folder does not exist or has no class folders, a list names a missing file, or as for
            `recording_splits`.
    """
    top = data_folder(COMMANDS, root)
    classes = [name for name in class_folders(top) if name != _NOISE]
    files, left_out = dict[str, tuple[str, str]](), list[str]()
    for name in classes:
        found, others = files_below(top / name, lambda one: one.lower().endswith(SUFFIXES), "data.root")
        left_out += others
        files |= {Path(path).relative_to(top).as_posix(): (path, name) for path in found}
    if not files:
        raise ConfigError("data.root", root, f"{FOLDERS[COMMANDS]}; the folder has none")
    splits = _splits(top, list(files))
    parts = {
        part: [one for key, one in files.items() if splits[key] == part] for part in ("training", "testing")
    }
    kept = sum(map(len, parts.values()))
    told = [
        f"recordings left out because they belong to the validation split: {len(files) - kept} of {len(files)}"
    ]
    notes = [*(told if kept < len(files) else []), *left_out_note(left_out)]
    asked = request if request is not None else Request(DataConfig(source=COMMANDS))
    return recording_splits(str(root), parts["training"], parts["testing"], asked, notes)


def _splits(top: Path, keys: list[str]) -> dict[str, str]:
    """Returns the split of each file, from the lists or from the hash of its speaker.

    Raises:
        ConfigError: a list names a file that does not exist.
    """
    listed = {part: top / name for part, name in _LISTS.items() if (top / name).is_file()}
    if not listed:
        return {key: which_set(Path(key).name) for key in keys}
    found = dict.fromkeys(keys, "training")
    for part, path in listed.items():
        lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
        missing = [line for line in lines if line not in found]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            told = f"{path.name} names files that do not exist: {', '.join(missing[:_SHOWN])}{more}"
            raise ConfigError("data.root", str(top), reason=printable(told))
        found |= dict.fromkeys(lines, part)
    return found


def which_set(name: str) -> str:
    """Returns the split of a file, computed from its speaker as in the README of Speech Commands."""
    speaker = re.sub(r"_nohash_.*$", "", name)
    digest = int(hashlib.sha1(speaker.encode(), usedforsecurity=False).hexdigest(), 16)
    percent = (digest % (_MOST + 1)) * (100.0 / _MOST)
    if percent < _PERCENT:
        return "validation"
    return "testing" if percent < 2 * _PERCENT else "training"
