"""Texts as rows of tokens: all rows are padded to the length of the longest text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit.data.tokenizer import PADDING, POSITIONS, tokenizer_of
from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    from qatkit.data.request import Request

# Inputs of text models.
TOKENS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
_LONGEST = 128  # maximum number of tokens of a text if data.context is null
_DTYPES = {TOKENS: np.int32, MASK: np.bool_, TYPES: np.int8}
_PARTS = {TOKENS: "ids", MASK: "attention_mask", TYPES: "type_ids"}  # attributes of an encoding by tokenizers


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, by the names of a model's inputs.

    Attributes:
        arrays: input_ids int32, attention_mask bool, and token_type_ids int8 if the model has this input, each
            [rows, T].
    """

    arrays: Mapping[str, NDArray[Any]]

    def at(self, rows: slice) -> dict[str, NDArray[Any]]:
        """Returns the inputs of some rows, int64 [rows, T]."""
        return {name: one[rows].astype(np.int64) for name, one in self.arrays.items()}


def token_rows(parts: Sequence[Sequence[str | tuple[str, str]]], asked: Request) -> list[Rows]:
    """Returns, for each split in `parts`, a row of tokens per text or pair of texts.

    All rows have the length of the longest one. Rows longer than `data.context` (by default 128, or the
    model's positions if it has fewer) are truncated.

    Raises:
        ConfigError: `data.context` exceeds the model's positions, or as for `qatkit.data.tokenizer.tokenizer_of`.
    """
    settings, about = asked.settings, asked.about
    positions = int(about.get(POSITIONS, settings.context or _LONGEST))
    context = settings.context or min(_LONGEST, positions)
    if context > positions:
        raise ConfigError(
            "data.context", context, f"at most {positions}, the number of positions of the model"
        )
    tokenizer = tokenizer_of(settings, about)
    tokenizer.enable_truncation(context)
    coded = [tokenizer.encode_batch(list(part)) for part in parts]
    longest = max(len(one.ids) for part in coded for one in part)
    names = [TOKENS, MASK, *(port.name for port in asked.inputs if port.name == TYPES)]
    return [Rows({name: _filled(part, longest, name, about) for name in names}) for part in coded]


def _filled(coded: Sequence[Any], longest: int, name: str, about: Mapping[str, str]) -> NDArray[Any]:
    """Returns the values of the input `name` for all rows, [rows, T]."""
    value = int(about.get(PADDING, 0)) if name == TOKENS else 0
    found: NDArray[Any] = np.full((len(coded), longest), value, _DTYPES[name])
    for row, one in enumerate(coded):
        found[row, : len(one.ids)] = getattr(one, _PARTS[name])
    return found
