"""The base classes of decisions, and the parser of values such as argmax(1) and boxes(score=0.4).

    Request ── fitted(first outputs of the float model) ──> Decision ── joined, agree, agreement ──> figures

`joined` gets all outputs of a model, so a decision may cover several of them. Later checks store, compare
and count only what it returns. Only functions that compute import NumPy, since the command line parses
decisions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qatkit.config.fields import values_of
from qatkit.tasks.base import Agreed, Agreement
from qatkit_verify.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

KEY = "verify.decision"
_CALL = re.compile(r"([a-z]+)(?:\((.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class Seen:
    """All outputs of a float model for its first batch.

    Attributes:
        outputs: all outputs for that batch.
        names: names of the outputs.
        samples: number of samples in the batch.
    """

    outputs: Sequence[Array]
    names: Sequence[str]
    samples: int

    @property
    def first(self) -> Array:
        """The first output."""
        return self.outputs[0]

    def __str__(self) -> str:
        named = zip(self.names, self.outputs, strict=True)
        return ", ".join(f"'{name}' {list(one.shape)}" for name, one in named)


class Request(ABC):
    """A decision as the user requests it. Subclasses are frozen dataclasses whose fields are the arguments.

    Attributes:
        name: the name that the user types.
        call: the name with its main argument, for messages.
    """

    name: ClassVar[str]
    call: ClassVar[str]

    @property
    @abstractmethod
    def title(self) -> str:
        """The name in reports, after "same"."""

    @classmethod
    def takes(cls, seen: Seen) -> bool:
        """Returns whether the decision fits these outputs with some arguments; by default true."""
        return True

    @abstractmethod
    def fitted(self, seen: Seen) -> Decision:
        """Returns the decision for a model with these outputs.

        Raises:
            MisfitError: the outputs do not fit.
        """

    def fits(self, shape: Sequence[int], samples: int) -> bool:
        """Returns whether the first output may have this shape for `samples` samples.

        By default the size of its first axis is a multiple of `samples`; rank 0 fits one sample.
        """
        return shape[0] % samples == 0 if shape else samples == 1


class Decision(ABC):
    """A rule that decides whether the outputs of two models agree.

    Attributes:
        decides: whether `decide` returns a decision on the first output.
    """

    decides: ClassVar[bool] = False

    @property
    @abstractmethod
    def title(self) -> str:
        """The name in reports, after "same"."""

    def agree(self, exact: Array, found: Array) -> Array:
        """Returns where two models agree, booleans [N, ...], from the `joined` outputs of each.

        By default they agree where `decide` returns equal values.
        """
        same: Array = self.decide(exact) == self.decide(found)
        return same

    def agreement(self) -> Agreement:
        """Returns a new `Agreement`, the figure in reports; by default the share of `agree`."""
        return Agreed(self.agree)

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns the outputs to compare, float32 [N, ...], from all outputs; by default the first."""
        import numpy as np

        return np.atleast_1d(np.asarray(outputs[0], np.float32))

    def decide(self, output: Array) -> Array:
        """Returns the decision on the first output, [N, ...]; by default the output itself."""
        return output

    @property
    def rule(self) -> Callable[[Array], Any] | None:
        """The value of `Task.rule`.

        Without a decision on the first output, outputs agree if their values are less than a quantization
        step apart.
        """
        return self.decide if self.decides else undecided


def undecided(output: Array) -> None:
    """Decides nothing; it is the rule for `qatkit_verify.compare` if outputs have no decision."""


class MisfitError(ValueError):
    """Raised for outputs that do not fit a decision; the message is a noun phrase that reads on after "expected"."""


def parsed(asked: str, known: Mapping[str, type[Request]]) -> Request | None:
    """Returns the request that a text describes; None for other texts, such as the dotted path of a function.

    Raises:
        ConfigError: a name or an argument is unknown, or the value of an argument is not allowed.
    """
    call = _CALL.fullmatch(asked.strip())
    if call is None and "(" not in asked:
        return None
    name, inside = call.groups() if call is not None else ("", "")
    if name not in known:
        forms = ", ".join(kind.call for kind in known.values())
        near = did_you_mean(name, known, n=1) if name else ""
        raise ConfigError(KEY, asked, f"auto, {forms}, or the dotted path of a function{near}")
    kind = known[name]
    made = kind(**_arguments(asked, kind, inside or ""))
    for argument, value, limit, _ in values_of(made, ""):
        if limit is not None and not limit.holds(value):
            raise ConfigError(KEY, asked, f"{limit.expected()} for {argument}")
    return made


def _arguments(asked: str, kind: type[Request], inside: str) -> dict[str, Any]:
    """Returns the arguments of a call by name; the user may omit the name of the first one."""
    hints = {
        one.name: typing.get_type_hints(kind)[one.name]
        for one in dataclasses.fields(kind)  # type: ignore[arg-type]  # subclasses are dataclasses
    }
    found: dict[str, Any] = {}
    for place, part in enumerate(inside.split(",") if inside.strip() else ()):
        name, given, value = (text.strip() for text in part.partition("="))
        if not given and place == 0 and hints:
            name, value = next(iter(hints)), name
        if name not in hints or not value or name in found:
            names = f"each NAME once, from {', '.join(hints)}"
            allowed = f"{kind.call} or {kind.name}(NAME=VALUE, ...) with {names}"
            raise ConfigError(KEY, asked, allowed if hints else f"{kind.name} without arguments")
        found[name] = _value(asked, name, value, hints[name])
    return found


def _value(asked: str, name: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    with contextlib.suppress(ValueError, OverflowError):
        if math.isfinite(number := kind(text)):
            return number
    raise ConfigError(KEY, asked, f"{'an integer' if kind is int else 'a number'} for {name}")
