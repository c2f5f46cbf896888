"""Sentences as vectors: the cosine of two sentences' embeddings against how related people find them.

    sentences of N pairs [2 N, T] ── model ──> embeddings [2 N, D] ── cosine of each pair [N] ── ranks ──> Spearman

Rows 2 i and 2 i + 1 are a pair, whose target is its score; larger is more alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Meter
from qatkit.tasks.influence import ByInfluence
from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array
    from qatkit_verify.compare import Alike

_FEWEST = 3  # pairs whose ranks say anything
_ALIKE = 0.99  # cosine from which two models' embeddings of a sentence count as the same


class TextEmbedding(ByInfluence):
    """Spearman's rank correlation, times 100 as benchmarks of embeddings give it; agreement by the cosine to float."""

    names = TaskNames(
        "text_embedding",
        "sentence similarity",
        (Metric("Spearman"),),
        decision=f"embeddings (cosine {_ALIKE})",
        outputs="embeddings",
        samples="pairs",
    )

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns the mean squared error of the cosines, which are to be the scores."""
        return (_torch_cosines(output) - targets.to(output.device)).square().mean()

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the rank correlation within a batch, times its pairs: an epoch's figure is their mean."""
        import torch

        found = spearman(_torch_cosines(output).cpu().numpy(), targets.cpu().numpy())
        return torch.tensor(100 * found * len(targets), dtype=torch.float64, device=output.device)

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the cosine and the score of each pair, [N, 2]."""
        import numpy as np

        return np.stack([cosines(outputs), np.asarray(targets, np.float64)], 1)

    def mean(self, values: Array) -> float:
        return 100 * spearman(values[:, 0], values[:, 1])

    def meter(self) -> Meter:
        return _Meter(self)

    def influence(self, values: Array) -> Array:
        """Returns the influence of each pair on the rank correlation, times the number of pairs.

        Source: the influence function of a correlation, of ranks: Devlin, Gnanadesikan and Kettenring, "Robust
        estimation and outlier detection with correlation coefficients", 1975.
        """
        a, b = _standardized(values[:, 0]), _standardized(values[:, 1])
        found: Array = a * b - (a * b).mean() / 2 * (a**2 + b**2)
        return found

    def decision(self, outputs: Array) -> Array:
        """Returns the signs of the embeddings: all that a binary index keeps of them."""
        positive: Array = outputs > 0
        return positive

    def agree(self, exact: Array, found: Array) -> Array:
        import numpy as np

        same: Array = (_unit(exact) * _unit(found)).sum(1) >= np.float64(_ALIKE)
        return same

    @property
    def rule(self) -> Alike:
        """The rule of the cosine, since embeddings decide nothing by themselves."""
        from qatkit_verify.compare import Alike

        return Alike(self.agree)

    def power(self, outputs: Array) -> float:
        return float((outputs.astype("float64") ** 2).mean())

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return True

    def target(self, value: Any) -> float:
        found = float(value)
        if not math.isfinite(found):
            raise ValueError("targets must be finite scores")
        return found

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        return (
            "" if len(set(targets)) > 1 else f"scores of {part} must not all be the same, got {targets[0]:g}"
        )

    def width_of(self, shape: Sequence[int]) -> int | None:
        return None  # the model knows

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) == 2 and shape[0] == 2 * images

    def shape_text(self, width: int | None) -> str:
        return "[2 N, values], of N pairs"


def cosines(outputs: Array) -> Array:
    """Returns the cosine of each pair of rows, float64 [N], of embeddings [2 N, D]."""
    units = _unit(outputs)
    found: Array = (units[::2] * units[1::2]).sum(1)
    return found


def spearman(first: Array, second: Array) -> float:
    """Returns the rank correlation of two sequences, ties by their mean rank; 0 where one of them does not vary."""
    if len(first) < _FEWEST:
        return 0.0
    a, b = _standardized(first), _standardized(second)
    return float((a * b).mean())


def _standardized(values: Array) -> Array:
    """Ranks less their mean, over their standard deviation."""
    from scipy.stats import rankdata

    ranks = rankdata(values)
    spread = ranks.std()
    found: Array = (ranks - ranks.mean()) / (spread or 1.0)
    return found


def _unit(outputs: Array) -> Array:
    import numpy as np

    rows = np.asarray(outputs, np.float64)
    found: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return found


def _torch_cosines(output: Tensor) -> Tensor:
    from torch.nn import functional as F

    return F.cosine_similarity(output[::2].float(), output[1::2].float())


class _Meter:
    """The rank correlation of all pairs.

    Attributes:
        images: pairs seen so far.
    """

    def __init__(self, task: TextEmbedding) -> None:
        self.images, self._task = 0, task
        self._values: list[Array] = []

    def add(self, outputs: Array, targets: Any) -> None:
        """Takes one batch: embeddings [2 N, D] and scores [N]."""
        self._values.append(self._task.values(outputs, targets))
        self.images += len(self._values[-1])

    def result(self) -> Scores:
        """Returns the scores of at least one pair."""
        import numpy as np

        main = self._task.names.main
        return Scores((main.of(self._task.mean(np.concatenate(self._values))),), self.images)
