"""Exports the decoder of a language model: the finished module with keys and values of earlier tokens as inputs.

    float model ── capture with keys and values ──> prepare ── weights of the finished module ──> convert ──> ONNX

The verified file processes whole windows, as perplexity requires. Generating text requires a file that
computes one token at a time. Both have the same weights, and `DecoderCheck` compares them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qatkit import handover, models
from qatkit.config.schema import Config
from qatkit.data.tokenizer import save_tokenizer
from qatkit.export.accuracy_level import FLOAT, INT8, at_level
from qatkit.export.decoder_inputs import for_runtimes
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.jobs.stages import Conditional, State
from qatkit.models.hf_decoder import KEY, MASK, PAST_MASK, Decoder, past_names
from qatkit.records.decoder_files import (
    DECODER_FILE,
    DECODER_FILES,
    DECODER_FOLDER,
    GENAI_FILE,
    GENERATE_FILE,
    genai_config,
)
from qatkit.records.plan import Planned
from qatkit.run.backend import backend_of
from qatkit.run.export import DEQUANTIZE, with_blocks
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.train.module import QATModule
from qatkit.verify.decoding import OnnxDecoder, levels
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import unfinished, write_text

_NEW, _PAST = 11, 7  # numbers of tokens in the example, chosen to differ from all widths of models
_PROVEN = 16  # number of tokens that are computed in two parts, to check the decoder before the long stages


class CheckDecoder(Conditional):
    """Checks, before the long stages, that a decoder can be made from the model."""

    def done(self, state: State) -> bool:
        return not state.run.config.export.decoder

    def run(self, state: State) -> State:
        config = state.run.config
        if not backend_of(config).weights_alone:
            allowed = f"false with backend={backend_of(config).name}, since a decoder has float activations"
            raise ConfigError(KEY, True, f"{allowed} (use backend=weight_only)")
        if config.export.encrypt is not None:
            raise ConfigError(
                KEY, True, "false with export.encrypt, since the folder of a decoder cannot be encrypted"
            )
        if config.schedule.float_epochs:
            raise ConfigError(
                KEY,
                True,
                "false with schedule.float_epochs above 0, since a decoder is made from the model as it was loaded",
            )
        decoder, tokens = Decoder(state.model), _tokens(state)
        if tokens.shape[1] > decoder.longest:
            allowed = f"at most {decoder.longest}, the attention window of the model, with {KEY}=true"
            raise ConfigError("data.context", tokens.shape[1], allowed)
        decoder.prove(tokens[:, :_PROVEN])
        return state


class WriteDecoder(Conditional):
    """Writes the decoder's folder."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        if self.done(state):
            return ()
        first = state.run.seconds.get("export_first")
        return (stage("decoder", "a file that continues text", lambda: pace.known(first)),)

    def done(self, state: State) -> bool:
        return not state.run.config.export.decoder

    def run(self, state: State) -> State:
        run, target = state.run, state.run.folder / DECODER_FOLDER
        with run.stage("decoder", "exporting the decoder with its cache of keys and values"):
            new = unfinished(target)
            new.mkdir()
            try:
                notes = _write(state, new)
                shutil.rmtree(target, ignore_errors=True)
                os.replace(new, target)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        names = tuple(f"{DECODER_FOLDER}/{name}" for name in DECODER_FILES)
        written = state.exported
        return replace(
            state, written=replace(written, files=(*written.files, *names), notes=(*written.notes, *notes))
        )


