"""The task of scoring pairs of texts by the cosine of their embeddings, against human ratings.

    texts of N pairs [2 N, T] ── model ──> embeddings [2 N, D] ── cosine of each pair [N] ── ranks ──> Spearman

Rows 2 i and 2 i + 1 are a pair. The target of a pair is its score; a larger score means more similar texts.
The model reads single texts (a bi-encoder). A model that reads both texts at once and returns a class belongs
to `text_classification`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qatkit.tasks.influence import ByInfluence
from qatkit.tasks.vectors import ALIKE, Vectors, units
from qatkit_verify.records import Metric, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array

_FEWEST = 3  # minimum number of pairs for a rank correlation


class TextPairs(ByInfluence, Vectors):
    """Sentence similarity with Spearman's rank correlation times 100.

    Two models agree on a text if the cosine between their embeddings is at least 0.99.
    """

    names = TaskNames(
        "text_pairs",
        "sentence similarity",
        (Metric("Spearman"),),
        decision=f"embeddings (cosine of at least {ALIKE})",
        outputs="embeddings",
        samples="pairs",
    )

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns the mean squared error between cosines and scores."""
        return (_torch_cosines(output) - targets.to(output.device)).square().mean()

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the rank correlation within a batch times its number of pairs, in percent.

        The figure of an epoch is therefore the mean over pairs.
        """
        import torch

        found = spearman(_torch_cosines(output).cpu().numpy(), targets.cpu().numpy())
        return torch.tensor(100 * found * len(targets), dtype=torch.float64, device=output.device)

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the cosine and the score of each pair, [N, 2]."""
        import numpy as np

        return np.stack([cosines(outputs), np.asarray(targets, np.float64)], 1)

    def mean(self, values: Array) -> float:
        return 100 * spearman(values[:, 0], values[:, 1])

    def influence(self, values: Array) -> Array:
        """Returns N times the influence of each of the N pairs on the rank correlation, [N].

        Source: the influence function of a correlation, here applied to ranks, in Devlin, Gnanadesikan and
        Kettenring, "Robust estimation and outlier detection with correlation coefficients", 1975.
        """
        a, b = _standardized(values[:, 0]), _standardized(values[:, 1])
        found: Array = a * b - (a * b).mean() / 2 * (a**2 + b**2)
        return found

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return True

    def target(self, value: Any) -> float:
        found = float(value)
        if not math.isfinite(found):
            raise ValueError("targets must be finite scores")
        return found

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        same = f"scores of {part} must differ, but all are {targets[0]:g}"
        return "" if len(set(targets)) > 1 else same

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) == 2 and shape[0] == 2 * images

    def shape_text(self, width: int | None) -> str:
        return "[2 N, values] for N pairs"


def cosines(outputs: Array) -> Array:
    """Returns the cosine of each pair of rows, float64 [N], from embeddings [2 N, D]."""
    rows = units(outputs)
    found: Array = (rows[::2] * rows[1::2]).sum(1)
    return found


def spearman(first: Array, second: Array) -> float:
    """Returns the rank correlation of two sequences, with mean ranks for ties.

    It is 0 for fewer than three values, or if one of the sequences is constant.
    """
    if len(first) < _FEWEST:
        return 0.0
    a, b = _standardized(first), _standardized(second)
    return float((a * b).mean())


def _standardized(values: Array) -> Array:
    """Returns the ranks of the values, shifted and scaled to mean 0 and standard deviation 1; 0 if all are equal."""
    from scipy.stats import rankdata

    ranks = rankdata(values)
    spread = ranks.std()
    found: Array = (ranks - ranks.mean()) / (spread or 1.0)
    return found


def _torch_cosines(output: Tensor) -> Tensor:
    from torch.nn import functional as F

    return F.cosine_similarity(output[::2].float(), output[1::2].float())
