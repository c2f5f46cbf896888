"""The embedding of a sentence from the embeddings of its tokens, as in sentence-transformers.

tokens [N, T, D], mask [N, T] ── mean, first token or maximum ── scaled to length 1 ──> [N, D]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit_verify.errors import ConfigError, first_line

Pooling = Callable[[Tensor, Tensor], Tensor]
_MODE = "pooling_mode_"


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    shares = mask[..., None].to(tokens.dtype)
    return (tokens * shares).sum(1) / shares.sum(1).clamp(min=1)


def _first(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens[:, 0]


def _largest(tokens: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[..., None] != 0, tokens, torch.finfo(tokens.dtype).min).amax(1)


_KNOWN: dict[str, Pooling] = {"mean_tokens": _mean, "cls_token": _first, "max_tokens": _largest}


def pooling_of(place: str) -> Pooling:
    """Returns the pooling of a sentence-transformers folder; the mean if it has no 1_Pooling/config.json.

    The pooled embeddings are scaled to length 1.

    Raises:
        ConfigError: the pooling is unknown, there are several poolings, or the file cannot be read.
    """
    file = Path(place, "1_Pooling", "config.json")
    asked = ["mean_tokens"]
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            asked = [
                key.removeprefix(_MODE) for key, on in found.items() if key.startswith(_MODE) and on is True
            ]
            if mode := found.get("pooling_mode"):  # written by newer releases
                asked = [{"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}.get(mode, mode)]
        except (OSError, ValueError, AttributeError) as error:
            reason = f"{file} cannot be read ({first_line(error)})"
            raise ConfigError("model.name", f"hf/{place}", reason=reason) from error
    if len(asked) != 1 or asked[0] not in _KNOWN:
        named = ", ".join(asked) or "none"
        reason = f"{file} must name exactly one of {', '.join(_KNOWN)}; it names {named}"
        raise ConfigError("model.name", f"hf/{place}", reason=reason)
    pool = _KNOWN[asked[0]]
    return lambda tokens, mask: F.normalize(pool(tokens, mask), dim=1)