def _write(state: State, folder: Path) -> list[str]:
    """Writes every file of a decoder; returns notes for the report."""
    config, decoder = state.run.config, Decoder(state.model)
    example = decoder.example(_tokens(state)[:, : _PAST + _NEW], _PAST)
    path = folder / DECODER_FILE
    with decoder.as_forward() as model:
        module = _module(state, Captured(model, example, decoder.axes()), example)
        not_free = export_onnx(module.convert().graph, example, path, opset=config.export.opset)
    for_runtimes(path, MASK, PAST_MASK, past_names(decoder.layers))
    notes = [f"{DECODER_FOLDER}/{DECODER_FILE}: {not_free}"] if not_free else []
    if config.export.packed_weights == DEQUANTIZE:
        notes += with_blocks(path)
    notes += _choose_level(state, path)
    about = models.declared(config.model, None, config.task).about
    save_tokenizer(config.data, about, folder)
    sizes = {
        "layers": decoder.layers,
        "heads": decoder.heads,
        "width": decoder.width,
        "context": decoder.longest,
    }
    settings: dict[str, Any] = cast(Any, state.model).config.to_dict()
    told = genai_config(settings, _ends(state.model), sizes)
    write_text(folder / GENAI_FILE, json.dumps(told, indent=1) + "\n")
    # Not imported at the top, since it needs tokenizers, which only language models require.
    shutil.copyfile(Path(str(handover.__file__)).with_name(GENERATE_FILE), folder / GENERATE_FILE)
    return notes


def _choose_level(state: State, path: Path) -> list[str]:
    """Replaces a decoder's file, which has accuracy level 0, by one of level 4 if that is requested.

    With `auto`, it is replaced if level 4 is faster at a small enough loss.

    Returns:
        A note with the measurements if both levels were compared, else an empty list.
    """
    config, asked = state.run.config, state.run.config.export.accuracy_level
    if asked == str(FLOAT):
        return []
    other = path.with_name("level_4.onnx")
    at_level(path, other, INT8)
    if asked == str(INT8):
        other.replace(path)
        return []
    tokens = [row[None].numpy() for row in _tokens(state)]
    exact, rounded = (OnnxDecoder(one, config.verify.threads) for one in (path, other))
    found = levels(exact, rounded, tokens)
    if found.pays:
        other.replace(path)
    other.unlink(missing_ok=True)
    before, now = found.perplexity
    return [
        f"export.accuracy_level=auto: level {INT8 if found.pays else FLOAT} is chosen; on {len(tokens)} windows of the"
        f" calibration text, level 4 decodes {found.ratio:.2f} times as fast as level 0, with perplexity {now:.3f}"
        f" instead of {before:.3f} and the same next token in {100 * found.agreement:.2f} %"
    ]


def _module(state: State, captured: Captured, example: dict[str, Tensor]) -> QATModule:
    """Returns a module of a decoder's graph, with the weights and quantizers of the finished module."""
    finished = state.prepared
    module = state.module_type(
        captured,
        example,
        finished.schedule,
        finished.backend,
        finished.overrides,
        finished.quantizers,
        algorithms=finished.algorithms,
        task=finished.task,
    )
    module.load_state_dict(finished.state_dict())
    module.ready_to_convert()
    return module


def _tokens(state: State) -> Tensor:
    """Returns two windows of calibration text, int64 [2, length]."""
    batch = state.data.first_batch(2)
    found: Tensor = batch if isinstance(batch, Tensor) else next(iter(batch.values()))
    if found.shape[1] < _PAST + _NEW:
        raise ConfigError("data.context", found.shape[1], f"at least {_PAST + _NEW} with {KEY}=true")
    return found.to(torch.int64)


def _ends(model: Any) -> list[int]:
    """Returns the ids of the tokens that end a text.

    They are in the model's generation settings or else in its configuration; if neither has any, the last id of
    the vocabulary is returned.
    """
    for settings in (getattr(model, "generation_config", None), model.config):
        ends = getattr(settings, "eos_token_id", None)
        if ends is not None:
            return [ends] if isinstance(ends, int) else list(ends)
    return [model.config.vocab_size - 1]


def check_settings(config: Config) -> None:
    """Raises ConfigError if a decoder is requested for another task or in a mode without a module."""
    if config.export.decoder and config.export.mode != "static":
        raise ConfigError(KEY, True, f"false with export.mode={config.export.mode}")
    if config.export.decoder and config.task != "causal_lm":
        raise ConfigError(
            KEY,
            True,
            f"false with task={config.task}, since only language models (task=causal_lm) have a decoder",
        )
