"""Sequential MSE: ranges of weights with the least error at the operators' outputs, one operator after the other.

    clip_c = argmin_k E_images (op(x', W'_k)_c - op(x, W)_c)²        W'_k rounded with the range k · max|W_c|

x is the float input, x' the quantized one, behind operators whose ranges are chosen already. Each of `candidates`
shares k, evenly from `least` to 1, is tried as it would ship (the scale aligned, the bias in its steps); with a scale
a channel every channel takes its own, with one a tensor the error is summed. Least squared error of the weight itself
(calibration.weights=mse) looks at no input: a weight that meets large values counts as much as one that meets zeros.
Sources: AIMET's sequential MSE and NVIDIA Model Optimizer's mse calibration of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from qatkit.algorithms.blocks.algorithm import BlockAlgorithm
from qatkit.algorithms.blocks.journal import Found
from qatkit.algorithms.blocks.lesson import Lesson
from qatkit.algorithms.blocks.partition import layers
from qatkit.algorithms.blocks.walk import Walker
from qatkit.config.fields import COUNT, Range, setting
from qatkit.graph.pass_result import PassResult
from qatkit.graph.signature import Example
from qatkit.qat_layers import QATOperator
from qatkit.weight_fake_quantize import WeightFakeQuantize

_TITLE = "sequential mse"


@dataclass(frozen=True)
class SequentialMSE(BlockAlgorithm):
    """Chooses the range of every weight by the error of its operator's output."""

    stays: ClassVar[str] = "range not searched"
    images: int = setting(
        64, "of the calibration images, whose activations between two operators are kept", COUNT
    )
    batch_size: int = setting(8, "images at a time", COUNT)
    candidates: int = setting(20, "ranges that are tried", Range(2))
    least: float = setting(
        0.4, "the smallest of them, as a share of the weight's largest value", Range(0.01, 1)
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """`changed` counts the operators whose range is smaller now; fake quantization is on afterwards.

        Args:
            graph_module: calibrated.
            inputs: batches, as `calibrate` takes them, read no further than needed.
        """
        walker = Walker.of(self, graph_module, inputs)
        search = _Search(torch.linspace(1.0, self.least, self.candidates).tolist())
        walker.walk(layers(graph_module), search, _TITLE)
        changed = sum(bool((fake.clip < 1).any()) for fake in map(_fake, walker.operators.values()))
        return PassResult(graph_module, changed, walker.skipped)


@dataclass(frozen=True)
class _Search:
    """A `qatkit.algorithms.blocks.lesson.Learner` of blocks with one operator, which is their first node.

    Attributes:
        shares: of the largest value, in the order in which the first of equal ones is taken.
    """

    shares: list[float]

    def learn(self, lesson: Lesson) -> Found:
        return {f"{name}.clip": self._best(lesson, operator) for name, operator in lesson.operators.items()}

    def _best(self, lesson: Lesson, operator: QATOperator) -> Tensor:
        fake = _fake(operator)
        fake.set_phase(observe=False, quantize=True)
        full, before = torch.ones_like(fake.clip), fake.clip.clone()
        tried = []
        for share in self.shares:
            fake.clip_to(full * share)
            tried.append(operator.quantized(*operator.effective()))
        fake.clip_to(before)
        total = torch.zeros(())  # [candidates, channels] in the end
        for chunk in range(lesson.chunks):
            wanted = operator.run(lesson.originals([chunk])[0], *operator.effective())
            x = lesson.inputs([chunk])[0]
            errors = [squared_errors(operator.run(x, *one) - wanted, operator) for one in tried]
            total = total.to(x.device) + torch.stack(errors)
        best = (total if fake.spec.per_channel else total.sum(1)).argmin(0)
        return torch.tensor(self.shares, device=best.device)[best]

    def apply(self, lesson: Lesson, found: Found) -> None:
        for name, operator in lesson.operators.items():
            _fake(operator).clip_to(found[f"{name}.clip"])


def squared_errors(difference: Tensor, operator: QATOperator) -> Tensor:
    """[channels] of an operator's output, summed over everything else; float64."""
    axis = difference.ndim - operator.weight.ndim + 1  # Conv: [N, C, ...] or [C, ...]; Linear: [..., C]
    return difference.double().square().sum([d for d in range(difference.ndim) if d != axis])


def _fake(operator: QATOperator) -> WeightFakeQuantize:
    fake = operator.weight_fake_quant
    assert fake is not None
    return fake
