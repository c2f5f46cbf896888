"""Classes for the results of the search for mixed scales (`qatkit.calibration.mixed_scales`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """An error of one quantizer that is too large at an operator or output.

    Attributes:
        where: the site of the operator that reads the values; "output NAME" for an output.
        axis: the axis of the channels; None if all values are measured together, as if they were one channel.
        channels, lost: the number of channels, and the number of channels that lose too much.
        worst_db: the signal-to-error ratio of the worst channel, in dB.
    """

    where: str
    axis: int | None
    channels: int
    lost: int
    worst_db: float

    def __str__(self) -> str:
        if self.axis is None:
            return f"too much is lost at {self.where} ({self.worst_db:.1f} dB remain)"
        lost = f"too much is lost in {self.lost} of {self.channels} channels of {self.where}"
        return f"{lost} (the worst has {self.worst_db:.1f} dB)"


@dataclass(frozen=True)
class MixedScale:
    """A tensor that 8 bits with one scale cannot represent.

    Attributes:
        tensor: the site of the tensor.
        losses: the errors that are too large, by operator or output.
        floats: the sites of the operators to leave float, so that the tensor is not quantized there; without
            operators for which the configuration has an override.
    """

    tensor: str
    losses: tuple[Loss, ...]
    floats: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.tensor}: {', '.join(map(str, self.losses))}"
