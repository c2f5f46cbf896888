"""Folders of pictures without class folders; every other picture is used for verification.

    one_picture_each   DIR/*.jpg  ─ sorted by name: the labels ─>   0 1 2 3 4 5 ...   even ones train and calibrate
    pictures           DIR/**/*   ─ sorted by path, unlabelled ─>   0 1 2 3 4 5 ...   even ones calibrate

ImageNet's sample images are published as one picture per class, so every class is in only one of the two splits. The
accuracy of a trained model on the odd pictures is meaningful, but a classifier cannot learn from the labels of the even
ones. Fine-tuning therefore uses distillation (`schedule.distill=1`), as for pictures without labels. For
pictures without labels, every target is `NO_LABEL` and `Splits.classes` is empty. Pictures may have any size
and any mode that Pillow reads. Only those without labels are turned upright by their EXIF data.
"""

from __future__ import annotations

import os

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.data.image_files import ImageFiles, left_out_note
from qatkit.data.sources import NO_LABEL, Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import files_below, is_litter

_ONE_EACH, _BELOW = "qatkit.data.one_picture_each", "qatkit.data.pictures"
_SUFFIXES = (".jpg", ".jpeg", ".png")


def one_picture_each(root: str | None, download: bool, seed: int) -> Splits:
    """Returns the pictures of `root`; the label of each is its position among the sorted file names.

    ImageNet's sample images (`n01440764_tench.jpg` to `n15075141_toilet_tissue.jpg`) therefore have
    ImageNet's labels.

    Raises:
        ConfigError: the folder does not exist or has fewer than two pictures.
    """
    paths = sorted(path for path in data_folder(_ONE_EACH, root).iterdir()
                   if path.suffix.lower() in _SUFFIXES and not is_litter(path.name))  # fmt: skip
    if len(paths) < 2:
        raise ConfigError("data.root", root, f"{FOLDERS[_ONE_EACH]}; it has {len(paths)}")
    samples = [(str(path), label) for label, path in enumerate(paths)]
    names = tuple(path.stem for path in paths)
    return Splits(ImageFiles(samples[::2]), ImageFiles(samples[1::2]), names)


def pictures(root: str | None, download: bool, seed: int) -> Splits:
    """Returns the files in `root` and the folders below it as unlabelled pictures, without hidden ones.

    The split depends only on the sorted paths, not on which files can be read.

    Raises:
        ConfigError: the folder does not exist or has fewer than two files.
    """
    found, left_out = files_below(data_folder(_BELOW, root), lambda name: True, "data.root")
    if len(found) < 2:
        raise ConfigError("data.root", root, f"{FOLDERS[_BELOW]}; it has {len(found)}")
    samples = [(path, NO_LABEL) for path in sorted(found, key=lambda path: path.split(os.sep))]
    train, test = (ImageFiles(samples[first::2], upright=True) for first in (0, 1))
    return Splits(train, test, classes=(), notes=left_out_note(left_out))
