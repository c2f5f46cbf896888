"""A flat folder with one picture of each class, as ImageNet's sample images are published.

    DIR/*.jpg  ─ sorted by name: the labels ─>  0 1 2 3 4 5 ...   even ones train and calibrate, odd ones test

So every class is in one of the two splits only: accuracy on the odd ones is a true figure of a trained model, but a
classifier can't be trained on the even ones from labels; fine-tuning is by distillation (`schedule.distill=1`).
"""

from __future__ import annotations

from pathlib import Path

from qatkit.data.image_files import ImageFiles
from qatkit.data.sources import Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import is_litter

_LAYOUT = "a folder with one picture a class (jpg or png), at least two"
_SUFFIXES = (".jpg", ".jpeg", ".png")


def one_picture_each(root: str | None, download: bool, seed: int) -> Splits:
    """The pictures of `root`, whose places among the sorted file names are their labels.

    ImageNet's sample images (`n01440764_tench.jpg` to `n15075141_toilet_tissue.jpg`) so have ImageNet's labels.

    Raises:
        ConfigError: no such folder, or fewer than two pictures in it.
    """
    if root is None or not Path(root).is_dir():
        raise ConfigError("data.root", root, f"{_LAYOUT}; there is no such folder")
    paths = sorted(path for path in Path(root).iterdir()
                   if path.suffix.lower() in _SUFFIXES and not is_litter(path.name))  # fmt: skip
    if len(paths) < 2:
        raise ConfigError("data.root", root, f"{_LAYOUT}; it has {len(paths)}")
    samples = [(str(path), label) for label, path in enumerate(paths)]
    names = tuple(path.stem for path in paths)
    return Splits(ImageFiles(samples[::2]), ImageFiles(samples[1::2]), names)
