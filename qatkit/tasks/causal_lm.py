"""The task of predicting the next token of a text: logits [N, T, V] against the input tokens [N, T].

    tokens   t0 t1 t2 ... ── model ──> logits of t1 t2 t3 ... ── cross entropy ──> nats per token ── exp ──> perplexity

A sample is a window of consecutive tokens. Its first token is not predicted and does not count. Models are
compared window by window, so standard errors of differences come from paired windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Meter
from qatkit.tasks.logits import Logits
from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array

_LEAST = 2  # tokens of a window: one as input, one to predict


class CausalLM(Logits):
    """Language modelling with perplexity and next-token accuracy.

    Two models agree on a token if the likeliest next token is the same.

    A target is a window's tokens as the bytes of an int32 array, which needs a seventh of a list's memory. The
    compared outputs have the vocabulary on axis 1, [N, V, T], like logits of classes at several positions.
    """

    names = TaskNames(
        "causal_lm",
        "text generation",
        (Metric("perplexity", unit="", higher_is_better=False), Metric("next token")),
        decision="next token",
        outputs="logits",
        samples="windows",
    )

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        return _cross_entropy(output, targets, schedule.label_smoothing).mean()

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns T² times the KL divergence of the softmaxes at temperature T, averaged over all tokens.

        Source: Hinton et al., "Distilling the knowledge in a neural network", 2015.
        """
        from torch.nn import functional as F

        mine, wanted = ((one.float() / temperature).log_softmax(-1) for one in (output, teacher))
        return temperature**2 * F.kl_div(mine, wanted, log_target=True, reduction="none").sum(-1).mean()

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(output, targets).double().mean(1).sum()

    def figure(self, total: Any, images: int) -> Any:
        """Returns the perplexity of `images` windows whose mean nats per token sum up to `total`."""
        return math.e ** (total / images)

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the mean cross entropy of each window in nats per token, [N]."""
        nats: Array = _nats(outputs, targets).mean(1)
        return nats

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns the logits as [N, V, T], a view of the first output."""
        import numpy as np

        return np.moveaxis(np.asarray(outputs[0], np.float32), -1, 1)

    def meter(self) -> Meter:
        return _Meter(self)

    def noise(self, first: Array, second: Array) -> float:
        """Returns the standard error of the difference between two perplexities, from paired windows."""
        difference = first.astype("float64") - second
        return self.mean(second) * float(difference.std()) / math.sqrt(len(difference))

    def spread(self, score: float, images: int, values: Array | None) -> float:
        return score * super().spread(score, images, values)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        told = super().worse(first, second, sure)
        return f"{told} nats per token" if told else ""

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return True

    def target(self, value: Any) -> bytes:
        import numpy as np

        if isinstance(value, bytes):
            return value
        found = np.asarray(value)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise TypeError("targets must be the tokens of a window, a list of integers")
        return found.astype(np.int32).tobytes()

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        lengths = {len(one) // 4 for one in targets}
        if len(lengths) > 1 or min(lengths) < _LEAST:
            found = ", ".join(map(str, sorted(lengths)[:5]))
            return f"windows of {part} must all have the same length of at least {_LEAST} tokens; lengths: {found}"
        return ""

    def collate(self, targets: Sequence[Any]) -> Tensor:
        import numpy as np
        import torch

        return torch.from_numpy(np.stack([np.frombuffer(one, np.int32) for one in targets]).astype(np.int64))

    def width_of(self, shape: Sequence[int]) -> int | None:
        return None  # the model itself defines the size of its vocabulary

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) == 3 and shape[0] == images and (width is None or shape[2] == width)

    def shape_text(self, width: int | None) -> str:
        return f"[N, tokens, {'vocabulary' if width is None else width}]"


def _cross_entropy(output: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross entropy of each predicted token in nats, [N, T - 1]."""
    from torch.nn import functional as F

    scores = output[:, :-1].float().transpose(1, 2)
    wanted = targets[:, 1:].to(output.device)
    return F.cross_entropy(scores, wanted, reduction="none", label_smoothing=smoothing)


def _nats(outputs: Array, targets: Any) -> Array:
    """Returns the cross entropy of each predicted token in nats, float64 [N, T - 1], from logits [N, V, T]."""
    import numpy as np

    found = []
    for logits, tokens in zip(outputs, np.asarray(targets), strict=True):
        rows = logits.T[:-1]
        largest = rows.max(1)
        total = np.exp(rows - largest[:, None]).sum(1, dtype=np.float64)
        wanted = rows[np.arange(len(rows)), tokens[1:]]
        found.append(largest.astype(np.float64) + np.log(total) - wanted)
    return np.stack(found)


class _Meter:
    """A streaming meter of perplexity and next-token accuracy.

    Attributes:
        images: number of windows seen so far.
    """

    def __init__(self, task: CausalLM) -> None:
        self.images, self._task = 0, task
        self._nats, self._right, self._tokens = 0.0, 0, 0

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of logits [N, V, T] and tokens [N, T]."""
        import numpy as np

        tokens = np.asarray(targets)
        self._nats += float(_nats(outputs, tokens).mean(1).sum())
        self._right += int((outputs[..., :-1].argmax(1) == tokens[:, 1:]).sum())
        self._tokens += tokens[:, 1:].size
        self.images += len(tokens)

    def result(self) -> Scores:
        """Returns the scores; at least one window must have been added."""
        perplexity, right = self._task.names.metrics
        metrics = (
            perplexity.of(float(self._task.figure(self._nats, self.images))),
            right.of(100 * self._right / self._tokens),
        )
        return Scores(metrics, self.images)
