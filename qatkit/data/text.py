"""Text for language models: the .txt files of a folder, as windows of consecutive tokens.

    DIR/**/*.txt   names with "test" ─┐                                    ┌──> verify
                   the others ────────┴─ tokenizer ─ windows of T tokens ──┴──> calibrate and train

If all names or none have "test", the first half of the text calibrates and the second half verifies. Windows do not
overlap, no token is added to them, and tokens after the last whole window are left out, as in GPTQ's
measurement of perplexity.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.schema import DataConfig
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit.data.tokenizer import POSITIONS, tokenizer_of
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.pictures import files_below

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INPUT = "input_ids"
CONTEXT = 512
_SOURCE = "qatkit.data.text.text"
_LONGEST = (
    1 << 24
)  # characters that are tokenized at once, since a tokenizer needs many times the memory of its text


class TokenWindows:
    """A dataset of windows of consecutive tokens; an item is ({"input_ids": int64 [1, T]}, target).

    Args:
        tokens: the tokens, int32 [windows, T].

    Attributes:
        targets: the tokens of each window, as the bytes of int32.
    """

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self._tokens = tokens
        self.targets = [window.tobytes() for window in tokens]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], bytes]:
        return {INPUT: self._tokens[index][None].astype(np.int64)}, self.targets[index]


def text(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns windows of `data.context` tokens of the texts in a folder.

    Raises:
        ConfigError: the folder does not exist or has no text, a file is not UTF-8, `data.context` exceeds the
            model's positions or the tokens of a split, or as for `qatkit.data.tokenizer.tokenizer_of`.
    """
    asked = request if request is not None else Request(DataConfig())
    top, context = data_folder(_SOURCE, root), asked.settings.context or CONTEXT
    files, _ = files_below(top, lambda name: name.lower().endswith(".txt"), "data.root")
    if not files:
        raise ConfigError("data.root", root, f"{FOLDERS[_SOURCE]}; it has no .txt file")
    longest = int(asked.about.get(POSITIONS, context))
    if context > longest:
        raise ConfigError("data.context", context, f"at most {longest}, the number of positions of the model")
    tokenizer = tokenizer_of(asked.settings, asked.about)
    parts = [_of_files([one for one in files if _is_test(one) is kind]) for kind in (False, True)]
    if all(parts):
        train, test = (
            TokenWindows(_windows(tokenizer, part, context, name))
            for part, name in zip(parts, _NAMES, strict=True)
        )
        return Splits(train, test, (), arrays=True)
    whole = _windows(
        tokenizer, "".join(parts), context, "text, half of which is used for verification,", least=2
    )
    half = (len(whole) + 1) // 2
    amount = "no text" if parts[0] else "all text"
    note = f"{amount} is in files with 'test' in their names, so the first half calibrates and the second half verifies"
    return Splits(TokenWindows(whole[:half]), TokenWindows(whole[half:]), (), notes=(note,), arrays=True)


_NAMES = ("calibration text", "test text")


def _is_test(path: str) -> bool:
    return "test" in os.path.basename(path).lower()


def _of_files(paths: Sequence[str]) -> str:
    found = []
    for path in sorted(paths):
        try:
            found.append(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            told = f"{os.path.basename(path)} is not UTF-8 (byte {error.start})"
            raise ConfigError("data.root", os.path.dirname(path), reason=told) from error
    return "\n".join(found)


def _windows(tokenizer: Tokenizer, text: str, context: int, name: str, least: int = 1) -> NDArray[np.int32]:
    """Returns the tokens of a text, int32 [windows, context], with at least `least` windows."""
    pieces = _pieces(text)
    ids = [np.asarray(tokenizer.encode(one, add_special_tokens=False).ids, np.int32) for one in pieces]
    tokens = np.concatenate(ids) if ids else np.zeros(0, np.int32)
    if len(tokens) < least * context:
        has = f"the {name} has {counted(len(tokens), 'token')}"
        if len(tokens) < least:
            raise ConfigError("data.context", context, reason=f"{has}; add text to the folder data.root")
        raise ConfigError("data.context", context, f"at most {len(tokens) // least}, since {has}")
    return tokens[: len(tokens) // context * context].reshape(-1, context)


def _pieces(text: str) -> list[str]:
    """Returns a text in pieces that end at line ends, or after `_LONGEST` characters if a line is longer."""
    found, start = list[str](), 0
    while start < len(text):
        end = start + _LONGEST
        if end < len(text):
            end = max(text.rfind("\n", start, end) + 1, 0) or end
        found.append(text[start:end])
        start = end
    return found
