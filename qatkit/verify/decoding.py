"""Compares the file of a decoder, which caches keys and values, with the model's file for complete windows.

complete windows         perplexity and likeliest tokens of both files
a window in two parts    the second part token by token, after the keys and values of the first
greedy decoding          each token computed with cached keys and values, and again from all tokens before it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.session import open_session

Array = NDArray[Any]
_PAST = "past_key_values."
RISE = 0.005  # maximum relative increase of perplexity at accuracy level 4
_FASTER = 1.02
_ROUNDS, _TIMED = 5, 9  # rounds, and tokens per round; the first token belongs to the prompt


class OnnxDecoder:
    """The file of a decoder.

    Args:
        path: the file.
        threads: the number of intra-op threads.
        options: the session config entries.
    """

    def __init__(self, path: Path, threads: int, options: Mapping[str, str] | None = None) -> None:
        self._session = open_session(path, threads=threads, options=options)
        self._past = [one for one in self._session.get_inputs() if one.name.startswith(_PAST)]

    def empty(self, rows: int) -> list[Array]:
        """Returns the keys and values of zero tokens."""
        return [np.zeros((rows, one.shape[1], 0, one.shape[3]), np.float32) for one in self._past]

    def run(self, tokens: Array, past: list[Array], mask: Array | None = None) -> tuple[Array, list[Array]]:
        """Returns the logits [N, T, V], and the keys and values of all tokens.

        Args:
            tokens: the new tokens, [N, T].
            past: the keys and values of the P earlier tokens.
            mask: the attention mask, 0 for padding, [N, P + T]; None: no token is padding.
        """
        before = past[0].shape[2]
        every = np.ones((len(tokens), before + tokens.shape[1]), np.int64) if mask is None else mask
        places = np.maximum(every.cumsum(1) - 1, 0)[:, before:]
        feeds = {"input_ids": tokens, "attention_mask": every, "position_ids": places}
        feeds |= {one.name: value for one, value in zip(self._past, past, strict=True)}
        logits, *present = self._session.run(None, feeds)
        return logits, present

    def greedy(self, tokens: Array, count: int) -> tuple[list[int], float]:
        """Returns `count` greedy tokens after `tokens` [1, T], and the seconds per token after the first."""
        logits, past = self.run(tokens, self.empty(1))
        made = [int(logits[0, -1].argmax())]
        start = time.perf_counter()
        for _ in range(count - 1):
            logits, past = self.run(np.array([[made[-1]]], np.int64), past)
            made.append(int(logits[0, -1].argmax()))
        return made, (time.perf_counter() - start) / max(1, count - 1)


@dataclass(frozen=True)
class Decoding:
    """A comparison of a decoder with the file for complete windows.

    Attributes:
        windows, tokens: the number of compared windows, and of the tokens in them.
        perplexity, whole: the perplexity of the decoder and of the other file on these windows.
        agreement: the share of likeliest next tokens that are the same, 0..1.
        steps: the number of tokens that are computed one by one, and the number of them after which both files
            predict the same next token.
        greedy: the number of tokens of a generated text, and the number of them before the first one that the
            other file does not predict.
        tokens_per_second: the speed of generating that text, one token at a time.
    """

    windows: int
    tokens: int
    perplexity: float
    whole: float
    agreement: float
    steps: tuple[int, int]
    greedy: tuple[int, int]
    tokens_per_second: float


@dataclass(frozen=True)
class Levels:
    """A comparison of a decoder at accuracy level 4 with itself at level 0.

    Attributes:
        perplexity: the perplexities at level 0 and at level 4.
        agreement: the share of likeliest next tokens that are the same, 0..1.
        ratio: the speed of level 4 relative to level 0, the median of the rounds.
        ratio_low: the 10th percentile of the rounds.
    """

    perplexity: tuple[float, float]
    agreement: float
    ratio: float
    ratio_low: float

    @property
    def pays(self) -> bool:
        """Returns whether `ratio_low` exceeds 1.02 and perplexity rises by at most the share `RISE`."""
        before, now = self.perplexity
        return self.ratio_low > _FASTER and now <= (1 + RISE) * before


def levels(first: OnnxDecoder, second: OnnxDecoder, windows: Sequence[Array]) -> Levels:
    """Compares a decoder at accuracy level 0 with the same decoder at level 4.

    Args:
        first, second: the decoder at level 0 and at level 4.
        windows: windows of tokens, each [1, T].
    """
    nats, same, count = [list[float](), list[float]()], 0, 0
    for tokens in windows:
        found = [one.run(tokens, one.empty(1))[0][0] for one in (first, second)]
        for kept, logits in zip(nats, found, strict=True):
            kept.append(_nats(logits, tokens[0]))
        same, count = same + int((found[0].argmax(-1) == found[1].argmax(-1)).sum()), count + tokens.size
    prompt = windows[0][:, : max(2, windows[0].shape[1] // 4)]
    ratios = []
    for _ in range(_ROUNDS):
        before, now = (one.greedy(prompt, _TIMED)[1] for one in (first, second))
        ratios.append(before / now)
    own, other = (math.exp(sum(one) / len(one)) for one in nats)
    low, middle = np.quantile(ratios, [0.1, 0.5])
    return Levels((own, other), same / count, float(middle), float(low))


def decoding(
    decoder: OnnxDecoder, whole: Callable[[Array], Array], windows: list[Array], steps: int, generated: int
) -> Decoding:
    """Compares a decoder with a file for complete windows.

    Args:
        decoder: the decoder.
        whole: returns the other file's logits [N, T, V] for tokens [N, T].
        windows: windows of tokens, each [1, T].
        steps: the number of tokens at the end of the first window that are computed one by one.
        generated: the number of tokens that the decoder generates greedily after the first quarter of the
            first window.
    """
    nats, same, count = [list[float](), list[float]()], 0, 0
    for tokens in windows:
        found, exact = decoder.run(tokens, decoder.empty(len(tokens)))[0], whole(tokens)
        for kept, logits in zip(nats, (found, exact), strict=True):
            kept.append(_nats(logits[0], tokens[0]))
        same, count = same + int((found.argmax(-1) == exact.argmax(-1)).sum()), count + tokens.size
    own, other = (math.exp(sum(one) / len(one)) for one in nats)
    made, seconds = decoder.greedy(first := windows[0][:, : max(2, windows[0].shape[1] // 4)], generated)
    return Decoding(
        len(windows), count, own, other, same / count, _by_steps(decoder, whole, windows[0], steps),
        (generated, _equal(whole, first, made)), 1 / seconds if seconds else math.inf,
    )  # fmt: skip


def _by_steps(
    decoder: OnnxDecoder, whole: Callable[[Array], Array], tokens: Array, steps: int
) -> tuple[int, int]:
    """Returns how many tokens ran one by one, and how many of them give the same next token in both files."""
    split = max(1, tokens.shape[1] - steps)
    exact = whole(tokens)[0].argmax(-1)
    _, past = decoder.run(tokens[:, :split], decoder.empty(1))
    same = 0
    for place in range(split, tokens.shape[1]):
        logits, past = decoder.run(tokens[:, place : place + 1], past)
        same += int(logits[0, -1].argmax() == exact[place])
    return tokens.shape[1] - split, same


def _equal(whole: Callable[[Array], Array], prompt: Array, made: list[int]) -> int:
    """Returns the number of tokens in `made` before the first one that `whole` does not predict."""
    text = np.concatenate([prompt, np.array([made], np.int64)], 1)
    likeliest = whole(text[:, :-1])[0].argmax(-1)[prompt.shape[1] - 1 :]
    differs = np.nonzero(likeliest != np.array(made))[0]
    return int(differs[0]) if len(differs) else len(made)


def _nats(logits: Array, tokens: Array) -> float:
    """Returns the mean cross-entropy, in nats per token, of the logits [T, V] for a window [T]."""
    rows = logits[:-1].astype(np.float64)
    largest = rows.max(1, keepdims=True)
    total = largest[:, 0] + np.log(np.exp(rows - largest).sum(1))
    return float((total - rows[np.arange(len(rows)), tokens[1:]]).mean())
