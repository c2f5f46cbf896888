"""Label maps as targets: they are resized, cropped, padded and mirrored like their pictures.

Each pixel of the result has the class number of the nearest pixel in the map, or `IGNORED` in the padding.
Maps and pictures draw from sources of random numbers in the same state, so both are cut and mirrored in the
same way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.nn import functional as nn_functional

from qatkit.data.preprocessing import Preprocessing
from qatkit.tasks.segmentation import IGNORED
from qatkit_verify.fitting import LEVELS, Fitting, Sides


class LabelMaps:
    """The preparation of label maps, uint8 [1, height, width], that matches the preparation of their pictures.

    Args:
        pictures: the preprocessing of the pictures.
        label_map: a function that returns the map of a target (`CheckedImages.label_map`).
    """

    def __init__(self, pictures: Preprocessing, label_map: Callable[[Any], Tensor]) -> None:
        self._prepared, self._label_map = _Maps.beside(pictures), label_map

    def eval_targets(self, targets: Sequence[Any], pictures: Sequence[Sides]) -> Tensor:
        """Returns the label maps for evaluation, int64 [N, height, width]."""
        return self._prepared.eval_batch(map(self._label_map, targets))[:, 0].long()

    def train_targets(
        self,
        targets: Sequence[Any],
        pictures: Sequence[Sides],
        augment: str,
        draws: Sequence[random.Random],
    ) -> Tensor:
        """Returns the label maps for training, int64 [N, height, width].

        `draws` are in the same state as when the pictures were prepared.
        """
        return self._prepared.train_batch(map(self._label_map, targets), augment, draws)[:, 0].long()


class _Maps(Preprocessing):
    """A preprocessing that resizes by nearest-neighbour interpolation."""

    @classmethod
    def beside(cls, pictures: Preprocessing) -> _Maps:
        """Returns the preprocessing of label maps that matches the preprocessing `pictures`."""
        values = {one.name: getattr(pictures, one.name) for one in fields(Preprocessing)}
        plain = {"mean": (0.0,), "std": (1.0,), "pixels": LEVELS, "order": "rgb", "layout": "nchw"}
        return cls(**values | plain | {"pad_value": float(IGNORED)})

    def _resized(self, array: Tensor, how: Fitting) -> Tensor:
        (top, left), (rows, columns) = how.start, how.kept
        found = nn_functional.interpolate(array, how.scaled, mode="nearest-exact")
        return found[..., top : top + rows, left : left + columns]
