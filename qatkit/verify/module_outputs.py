"""Computes a module's outputs for the batches that a file accepts; imports torch only for a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qatkit_verify.feeds import Array, by_name

if TYPE_CHECKING:
    import torch
    from torch import nn


def module_outputs(module: nn.Module, batch: Any) -> tuple[Array, ...]:
    """Returns all outputs of a module in eval mode, computed on its own device.

    The inputs of a graph (`fx.GraphModule`) are found in the batch by name or in their order.
    """
    return tuple(one.cpu().numpy() for one in device_outputs(module, batch))


def device_of(module: nn.Module) -> torch.device:
    """Returns the device on which a module computes; the CPU for a module without tensors."""
    import torch

    first = next(module.parameters(), next(module.buffers(), None))
    return first.device if first is not None else torch.device("cpu")


def device_outputs(module: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of `module_outputs` as tensors on the module's device, without waiting for it."""
    import torch

    from qatkit.graph.phase import inference
    from qatkit.graph.signature import call, output_leaves

    with inference(module), torch.inference_mode():
        found = output_leaves(call(module, _tensors(module, batch, device_of(module))))[1]
        return tuple(t.float() if t.is_floating_point() else t for t in found)


def _tensors(module: nn.Module, batch: Any, device: Any) -> Any:
    """Returns the arguments of a module.

    For a graph they are its inputs in their order and types; for another module they are the given batch.
    """
    import torch
    from torch import fx

    from qatkit.graph.signature import graph_inputs

    def tensor(value: Any, dtype: Any) -> Any:
        made = torch.as_tensor(value)
        kept = made.dtype in (torch.int64, torch.int32, torch.bool)
        return made.to(device, dtype or (made.dtype if kept else torch.float32))

    if isinstance(module, fx.GraphModule):
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        kinds = [getattr(node.meta.get("value"), "dtype", None) for node in places]
        given = by_name(graph_inputs(module), batch).values()
        return tuple(tensor(value, kind) for value, kind in zip(given, kinds, strict=True))
    if isinstance(batch, Mapping):
        return {name: tensor(value, None) for name, value in batch.items()}
    return tuple(tensor(v, None) for v in batch) if isinstance(batch, (tuple, list)) else tensor(batch, None)
