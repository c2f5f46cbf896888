"""A causal language model of Hugging Face as a decoder, with keys and values as inputs and outputs.

    input_ids [N, T], mask [N, T], position_ids [N, T], past_mask [N, P], past.0.key [N, H, P, D], ...
        ──> logits [N, T, V], present.0.key [N, H, P + T, D], ...

P is 0 at the beginning of a text. In the file, the two masks are parts of one mask
(`qatkit.export.decoder_inputs`). Here each mask has the length of the tokens that it covers, so that every
dynamic axis has its own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qatkit_verify.errors import ConfigError, first_line

KEY = "export.decoder"
TOKENS, MASK, POSITIONS, PAST_MASK = "input_ids", "mask", "position_ids", "past_mask"
_CLOSE = 1e-3  # allowed difference as a share of the largest logit
_UNLIMITED = 1 << 20
_FULL, _SLIDING = "full_attention", "sliding_attention"


def past_names(layers: int) -> list[str]:
    """Returns the names of the keys and values of earlier tokens in `forward`, layer by layer."""
    return [f"past_{layer}_{kind}" for layer in range(layers) for kind in ("key", "value")]


class Decoder:
    """A decoder that runs on the modules of a language model, with unchanged paths and weights.

    Args:
        model: a model built by `qatkit.models.hf_models`.

    Attributes:
        layers: number of layers with keys and values.
        heads: number of heads of keys and values.
        width: number of features of a head.
        longest: maximum length of a text. If layers of the model attend only to a window of tokens, it is the
            length of the window, since all layers of the decoder attend to all earlier tokens.

    Raises:
        ConfigError: the model is not a causal language model of Hugging Face, or a layer does not store the
            keys and values of all tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        config: Any = getattr(model, "config", None)
        if config is None or not hasattr(type(model).__mro__[1], "prepare_inputs_for_generation"):
            allowed = "false, except for a causal language model of Hugging Face (model.name=hf/...)"
            raise ConfigError(KEY, True, allowed)
        kinds = {*(getattr(config, "layer_types", None) or [_FULL])}
        others = sorted(kinds - {_FULL, _SLIDING})
        if others or getattr(config, "is_encoder_decoder", False):
            named = ", ".join(others) or "an encoder"
            raise ConfigError(
                KEY, True, f"false, since the model has {named}, whose state is not past keys and values"
            )
        attends_to_all = _SLIDING not in kinds and getattr(config, "layer_types", None)
        window = None if attends_to_all else getattr(config, "sliding_window", None)
        positions = getattr(config, "max_position_embeddings", None)
        self.longest = min(one for one in (window, positions, _UNLIMITED) if one)
        self.layers, self.heads, self.width = self._cache_shape()

    @contextmanager
    def as_forward(self) -> Iterator[nn.Module]:
        """Replaces the model's forward with that of the decoder within the context, and yields the model."""
        own = type(self.model)
        theirs = own.__mro__[1]
        self.model.__class__ = type(theirs.__name__, (theirs,), {"forward": _forward(theirs, self.layers)})
        try:
            yield self.model
        finally:
            self.model.__class__ = own

    def example(self, tokens: Tensor, past: int) -> dict[str, Tensor]:
        """Returns the inputs for tokens [N, past + T] after the first `past` tokens have been computed."""
        _, *computed = self(tokens[:, :past], self.empty(len(tokens)))
        return self.inputs(tokens[:, past:], computed)

    def empty(self, rows: int) -> list[Tensor]:
        """Returns the empty keys and values at the beginning of a text, each [rows, heads, 0, width]."""
        return [torch.zeros(rows, self.heads, 0, self.width)] * (2 * self.layers)

    def inputs(self, tokens: Tensor, past: list[Tensor]) -> dict[str, Tensor]:
        """Returns the inputs for tokens [N, T] that follow the tokens of `past`, without padding."""
        rows, count = tokens.shape
        before = past[0].shape[2]
        places = torch.arange(before, before + count).repeat(rows, 1)
        return {
            TOKENS: tokens,
            MASK: torch.ones_like(tokens),
            POSITIONS: places,
            PAST_MASK: torch.ones(rows, before, dtype=torch.int64),
            **dict(zip(past_names(self.layers), past, strict=True)),
        }

    def __call__(self, tokens: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns logits and the keys and values of all tokens."""
        with self.as_forward() as model, torch.no_grad():
            found: tuple[Tensor, ...] = model(**self.inputs(tokens, past))
        return found

    def axes(self) -> dict[str, dict[int, str]]:
        """Returns the names of the dynamic axes except the batch axis, by input and axis."""
        lengths = {name: {1: "sequence"} for name in (TOKENS, MASK, POSITIONS)}
        return lengths | {PAST_MASK: {1: "past"}} | {name: {2: "past"} for name in past_names(self.layers)}

    def prove(self, tokens: Tensor) -> None:
        """Checks that tokens [N, T] in two parts give the same logits as all of them at once.

        Raises:
            ConfigError: the logits differ, for example because the model computes its positions or its mask by itself.
        """
        with torch.no_grad():
            whole: Tensor = self.model(tokens)
        half = tokens.shape[1] // 2
        first, *past = self(tokens[:, :half], self.empty(len(tokens)))
        second, *_ = self(tokens[:, half:], past)
        lost = float((torch.cat([first, second], 1) - whole).abs().max() / whole.abs().max())
        if not lost <= _CLOSE:
            told = f"with keys and values of earlier tokens the logits differ by {lost:.2g} of the largest"
            raise ConfigError(KEY, True, reason=f"{told}; set export.decoder=false to export only the model")

    def _cache_shape(self) -> tuple[int, int, int]:
        theirs = type(self.model).__mro__[1]
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        try:
            with torch.no_grad():
                found = theirs.forward(self.model, input_ids=tokens, use_cache=True).past_key_values  # type: ignore[attr-defined]
            shapes = {tuple(one.shape) for layer in found.layers for one in (layer.keys, layer.values)}
            ((_, heads, _, width),) = shapes
        except Exception as error:  # a cache of another kind may raise anything
            cause = first_line(error)[:160]
            allowed = f"false, since the model does not store keys and values of one shape ({cause})"
            raise ConfigError(KEY, True, allowed) from error
        return len(found.layers), heads, width


def _forward(theirs: Any, layers: int) -> Any:
    """Returns the forward method of a decoder for a type of model."""
    from transformers.cache_utils import DynamicCache

    def forward(
        self: nn.Module,
        input_ids: Tensor,
        mask: Tensor,
        position_ids: Tensor,
        past_mask: Tensor,
        **past: Tensor,
    ) -> tuple[Tensor, ...]:
        cache, given = DynamicCache(), list(past.values())
        for layer in range(layers):
            cache.update(given[2 * layer], given[2 * layer + 1], layer)
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        own = (place[None, :] <= place[:, None])[None] & (mask != 0)[:, None, :]
        earlier = (past_mask != 0)[:, None, :].expand(-1, input_ids.shape[1], -1)
        seen = torch.cat([earlier, own], 2)[:, None]
        bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        found = theirs.forward(
            self,
            input_ids=input_ids,
            attention_mask=bias,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        made = [one for layer in found.past_key_values.layers for one in (layer.keys, layer.values)]
        return found.logits, *made

    return forward
