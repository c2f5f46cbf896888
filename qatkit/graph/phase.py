"""Phases of a prepared graph (observe, quantize, train), and a context that restores the phase afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn

from qatkit.quant.fake_quantize import FakeQuantize, Quantizer
from qatkit.quant.observers import Observer
from qatkit.quant.qat_layers import QATOperator


def set_phase(graph_module: nn.Module, *, observe: bool, quantize: bool, calibrating: bool = False) -> None:
    """Turns observing and fake quantization on or off in the whole graph.

    Unless `calibrating` is True, `observe` turns on only the observers that also follow the values during training.
    """
    for module in graph_module.modules():
        if isinstance(module, Quantizer):
            module.set_phase(observe=observe, quantize=quantize, calibrating=calibrating)


def observe_in_parts(graph_module: nn.Module, *, wanted: bool) -> None:
    """Sets whether the values that observers get from now on are parts of one batch (`Observer.in_parts`)."""
    for module in graph_module.modules():
        if isinstance(module, Observer):
            module.in_parts(wanted)


@contextmanager
def inference(model: nn.Module, parts: Iterable[fx.GraphModule] = ()) -> Iterator[None]:
    """Puts `model` into inference mode without gradients; restores the mode and phase of every module afterwards.

    Inside this context, `set_phase` may be called on the model or on `parts`. Modes and phases are restored even after
    an exception.
    """
    modes = [(module, module.training) for module in model.modules()]
    phases = [
        (module, module.enabled, getattr(module, "observing", False))
        for whole in (model, *parts)
        for module in whole.modules()
        if isinstance(module, Quantizer)
    ]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for quantizer, enabled, observing in phases:
            quantizer.enabled = enabled
            if isinstance(quantizer, FakeQuantize):
                quantizer.observing = observing


def freeze_batch_norm(graph_module: fx.GraphModule) -> None:
    """Freezes fused BatchNorms: from now on they use their running statistics and do not update them."""
    for module in graph_module.modules():
        if isinstance(module, QATOperator):
            module.bn_frozen = True
            module.train(module.training)
