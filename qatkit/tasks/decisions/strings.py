"""The decision on texts of CTC recognizers: the best class of each step, with repeats merged and blanks removed.

    steps   a a _ a b b _ _        the best classes, _ the blank
    string  a     a b

Source: Graves et al., "Connectionist temporal classification", 2006, section 3.2 (best path decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.config.fields import setting
from qatkit.tasks.base import Agreement
from qatkit.tasks.decisions.base import Decision, MisfitError, Request, Seen

if TYPE_CHECKING:
    from qatkit.tasks.decisions.base import Array


@dataclass(frozen=True)
class Strings(Request, Decision):
    """A decision on the recognized strings, for outputs [N, steps, classes] or [steps, N, classes]."""

    name: ClassVar[str] = "strings"
    call: ClassVar[str] = "strings(BLANK)"
    decides: ClassVar[bool] = True
    blank: int = setting(0, "class of the blank, which stands for no character; -1: the last class")

    @property
    def title(self) -> str:
        return "recognized text"

    @classmethod
    def takes(cls, seen: Seen) -> bool:
        return seen.first.ndim == 3 and seen.samples in seen.first.shape[:2] and seen.first.shape[2] > 1

    def fitted(self, seen: Seen) -> Decision:
        if not self.takes(seen):
            raise MisfitError("a first output [N, steps, classes] or [steps, N, classes]")
        classes = seen.first.shape[2]
        if not -classes <= self.blank < classes:
            raise MisfitError(f"a blank from 0 to {classes - 1} (or -1 for the last class)")
        if seen.first.shape[0] == seen.samples:
            return self
        return _StepsFirst(self.blank, seen.first.shape[0])

    def decide(self, output: Array) -> Array:
        """Returns the strings as objects [N]; each is the bytes of its int32 classes."""
        import numpy as np

        texts = np.empty(len(output), object)
        for row, text in enumerate(self.texts(output)):
            texts[row] = np.array(text, np.int32).tobytes()
        return texts

    def texts(self, output: Array) -> list[list[int]]:
        """Returns the classes of the characters of each sample."""
        import numpy as np

        best, blank = output.argmax(2), self.blank % output.shape[2]
        changes = np.diff(best, axis=1, prepend=-1) != 0
        return [row[kept].tolist() for row, kept in zip(best, changes & (best != blank), strict=True)]

    def agreement(self) -> Agreement:
        return _Texts(self)

    def fits(self, shape: Sequence[int], samples: int) -> bool:
        return samples in shape[:2] if len(shape) == 3 else super().fits(shape, samples)


@dataclass(frozen=True)
class _StepsFirst(Strings):
    """A decision on strings in an output [steps, N, classes], after its first two axes are swapped."""

    decides: ClassVar[bool] = False  # its first axis is not that of the samples
    steps: int = 0

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns [N, steps, classes].

        The outputs of a file with a batch size of 1 arrive concatenated along their first axis, as
        [N * steps, 1, classes].
        """
        import numpy as np

        first = np.asarray(outputs[0], np.float32)
        if first.shape[1] == 1 and first.shape[0] % self.steps == 0:
            return first.reshape(-1, self.steps, first.shape[2])
        return np.moveaxis(first, 1, 0)


class _Texts(Agreement):
    """The share of equal strings; it also reports the mean edit similarity of all strings.

    Args:
        strings: the decision that reads strings from the outputs.
    """

    def __init__(self, strings: Strings) -> None:
        self._strings = strings
        self._samples = self._same = self._characters = 0
        self._similarity = 0.0

    def add(self, exact: Array, found: Array) -> None:
        for wanted, text in zip(self._strings.texts(exact), self._strings.texts(found), strict=True):
            self._samples, self._same = self._samples + 1, self._same + (wanted == text)
            self._similarity += similarity(wanted, text)
            self._characters += len(wanted) + len(text)

    @property
    def share(self) -> float:
        return self._same / self._samples

    @property
    def remark(self) -> str:
        return f"mean edit similarity {100 * self._similarity / self._samples:.2f} %"

    @property
    def doubt(self) -> str:
        return "" if self._characters else "no string has a character in either file"


def similarity(first: Sequence[int], second: Sequence[int]) -> float:
    """Returns the edit similarity, 0..1: 1 minus the edit distance divided by the length of the longer sequence.

    It is 1 for two empty sequences.

    Source: Levenshtein, "Binary codes capable of correcting deletions, insertions and reversals", 1966.
    """
    if first == second:
        return 1.0
    row = list(range(len(second) + 1))
    for place, one in enumerate(first, 1):
        before, row[0] = row[0], place
        for column, other in enumerate(second, 1):
            before, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, before + (one != other)),
            )
    return 1 - row[-1] / max(len(first), len(second))
