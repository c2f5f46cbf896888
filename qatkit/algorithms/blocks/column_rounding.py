"""GPTQ of one operator: moments of its inputs, from which its integers and its bias follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from qatkit.algorithms import biases, gptq_scales
from qatkit.algorithms.bias_errors import targets
from qatkit.algorithms.blocks.journal import Found
from qatkit.algorithms.blocks.lesson import Lesson, tied_tables
from qatkit.algorithms.blocks.range_search import weight_quantizer
from qatkit.algorithms.gptq_columns import damped, damped_factor, rounded_columns
from qatkit.algorithms.input_moments import patches
from qatkit.quant.numerics import weight_ends
from qatkit.quant.qat_layers import QATEmbedding, QATOperator
from qatkit.quant.spec import FEW_BITS

if TYPE_CHECKING:
    from qatkit.algorithms.gptq import GPTQ


# Damping of a weight that is a table, too: it stands for the error of what is looked up (docs/design.md, D55).
_TIED = 0.1


@dataclass
class _Moments:
    """Moments of an operator's inputs over all places of all images.

    Attributes:
        quantized, original: means [groups, inputs], behind quantized operators and behind float ones.
        second, cross: means [groups, inputs, inputs] of x'·x'ᵀ and (x - x')·x'ᵀ.
    """

    quantized: Tensor
    original: Tensor
    second: Tensor
    cross: Tensor

    def centred(self) -> _Moments:
        """Covariances in the place of second moments."""
        behind = self.quantized[:, None]
        lost = self.original - self.quantized
        return _Moments(
            self.quantized,
            self.original,
            self.second - self.quantized[:, :, None] * behind,
            self.cross - lost[:, :, None] * behind,
        )


@dataclass(frozen=True)
class ColumnRounding:
    """A `qatkit.algorithms.blocks.lesson.Learner` of blocks with one operator, which is their first node.

    Attributes:
        settings: of the algorithm.
        with_bias: the operators whose bias takes the mean error.
        tables: the Embeddings that a weight is the table of, by the id of the parameter.
    """

    settings: GPTQ
    with_bias: Collection[QATOperator]
    tables: Mapping[int, Sequence[QATEmbedding]]

    @classmethod
    def of(cls, settings: GPTQ, graph_module: fx.GraphModule) -> ColumnRounding:
        """Returns the learner of a calibrated graph."""
        return cls(settings, set(targets(graph_module)[0].values()), tied_tables(graph_module))

    def learn(self, lesson: Lesson) -> Found:
        found: Found = {}
        for name, operator in lesson.operators.items():
            for part, value in self._learned(operator, _moments(lesson, operator)).items():
                found[f"{name}.{part}"] = value
        return found

    def _learned(self, operator: QATOperator, seen: _Moments) -> Found:
        """Integers, scale and zero point of the weight, and the bias where it takes the mean error."""
        fake, takes = weight_quantizer(operator), operator in self.with_bias
        weight, bias = (None if t is None else t.detach() for t in operator.effective())
        assert weight is not None
        groups = len(seen.second)
        moments = seen.centred() if takes else seen

        def by_group(of_weight: Tensor) -> Tensor:
            return of_weight.expand_as(weight).reshape(groups, len(weight) // groups, -1).float()

        def by_weight(scale: Tensor) -> Tensor:
            return by_group(fake.spec.granularity.spread(scale, weight.shape))

        rows, factor = by_group(weight), damped_factor(moments.second, self._damping(operator))
        wanted = rows
        if self.settings.past:
            lost = rows.double() @ moments.cross.double()
            wanted = rows + self.settings.past * torch.cholesky_solve(lost.mT, factor).mT.float()
        scale, zero = fake.scale(weight), fake.zero_point(weight)
        searches = self.settings.scales and fake.spec.dtype in FEW_BITS and not fake.frozen
        if searches:
            importance = torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2).reciprocal().float()
            every = importance[:, None].expand_as(rows).reshape(weight.shape)
            scale, zero = gptq_scales.searched(wanted.reshape(weight.shape), every, fake.spec)
        low, high = (
            by_group(end) if isinstance(end, Tensor) else end for end in weight_ends(weight, fake.spec, zero)
        )
        integers = rounded_columns(
            wanted, moments.second, by_weight(scale), (low, high),
            order=self.settings.order, damping=self._damping(operator),
        )  # fmt: skip
        if searches:
            scale = gptq_scales.fitted(
                wanted, damped(moments.second, self._damping(operator)), integers, scale, fake.spec
            )
        found = {"integers": integers.reshape(weight.shape).to(torch.int16), "scale": scale}
        if fake.spec.has_zero_point:
            found["zero_point"] = zero
        if takes and bias is not None:
            quantized = integers * by_weight(scale)
            means = rows @ seen.original[:, :, None] - quantized @ seen.quantized[:, :, None]
            found["bias"] = bias + means.flatten().to(bias.dtype)
        return found

    def _damping(self, operator: QATOperator) -> float:
        tied = id(operator.weight) in self.tables
        return max(self.settings.damping, _TIED) if tied else self.settings.damping

    def apply(self, lesson: Lesson, found: Found) -> None:
        for name, operator in lesson.operators.items():
            weight = operator.effective()[0].detach()
            values = {part: found[key].to(weight.device) for part in ("integers", "scale", "zero_point", "bias")
                      if (key := f"{name}.{part}") in found}  # fmt: skip
            fake = weight_quantizer(operator)
            tied = (table.weight_fake_quant for table in self.tables.get(id(operator.weight), ()))
            for one in (fake, *(table for table in tied if table.spec == fake.spec)):
                one.fix(values["scale"], weight, values["integers"].float(), values.get("zero_point"))
            if "bias" in values:
                biases.change(operator, values["bias"])


def _moments(lesson: Lesson, operator: QATOperator) -> _Moments:
    """Moments of what an operator reads, over all chunks."""
    count, sums = 0, list[Tensor]()
    for chunk in range(lesson.chunks):
        x = patches(operator, lesson.inputs([chunk])[0])
        original = patches(operator, lesson.originals([chunk])[0])
        new = [x.sum(2), original.sum(2), x @ x.mT, (original - x) @ x.mT]
        sums = [total.add_(one) for total, one in zip(sums, new, strict=True)] if sums else new
        count += x.shape[2]
    return _Moments(*(total / count for total in sums))
