"""The task of embedding labelled samples: the nearest other sample by cosine should have the same class.

    test samples ── model ──> vectors [N, D] ── nearest other sample by cosine ──> recall@1

The loss needs no head and no parameters. It is computed from a softmax over the cosines to the other samples
of the batch, which should select samples of the same class. A batch in which no class occurs twice has a loss
of 0; with such data, fine-tuning can only learn from the float model (`schedule.distill`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Agreement
from qatkit.tasks.classification import Classification
from qatkit.tasks.vectors import ALIKE, Vectors, units
from qatkit_verify.records import Metric, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array

_TEMPERATURE = 0.1  # temperature of the softmax over cosines in the loss
_ROWS = 1024  # number of samples whose cosines to all others are in memory at a time


class Embedding(Vectors, Classification):
    """Embedding with recall@1 among the other test samples.

    Two models agree on a sample if its nearest neighbour is the same.
    """

    names = TaskNames(
        "embedding",
        "image feature extraction",
        (Metric("recall@1"),),
        decision="nearest neighbour",
        outputs="embeddings",
        compared=f"embeddings (cosine {ALIKE})",
        samples="samples",
    )

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns the negative log-probability that a neighbour drawn by the softmax of cosines has the same class.

        It is averaged over the samples with another sample of their class in the batch.

        Source: Goldberger et al., "Neighbourhood components analysis", 2004. The cosines and the temperature
        are from Wu et al., "Improving generalization via scalable neighborhood component analysis", 2018.
        """
        import torch
        from torch.nn import functional as F

        rows, labels = F.normalize(output.float(), dim=1), targets.to(output.device)
        itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        logits = (rows @ rows.T / _TEMPERATURE).masked_fill(itself, -torch.inf)
        same = (labels[:, None] == labels[None]) & ~itself
        counted = same.any(1)
        if not counted.any():
            return 0 * output.float().sum()
        wanted = logits.masked_fill(~same, -torch.inf)[counted].logsumexp(1)
        return (logits[counted].logsumexp(1) - wanted).mean()

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns 1 minus the cosine to the teacher's vector, averaged over the samples."""
        from torch.nn import functional as F

        return (1 - F.cosine_similarity(output.float(), teacher.float())).mean()

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the number of samples whose nearest other sample in the batch has the same class."""
        import torch

        found = _hits(self.values(output.float().cpu().numpy(), targets.cpu().numpy()))
        return torch.tensor(float(found.sum()), dtype=torch.float64, device=output.device)

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns each sample's vector, scaled to length 1, followed by its class, [N, D + 1]."""
        import numpy as np

        return np.concatenate([units(outputs), np.asarray(targets, np.float64)[:, None]], 1)

    def mean(self, values: Array) -> float:
        return super().mean(_hits(values))

    def noise(self, first: Array, second: Array) -> float:
        return super().noise(_hits(first), _hits(second))

    def spread(self, score: float, images: int, values: Array | None) -> float:
        return super().spread(score, images, None)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        return super().worse(_hits(first), _hits(second), sure)

    def agreement(self) -> Agreement:
        return _SameNeighbour()

    def divergence(self, exact: Array, found: Array) -> None:  # type: ignore[override]
        return None

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        wrong = super().check_targets(part, classes, targets)
        if not wrong and classes and len(set(targets)) == len(targets):
            wrong = f"at least one class of {part} must have two samples, since neighbours are compared"
        return wrong

    def width(self, classes: Sequence[str]) -> int | None:
        return None  # the model itself defines it

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) == 2 and shape[0] == images

    def shape_text(self, width: int | None) -> str:
        return "[N, values], a vector for each sample"


def _neighbours(vectors: Array) -> Array:
    """Returns the index of the nearest other row by cosine, [N], for rows scaled to length 1."""
    import numpy as np

    found = np.zeros(len(vectors), np.int64)
    for start in range(0, len(vectors), _ROWS):
        part = vectors[start : start + _ROWS]
        cosines = part @ vectors.T
        cosines[np.arange(len(part)), start + np.arange(len(part))] = -np.inf
        found[start : start + len(part)] = cosines.argmax(1)
    return found


def _hits(values: Array) -> Array:
    """Returns whether the nearest other sample has the same class, booleans [N], from `Embedding.values`."""
    import numpy as np

    labels = values[:, -1]
    if len(values) < 2:
        return np.zeros(len(values), np.bool_)
    right: Array = labels[_neighbours(values[:, :-1])] == labels
    return right


class _SameNeighbour(Agreement):
    """The share of samples with the same nearest neighbour in both models.

    The remark reports the cosine between the models' vectors.
    """

    def __init__(self) -> None:
        self._exact: list[Array] = []
        self._found: list[Array] = []

    def add(self, exact: Array, found: Array) -> None:
        self._exact.append(units(exact))
        self._found.append(units(found))

    @property
    def share(self) -> float:
        exact, found = self._joined
        return float((_neighbours(exact) == _neighbours(found)).mean()) if len(exact) > 1 else 1.0

    @property
    def remark(self) -> str:
        exact, found = self._joined
        cosines = (exact * found).sum(1)
        return f"cosine to float {cosines.mean():.4f} on average, {cosines.min():.4f} at least"

    @property
    def _joined(self) -> tuple[Array, Array]:
        import numpy as np

        return np.concatenate(self._exact), np.concatenate(self._found)
