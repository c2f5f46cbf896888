"""GPTQ of one operator: computes the integers of its weight, and its bias, from moments of its inputs."""

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
from qatkit.algorithms.gptq_columns import Columns, damped, damped_factor
from qatkit.algorithms.input_moments import patches
from qatkit.quant import numerics
from qatkit.quant.formats.quantizers import FormatWeightFakeQuantize
from qatkit.quant.qat_layers import QATEmbedding, QATOperator
from qatkit.quant.spec import FEW_BITS

if TYPE_CHECKING:
    from qatkit.algorithms.gptq import GPTQ


# Least damping of a weight that is also the table of an Embedding: it limits the error of the looked-up rows
# (decision 55).
_TIED = 0.1


@dataclass
class _Moments:
    """Moments of an operator's inputs over all positions of all images.

    Attributes:
        quantized, original: means [groups, inputs] of x', after quantized operators, and of x, after float
            operators.
        second, cross: means [groups, inputs, inputs] of x'·x'ᵀ and (x - x')·x'ᵀ.
    """

    quantized: Tensor
    original: Tensor
    second: Tensor
    cross: Tensor

    def centred(self) -> _Moments:
        """Returns the moments with covariances instead of second moments."""
        behind = self.quantized[:, None]
        lost = self.original - self.quantized
        return _Moments(
            self.quantized,
            self.original,
            self.second - self.quantized[:, :, None] * behind,
            self.cross - lost[:, :, None] * behind,
        )


