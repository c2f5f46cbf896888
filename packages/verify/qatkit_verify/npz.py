"""Reads npz files from untrusted sources."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from qatkit_verify.feeds import Array


def read_npz(path: Path) -> dict[str, Array]:
    """Returns the arrays of a file by name. Pickled objects, which could run code, are rejected.

    Raises:
        OSError, ValueError: the file cannot be read, is not an npz file, or contains pickled objects.
    """
    try:
        stored = np.load(path, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it contains a single array and is not an npz file")
        with stored:
            return {name: stored[name] for name in stored.files}
    except (EOFError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
