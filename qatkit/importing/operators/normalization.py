"""Normalization operators, with stored or computed statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.importing.operators.table import Array, Node, Value, function, module
from qatkit.importing.operators.values import operand, tensor

_BATCH_NORMS: dict[int, type[Any]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}


@module("BatchNormalization")
def batch_norm_module(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns a torch BatchNorm with constant statistics; None if `batch_norm` must compute the node."""
    rank = node.ranks[0] if node.ranks else None
    if any(value is None for value in constants[1:5]) or rank not in _BATCH_NORMS or _unknown(node):
        return None
    scale, bias, mean, variance = (torch.from_numpy(np.array(c, np.float32)) for c in constants[1:5])
    made = _BATCH_NORMS[rank](
        len(scale), eps=node.get("epsilon", 1e-5), momentum=1 - node.get("momentum", 0.9)
    )
    made.weight.data, made.bias.data = scale, bias
    made.running_mean, made.running_var = mean, variance
    return made


def _unknown(node: Node) -> str:
    if node.get("training_mode", 0):
        return "BatchNormalization in training mode has no PyTorch equivalent"
    return (
        ""
        if node.get("spatial", 1)
        else "BatchNormalization with statistics for each position has no PyTorch equivalent"
    )


@function("BatchNormalization", refuses=_unknown)
def batch_norm(node: Node, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Tensor:
    """Applies batch normalization with parameters or statistics that the graph computes."""
    x = tensor(x)
    statistics = tensor(mean, x), tensor(variance, x)
    return F.batch_norm(x, *statistics, tensor(scale, x), tensor(bias, x), eps=node.get("epsilon", 1e-5))


@function("InstanceNormalization")
def instance_norm(node: Node, x: Value, scale: Value, bias: Value) -> Tensor:
    """Normalizes by the statistics of each channel of each image."""
    x = tensor(x)
    return F.instance_norm(x, weight=tensor(scale, x), bias=tensor(bias, x), eps=node.get("epsilon", 1e-5))


@module("LayerNormalization")
def layer_norm_module(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns a torch LayerNorm over the axes of a constant scale; None if `layer_norm` must compute the node."""
    scale = constants[1]
    bias = constants[2] if len(constants) > 2 else np.zeros_like(scale) if scale is not None else None
    rank, axis = node.ranks[0] if node.ranks else None, node.get("axis", -1)
    if scale is None or bias is None or sum(map(bool, node.outputs)) > 1:
        return None
    axes = -axis if axis < 0 else (rank - axis if rank else None)
    if axes != scale.ndim or scale.shape != bias.shape:
        return None
    made = nn.LayerNorm(scale.shape, eps=node.get("epsilon", 1e-5))
    made.weight.data, made.bias.data = (torch.from_numpy(np.array(c, np.float32)) for c in (scale, bias))
    return made


def _with_mean(node: Node) -> str:
    several = sum(map(bool, node.outputs)) > 1
    return (
        f"{node.op_type} that also returns a mean or deviation has no PyTorch equivalent" if several else ""
    )


@function("LayerNormalization", refuses=_with_mean)
def layer_norm(node: Node, x: Value, scale: Value, bias: Value = None) -> Tensor:
    """Normalizes over all axes from `axis` on, with a scale of any shape that broadcasts."""
    x = tensor(x)
    sizes = x.shape[node.get("axis", -1) % x.ndim :]
    normal = F.layer_norm(x, sizes, eps=node.get("epsilon", 1e-5)) * operand(scale, x)
    return normal if bias is None else normal + operand(bias, x)


@function("SkipLayerNormalization", domain="com.microsoft")
def skip_layer_norm(
    node: Node, x: Value, skip: Value, gamma: Value, beta: Value = None, bias: Value = None
) -> tuple[Tensor | None, ...]:
    """Computes LayerNorm of x + skip + bias; this sum is the fourth output."""
    x = tensor(x)
    summed = x + operand(skip, x)
    summed = summed if bias is None else summed + operand(bias, x)
    shift = None if beta is None else tensor(beta, x)
    scale = tensor(gamma, x)
    return (F.layer_norm(summed, scale.shape, scale, shift, node.get("epsilon", 1e-12)), None, None, summed)


@function("GroupNormalization")
def group_norm(node: Node, x: Value, scale: Value, bias: Value) -> Tensor:
    """Normalizes groups of channels; the scale is per group up to opset 20, and per channel from 21 on."""
    x, groups = tensor(x), node.get("num_groups")
    gamma, beta = tensor(scale, x), tensor(bias, x)
    if node.version < 21:
        repeats = x.shape[1] // groups
        gamma, beta = gamma.repeat_interleave(repeats), beta.repeat_interleave(repeats)
    return F.group_norm(x, groups, gamma, beta, node.get("epsilon", 1e-5))


@function("RMSNormalization")
@function("SimplifiedLayerNormalization")
def rms_norm(node: Node, x: Value, scale: Value) -> Tensor:
    """Divides by the root mean square over all axes from `axis` on."""
    x = tensor(x)
    axes = list(range(node.get("axis", -1) % x.ndim, x.ndim))
    root = torch.rsqrt(torch.mean(x * x, axes, keepdim=True) + node.get("epsilon", 1e-5))
    return x * root * operand(scale, x)


@function("LRN")
def local_response_norm(node: Node, x: Value) -> Tensor:
    """Divides by a power of the sum of squares of neighbouring channels."""
    settings = {key: node.get(key, value) for key, value in (("alpha", 1e-4), ("beta", 0.75))}
    return F.local_response_norm(tensor(x), node.get("size"), k=node.get("bias", 1.0), **settings)


@function("MeanVarianceNormalization")
def mean_variance_norm(node: Node, x: Value) -> Tensor:
    """Normalizes to mean 0 and variance 1 over some axes."""
    x, axes = tensor(x), node.get("axes", [0, 2, 3])
    mean = torch.mean(x, axes, keepdim=True)
    variance = torch.mean(x * x, axes, keepdim=True) - mean * mean
    return (x - mean) / (torch.sqrt(variance) + 1e-9)
