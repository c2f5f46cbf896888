"""A flat folder with one picture of each class, as ImageNet's sample images are published.

    DIR/*.jpg  ─ sorted by name: the labels ─>  0 1 2 3 4 5 ...   even ones train and calibrate, odd ones test

So every class is in one of the two splits only: top-1 on the odd ones is a true figure of a trained model, but a
classifier can't be trained on the even ones from labels; fine-tuning is by distillation (`schedule.distill=1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from qatkit.data.sources import Splits, read_image
from qatkit.errors import ConfigError

_LAYOUT = "a folder with one picture a class (jpg or png), at least two"
_SUFFIXES = (".jpg", ".jpeg", ".png")


class LabelledPictures:
    """Pictures by their paths, each with its label.

    Attributes:
        targets: the label of each.
    """

    def __init__(self, samples: Sequence[tuple[Path, int]]) -> None:
        self.samples = list(samples)
        self.targets = [label for _, label in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return read_image(str(path)), label


def one_picture_each(root: str | None, download: bool, seed: int) -> Splits:
    """The pictures of `root`, whose places among the sorted file names are their labels.

    ImageNet's sample images (`n01440764_tench.jpg` to `n15075141_toilet_tissue.jpg`) so have ImageNet's labels.

    Raises:
        ConfigError: no such folder, or fewer than two pictures in it.
    """
    if root is None or not Path(root).is_dir():
        raise ConfigError("data.root", root, f"{_LAYOUT}; there is no such folder")
    paths = sorted(path for path in Path(root).iterdir() if path.suffix.lower() in _SUFFIXES)
    if len(paths) < 2:
        raise ConfigError("data.root", root, f"{_LAYOUT}; it has {len(paths)}")
    samples = [(path, label) for label, path in enumerate(paths)]
    names = tuple(path.stem for path in paths)
    return Splits(LabelledPictures(samples[::2]), LabelledPictures(samples[1::2]), names)
