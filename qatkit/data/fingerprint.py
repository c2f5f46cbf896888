"""Digests that distinguish items, and whole datasets, from others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torchvision.datasets import DatasetFolder

from qatkit.data.checked import CheckedImages
from qatkit.data.image_files import ImageFiles
from qatkit_verify.pictures import open_regular_file


def fingerprint(classes: Sequence[str], labels: Sequence[Any], contents: Sequence[str]) -> str:
    """Returns hex digits for a dataset of these classes, labels and contents."""
    return hashlib.sha256(repr((classes, labels, contents)).encode()).hexdigest()[:16]


def digest(images: CheckedImages, index: int) -> str:
    """Returns hex digits for an item: of the file's bytes where items are files of a folder, else of its values."""
    files = images.dataset
    if isinstance(files, DatasetFolder | ImageFiles):
        with open_regular_file(files.samples[index][0]) as stream:
            content = stream.read()
    else:
        item = images[index][0]
        content = images.arrays.content(item) if images.arrays else np.asarray(item).tobytes()
    return hashlib.sha256(content).hexdigest()
