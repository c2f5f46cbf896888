"""Digests that identify items and whole datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from torchvision.datasets import DatasetFolder

from qatkit.data.checked import CheckedImages
from qatkit.data.image_files import ImageFiles
from qatkit.data.loading import seeded_permutation
from qatkit_verify.pictures import open_regular_file

_FEW = 16  # items whose contents are read to recognize a dataset


def fingerprint(
    images: CheckedImages, chosen: Sequence[int], classes: Sequence[str], ends: Mapping[int, str], seed: int
) -> str:
    """Returns hex digits that identify a dataset by its classes, labels and contents.

    Contents are represented by `ends`. If that is empty, the contents of a few items are used, unless the
    source returns different contents at every call.

    Args:
        images: the dataset.
        chosen: the indices of the items that the fingerprint covers.
        classes: names of the labels.
        ends: digests of the size, the first and the last bytes of each file, by index (`Survey.ends`); empty
            if items are not files.
        seed: seed of the choice of the few items.
    """
    if ends:
        contents = [ends[index] for index in chosen]
    else:
        few = [chosen[position] for position in seeded_permutation(len(chosen), "fingerprint", seed)[:_FEW]]
        contents, again = ([digest(images, index) for index in few] for _ in range(2))
        contents = contents if contents == again else []
    labels = [images.targets[index] for index in chosen]
    return hashlib.sha256(repr((classes, labels, contents)).encode()).hexdigest()[:16]


def digest(images: CheckedImages, index: int) -> str:
    """Returns the digest of an item's file as hex digits; without a file, the digest of its values."""
    files = images.dataset
    if isinstance(files, DatasetFolder | ImageFiles):
        with open_regular_file(files.samples[index][0]) as stream:
            content = stream.read()
    else:
        item = images[index][0]
        content = images.arrays.content(item) if images.arrays else np.asarray(item).tobytes()
    return hashlib.sha256(content).hexdigest()
