"""The state of the quantizer of a weight or of some of its rows: clip, frozen scales, rounding, number type."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qatkit.quant import numerics
from qatkit.quant.fake_quantize import Quantizer
from qatkit.quant.granularity import PerChannel
from qatkit.quant.held_scales import held
from qatkit.quant.learned.oscillation import Oscillation
from qatkit.quant.spec import QuantSpec

_PIECE = 2**19  # values processed at a time, since all at once would take several times the weight's memory


class WeightQuantizerState(Quantizer):
    """The buffers of a weight's quantizer, and the methods that set them.

    Args:
        spec: spec of the weight.
        shape: shape of the weight; its first axis holds the output channels.

    Attributes:
        clip: the share of the range that is kept, in the scales' shape; weights beyond it are clipped and get
            no gradient.
        fixed_zero_point: the frozen zero point, int32, in the scales' shape; None while it follows the
            weight.
        rounding: the difference between each rounded weight and `below`, integers in the weight's shape: 0 for
            down, 1 for up, other values if an algorithm compensates for errors of other weights; None: weights are
            rounded to the nearest.
        bias_shift: the part of the operator's bias that compensates for quantization and is omitted without
            quantization, [out]; None: there is no such part.
        bits: number of bits of the type that `narrow` set, []; None: the type is that of the original spec.
        oscillation: the history of the integers during fine-tuning, with the frozen ones; None: not tracked.
    """

    _optional: ClassVar[tuple[str, ...]] = (
        "fixed_scale",
        "fixed_zero_point",
        "rounding",
        "bias_shift",
        "bits",
    )
    clip: Tensor
    fixed_zero_point: Tensor | None
    rounding: Tensor | None
    bias_shift: Tensor | None
    bits: Tensor | None
    oscillation: Oscillation | None

    def __init__(self, spec: QuantSpec, shape: Sequence[int]) -> None:
        super().__init__(spec)
        self._made_with = spec.dtype
        self.register_buffer("clip", torch.ones(spec.granularity.scale_shape(shape)))
        self.oscillation = None
        # Whether `clip` clips, as a plain bool: reading it from a GPU at each step would wait for the GPU.
        self._clips = not spec.any_scale

    def narrow(self, dtype: str) -> None:
        """Quantizes to another signed number type from now on; checkpoints hold this type.

        Args:
            dtype: a name in `qatkit.quant.spec.SIGNED`.
        """
        self.bits = torch.tensor(int(dtype.removeprefix("int")), device=self.clip.device)
        self.spec = replace(self.spec, dtype=dtype)

    @torch.no_grad()
    def clip_to(self, shares: Tensor) -> None:
        """Sets `clip` to `shares`, the shares of the range to keep, above 0 and in the shape of `clip`.

        Does nothing where the scale is frozen.
        """
        if not self.frozen:
            self.clip.copy_(shares)
            self._clips = not self.spec.any_scale or bool((self.clip < 1).any())

    @torch.no_grad()
    def fix(
        self,
        scale: Tensor,
        weight: Tensor | None = None,
        integers: Tensor | None = None,
        zero_point: Tensor | None = None,
    ) -> None:
        """Freezes the scale, and optionally the zero point and the integers of a weight.

        If the weight is trained, the integers move with it, since their distance from `below` stays the same.

        Args:
            scale: the scales, above 0, in the shape of `clip`. They are rounded to scales of the spec
                (`held`). Weights beyond scale times largest integer are clipped.
            weight: the weight as inference uses it; given together with `integers`.
            integers: whole numbers of any type, in the weight's shape, counted from the zero point; None: the
                weight is rounded to the nearest.
            zero_point: the zero points to freeze, whole numbers in the shape of `clip`; None: they follow the
                weight.

        Raises:
            ValueError: a zero point was given for a spec that has none.
        """
        if zero_point is not None and not self.spec.has_zero_point:
            raise ValueError("zero_point: expected None with a symmetric spec of a signed type")
        self.fixed_scale = held(scale.detach(), self.spec).clone()
        self.fixed_zero_point = None if zero_point is None else zero_point.detach().to(torch.int32).clone()
        self.rounding = None
        if weight is not None and integers is not None:
            self.rounding = self._distances(weight, integers)
        self._clips = True

    def _distances(self, weight: Tensor, integers: Tensor) -> Tensor:
        """Returns the distances of the integers from `below`, in one byte each where their range fits."""
        found = torch.empty_like(weight, dtype=self.spec.differences)
        for rows in self.pieces(weight):
            part, one = weight[rows], self.of_rows(rows)
            assert one.fixed_scale is not None
            found[rows] = (integers[rows] - one.below(part, one.fixed_scale)).to(found.dtype)
        return found

    def pieces(self, weight: Tensor) -> list[slice]:
        """Returns slices of output channels to quantize in turn (`of_rows`); a single slice unless `by_rows`."""
        if not self.by_rows:
            return [slice(None)]
        step = max(1, _PIECE // max(1, weight[0].numel()))
        return [slice(start, start + step) for start in range(0, len(weight), step)]

    def of_rows(self, rows: slice | Tensor) -> Self:
        """Returns a quantizer of some output channels, which uses this one's scales and rounding.

        Args:
            rows: a slice or indices of output channels; they must be all channels unless `by_rows`.
        """
        new = copy.copy(self)
        for kind in ("_buffers", "_parameters") if self.by_rows else ():
            tensors = dict(getattr(self, kind))
            for name, one in tensors.items():
                if one is not None and one.ndim and len(one) == len(self.clip):
                    tensors[name] = one[rows]
            new.__dict__[kind] = tensors
        return new

    @property
    def by_rows(self) -> bool:
        """Returns whether output channels can be quantized independently of each other."""
        one_unit = self.spec.scale_dtype == "uint8" and isinstance(self.spec.granularity, PerChannel)
        return self.spec.granularity.separates(0) and self.oscillation is None and not one_unit

    @torch.no_grad()
    def below(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Returns `weight` / `scale`, in float, rounded down and clamped as by `floor`."""
        return floor(weight.detach() / self._spread(scale, weight), self.ends(weight))

    @torch.no_grad()
    def zero_point(self, weight: Tensor) -> Tensor:
        """Returns the zero points as the file holds them, int32, in the shape of `clip`."""
        if self.fixed_zero_point is not None:
            return self.fixed_zero_point
        return numerics.weight_zero_point(weight, self.spec)

    @torch.no_grad()
    def ends(self, weight: Tensor) -> numerics.Ends:
        """Returns the smallest and the largest integer, shaped to broadcast against the weight."""
        return numerics.weight_ends(weight, self.spec, self.fixed_zero_point)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        former = state_dict.pop(f"{prefix}rounds_up", None)  # bool, in checkpoints of former versions
        if former is not None:
            state_dict[f"{prefix}rounding"] = former.to(torch.int16)
        super()._load_from_state_dict(state_dict, prefix, *args)
        dtype = self._made_with if self.bits is None else f"int{int(self.bits)}"
        self.spec = replace(self.spec, dtype=dtype)
        self._clips = self.frozen or not self.spec.any_scale or bool((self.clip < 1).any())

    def _spread(self, scale: Tensor, weight: Tensor) -> Tensor:
        """Returns `scale` shaped to broadcast against the weight."""
        return self.spec.granularity.spread(scale, weight.shape)


def floor(steps: Tensor, ends: numerics.Ends) -> Tensor:
    """Returns `steps` rounded down and clamped to the integers from `ends[0]` - 1 to `ends[1]`."""
    return numerics.clamped(torch.floor(steps), (ends[0] - 1, ends[1]))
