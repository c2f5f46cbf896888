"""Checks that a cleaned file computes the same as the original, in ONNX Runtime without optimizations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.export.clean.drawn import Port, drawn, given
from qatkit.export.clean.layout import permutation
from qatkit.export.clean.store import UNPACKED
from qatkit.verify.sqnr import sqnr
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import numpy_type
from qatkit_verify.session import open_session

EQUAL = float("inf")
ROUNDED = (
    80.0  # dB, if operators were joined or replaced: float32 rounding is at 140 dB, and networks amplify it
)
OF_HALVES = 30.0  # dB, for a conversion from float16 to float32: float16 rounding is at 70 dB


@dataclass(frozen=True)
class Proof:
    """A comparison of the outputs of two files.

    Attributes:
        outputs: the signal-to-noise ratio of each output in dB, for the worst set of inputs; infinite if all values
            are equal, minus infinity if integers or strings differ.
        inputs: the shapes of each set of inputs.
        bound: the ratio in dB that every output had to reach.
        drawn: whether the inputs were random.
    """

    outputs: dict[str, float]
    inputs: list[dict[str, list[int]]]
    bound: float
    drawn: bool

    def lines(self) -> list[str]:
        """Returns the result as lines of text."""
        source = "random" if self.drawn else "given"
        sets = "; ".join(", ".join(f"{name} {shape}" for name, shape in one.items()) for one in self.inputs)
        worst = min(self.outputs.values(), default=EQUAL)
        if worst == EQUAL:
            outputs = "the output is" if len(self.outputs) == 1 else f"all {len(self.outputs)} outputs are"
            return [f"{outputs} equal in every value, on {source} inputs ({sets})"]
        equal = sum(ratio == EQUAL for ratio in self.outputs.values())
        told = f"{equal} of {len(self.outputs)} outputs equal in every value, the worst at {worst:.1f} dB"
        return [f"{told} (bound {self.bound:.0f} dB), on {source} inputs ({sets})"]


def prove(  # noqa: PLR0913  independent settings of a comparison, by name
    before: Path,
    after: Path,
    wanted: Sequence[Port],
    *,
    layout: Mapping[str, str],
    names: Mapping[str, str],
    bound: float,
    inputs: str | None,
    threads: int,
    hint: str = "",
) -> Proof:
    """Runs both files on the same inputs, one file after the other.

    Args:
        before: the original file.
        after: the cleaned file.
        wanted: the inputs of `before`, with the sizes that were fixed.
        layout: the new layouts of inputs and outputs that were transposed, by their former names.
        names: the names of inputs and outputs in `after`, by their former names.
        bound: the signal-to-noise ratio in dB that every output must reach; infinite if all values must be equal.
        inputs: an .npz file; None for random inputs.
        threads: the number of ONNX Runtime's threads.
        hint: advice for the end of the message about an output below the bound.

    Raises:
        ConfigError: an output is below the bound, or a file does not run.
    """
    session = open_session(before, threads=threads, optimize=False, options=UNPACKED)
    sets = drawn(session, wanted) if inputs is None else [given(Path(inputs), wanted)]
    outputs = [one.name for one in session.get_outputs()]
    exact = [session.run(outputs, feeds) for feeds in sets]
    del session
    session = open_session(after, threads=threads, optimize=False, options=UNPACKED)
    types = {one.name: numpy_type(one.type) for one in session.get_inputs()}
    ratios = dict.fromkeys(outputs, EQUAL)
    for feeds, expected in zip(sets, exact, strict=True):
        new = {names[name]: _placed(name, value, layout) for name, value in feeds.items()}
        found = session.run(
            [names[name] for name in outputs],
            {name: value.astype(types[name]) for name, value in new.items()},
        )
        for name, old, now in zip(outputs, expected, found, strict=True):
            ratios[name] = min(ratios[name], _ratio(_placed(name, old, layout), now))
    for name, ratio in ratios.items():
        if ratio < bound:
            least = "equal values are" if EQUAL in (bound, -ratio) else f"at least {bound:.0f} dB are"
            measured = "" if ratio == -EQUAL else f" (signal-to-noise ratio {ratio:.1f} dB)"
            reason = f"output '{name}' differs from the original file's{measured}, where {least} required"
            told = f"after cleaning, {reason}, so nothing was written{hint}"
            raise ConfigError("onnx", before, reason=told)
    shapes = [{name: list(value.shape) for name, value in feeds.items()} for feeds in sets]
    return Proof(ratios, shapes, bound, inputs is None)


def _placed(name: str, value: Any, layout: Mapping[str, str]) -> Any:
    """Returns an array in the new layout of its input or output."""
    asked = layout.get(name)
    return (
        value if asked is None else np.ascontiguousarray(np.transpose(value, permutation(asked, value.ndim)))
    )


def _ratio(wanted: Any, got: Any) -> float:
    """Returns the signal-to-noise ratio of an output in dB; minus infinity if integers or strings differ."""
    if isinstance(wanted, (list, tuple)):
        same = isinstance(got, (list, tuple)) and len(wanted) == len(got)
        return min(map(_ratio, wanted, got), default=EQUAL) if same else -EQUAL
    a: NDArray[Any] = np.asarray(wanted)
    if a.dtype.kind == "f":
        return sqnr(a, got)
    return EQUAL if np.array_equal(a, np.asarray(got)) else -EQUAL
