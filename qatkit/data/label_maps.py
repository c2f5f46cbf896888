"""Maps of labels as targets, which are resized, cropped, filled and mirrored like their pictures.

A pixel of the result has the number of the nearest pixel; padding counts as ignored. Random numbers come from sources
in the same state as those of the pictures, so both are cut and mirrored at the same places.
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
    """The preparation of maps of labels, uint8 [1, height, width], together with their pictures.

    Args:
        pictures: the preparation of the pictures.
        label_map: returns the map of a target (`CheckedImages.label_map`).
    """

    def __init__(self, pictures: Preprocessing, label_map: Callable[[Any], Tensor]) -> None:
        self._prepared, self._label_map = _Maps.beside(pictures), label_map

    def eval_targets(self, targets: Sequence[Any], pictures: Sequence[Sides]) -> Tensor:
        """Returns the label maps, preprocessed as for evaluation, int64 [N, height, width]."""
        return self._prepared.eval_batch(map(self._label_map, targets))[:, 0].long()

    def train_targets(
        self,
        targets: Sequence[Any],
        pictures: Sequence[Sides],
        augment: str,
        draws: Sequence[random.Random],
    ) -> Tensor:
        """Returns maps as in training, int64 [N, height, width]; `draws` are in the state of the pictures' draws."""
        return self._prepared.train_batch(map(self._label_map, targets), augment, draws)[:, 0].long()


class _Maps(Preprocessing):
    """The preprocessing of label maps, which resizes them by nearest neighbour."""

    @classmethod
    def beside(cls, pictures: Preprocessing) -> _Maps:
        """Returns the preprocessing of label maps that matches that of their pictures."""
        values = {one.name: getattr(pictures, one.name) for one in fields(Preprocessing)}
        plain = {"mean": (0.0,), "std": (1.0,), "pixels": LEVELS, "order": "rgb", "layout": "nchw"}
        return cls(**values | plain | {"pad_value": float(IGNORED)})

    def _resized(self, array: Tensor, how: Fitting) -> Tensor:
        (top, left), (rows, columns) = how.start, how.kept
        found = nn_functional.interpolate(array, how.scaled, mode="nearest-exact")
        return found[..., top : top + rows, left : left + columns]
