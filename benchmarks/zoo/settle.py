"""Random weights with which every part of a model matters, as in a trained model.

Freshly initialized models hide mistakes: biases are zero, layer scales are 1e-6, the weight of the last norm of a block
is zero, and the weights of transformers are so small that attention is uniform.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from zoo.entry import Entry, call


def settled(entry: Entry) -> nn.Module:
    """Returns the entry's model, with weights that matter and BatchNorm statistics from two batches, in eval mode."""
    torch.manual_seed(0)
    model = entry.build()
    _spread_weights(model)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if norms:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
        model.train()
        with torch.no_grad():
            for seed in (50, 51):
                call(model, entry.batch(8, seed))
    return model.eval()


def _spread_weights(model: nn.Module) -> None:
    matrices: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and not parametrize.is_parametrized(
            module
        ):
            with contextlib.suppress(AttributeError):
                matrices[id(module.weight)] = module.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.requires_grad:
                _spread(name, parameter, id(parameter) in matrices)


def _spread(name: str, parameter: Tensor, matrix: bool) -> None:
    """Randomizes a parameter that is constant and near zero, and enlarges a weight that would shrink the signal."""
    least = 0.7 / math.sqrt(max(1, parameter[0].numel())) if matrix and parameter.ndim > 1 else 0.0
    constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
    first = float(parameter.flatten()[0]) if parameter.numel() else 0.0
    if constant and "bias" in name.rpartition(".")[2] and abs(first) < 1e-3:
        parameter.normal_(std=0.05)
    elif constant and abs(first) < 1e-2 and parameter.squeeze().ndim < 2:
        parameter.uniform_(0.3, 1.0)  # a layer scale, or the last norm of a block
    elif constant and abs(first) < 1e-2:
        parameter.normal_(std=max(0.1, least))
    elif least and 0 < float(parameter.std()) < least:
        parameter.mul_(least / parameter.std())


def has_random_training(model: nn.Module, batch: Any) -> bool:
    """Returns whether two calls in training mode, with BatchNorm in evaluation mode, differ."""
    with torch.no_grad(), in_training(model):
        outputs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(call(model, batch))
    from zoo.compare import arrays, difference

    return bool(difference(arrays(outputs[0]), arrays(outputs[1])))


@contextlib.contextmanager
def in_training(model: nn.Module) -> Any:
    """Puts `model`, except for BatchNorm, in training mode, and in evaluation mode afterwards."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    try:
        yield
    finally:
        model.eval()