@dataclass
class _Rounded:
    """The rounding of a weight.

    Attributes:
        integers: the integers in the weight's shape, one byte each if they fit.
        scale, zero_point: scales and zero points in the granularity's shape.
        means: [out], the mean error of the outputs; zeros if no bias compensates for it.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor
    means: Tensor


def _made_up(moments: _Moments, share: float, damping: float) -> Tensor | None:
    """Returns M [groups, inputs, inputs], with which w + w·M compensates for the error of earlier operators.

    None if `share` is 0.
    """
    if not share:
        return None
    factor = damped_factor(moments.second, damping)
    return torch.cholesky_solve(moments.cross.mT.double(), factor).mT.mul_(share).float()


@dataclass(frozen=True)
class ColumnRounding:
    """A `qatkit.algorithms.blocks.lesson.Learner` for blocks with one operator, the first node of each block.

    Attributes:
        settings: the settings of the algorithm.
        with_bias: the operators whose bias compensates for the mean error.
        tables: the Embeddings that use a weight as their table, by the id of the parameter.
    """

    settings: GPTQ
    with_bias: Collection[QATOperator]
    tables: Mapping[int, Sequence[QATEmbedding]]

    @classmethod
    def of(cls, settings: GPTQ, graph_module: fx.GraphModule) -> ColumnRounding:
        """Returns the learner for a calibrated graph."""
        return cls(settings, set(targets(graph_module)[0].values()), tied_tables(graph_module))

    def learn(self, lesson: Lesson) -> Found:
        found: Found = {}
        for name, operator in lesson.operators.items():
            for part, value in self._learned(operator, _moments(lesson, operator)).items():
                found[f"{name}.{part}"] = value
        return found

    def _learned(self, operator: QATOperator, seen: _Moments) -> Found:
        """Returns integers (or values of a number format), scale, any zero point, and the bias if it compensates."""
        fake, takes = weight_quantizer(operator), operator in self.with_bias
        weight, bias = (None if t is None else t.detach() for t in operator.effective())
        assert weight is not None
        moments = seen.centred() if takes else seen
        if isinstance(fake, FormatWeightFakeQuantize):
            return self._in_format(operator, fake, moments, takes=takes)
        rounded = self._rounded(operator, weight, moments, takes=takes)
        found = {"integers": rounded.integers, "scale": rounded.scale}
        if fake.spec.has_zero_point:
            found["zero_point"] = rounded.zero_point
        if bias is not None and takes:
            found["bias"] = bias + rounded.means.to(bias.dtype)
        return found

    def _rounded(self, operator: QATOperator, weight: Tensor, moments: _Moments, *, takes: bool) -> _Rounded:
        """Rounds a weight, some rows at a time, since the intermediate tensors take many times the rows' memory.

        Only the weight of a grouped convolution is rounded at once.

        Args:
            operator: the operator.
            weight: its weight as inference uses it.
            moments: the moments of its inputs.
            takes: whether the bias compensates for the mean error of the outputs.
        """
        fake, damping, groups = weight_quantizer(operator), self._damping(operator), len(moments.second)
        spec, past = fake.spec, _made_up(moments, self.settings.past, damping)
        columns = Columns(moments.second, order=self.settings.order, damping=damping)
        searches = self.settings.scales and spec.dtype in FEW_BITS and not fake.frozen
        form = damped(moments.second, damping) if searches else moments.second
        integers = torch.empty_like(weight, dtype=spec.differences)
        found = list[tuple[Tensor, ...]]()
        # The rows of several groups are rounded together, so the weight is not split.
        for rows in fake.pieces(weight) if groups == 1 else [slice(None)]:
            part, one = weight[rows], fake.of_rows(rows)

            def by_group(of_weight: Tensor, part: Tensor = part) -> Tensor:
                return of_weight.expand_as(part).reshape(groups, len(part) // groups, -1).float()

            original = by_group(part)
            wanted = original if past is None else original + original @ past
            scale, zero = one.scale(part), one.zero_point(part)
            if searches:
                importance = columns.importance[:, None].expand_as(wanted)
                scale, zero = gptq_scales.searched(
                    wanted.reshape(part.shape), importance.reshape(part.shape), spec
                )
            ends = numerics.weight_ends(part, spec, zero)
            low, high = (by_group(end) if isinstance(end, Tensor) else end for end in ends)
            steps = columns.rounded(wanted, by_group(spec.granularity.spread(scale, part.shape)), (low, high))
            if searches:
                scale = gptq_scales.fitted(wanted, form, steps, scale, spec)
            means = torch.zeros(len(part), device=part.device)
            if takes:
                quantized = steps * by_group(spec.granularity.spread(scale, part.shape))
                lost = original @ moments.original[:, :, None] - quantized @ moments.quantized[:, :, None]
                means = lost.flatten()
            integers[rows] = steps.reshape(part.shape).to(integers.dtype)
            found.append((scale, zero, means))
        return _Rounded(integers, *map(torch.cat, zip(*found, strict=True)) if len(found) > 1 else found[0])

    def _in_format(
        self, operator: QATOperator, fake: FormatWeightFakeQuantize, moments: _Moments, *, takes: bool
    ) -> Found:
        """Returns values and scales of a weight in a number format, and the bias if it compensates.

        The scales follow from the definition of the format.
        """
        weight, bias = (None if t is None else t.detach() for t in operator.effective())
        assert weight is not None and fake.spec.form is not None
        damping, groups = self._damping(operator), len(moments.second)
        past = _made_up(moments, self.settings.past, damping)
        columns = Columns(moments.second, order=self.settings.order, damping=damping)
        original = weight.reshape(groups, len(weight) // groups, -1).float()
        wanted = original if past is None else original + original @ past
        scale = fake.scale(wanted.reshape(weight.shape))
        spread = fake.spec.granularity.spread(scale, weight.shape).expand_as(weight).reshape_as(wanted)
        values = columns.rounded_to(wanted, spread, fake.spec.form.element) * spread
        found = {"values": values.reshape(weight.shape), "scale": scale}
        if bias is not None and takes:
            lost = original @ moments.original[:, :, None] - values @ moments.quantized[:, :, None]
            found["bias"] = bias + lost.flatten().to(bias.dtype)
        return found

    def _damping(self, operator: QATOperator) -> float:
        tied = id(operator.weight) in self.tables
        return max(self.settings.damping, _TIED) if tied else self.settings.damping

    def apply(self, lesson: Lesson, found: Found) -> None:
        for name, operator in lesson.operators.items():
            weight = operator.effective()[0].detach()
            parts = ("integers", "values", "scale", "zero_point", "bias")
            values = {
                part: found[key].to(weight.device) for part in parts if (key := f"{name}.{part}") in found
            }
            fake = weight_quantizer(operator)
            if "bias" in values:
                biases.change(operator, values["bias"])
            if isinstance(fake, FormatWeightFakeQuantize):
                fake.fix_values(weight, values["values"], values["scale"])
                continue
            tied = (table.weight_fake_quant for table in self.tables.get(id(operator.weight), ()))
            for one in (fake, *(table for table in tied if table.spec == fake.spec)):
                one.fix(values["scale"], weight, values["integers"], values.get("zero_point"))


def _moments(lesson: Lesson, operator: QATOperator) -> _Moments:
    """Returns moments of an operator's inputs, over all chunks."""
    count, sums = 0, list[Tensor]()
    for chunk in range(lesson.chunks):
        x = patches(operator, lesson.inputs([chunk])[0])
        original = patches(operator, lesson.originals([chunk])[0])
        new = [x.sum(2), original.sum(2), x @ x.mT, (original - x) @ x.mT]
        sums = [total.add_(one) for total, one in zip(sums, new, strict=True)] if sums else new
        count += x.shape[2]
    return _Moments(*(total.div_(count) for total in sums))
