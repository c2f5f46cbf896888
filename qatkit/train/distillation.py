"""Feature distillation: a prepared graph learns from the outputs of modules inside a teacher.

Distillation from the teacher's final outputs is part of the task (`qatkit.tasks`).

    loss of a feature      mean (ours - teacher's)² / mean (teacher's)²             Romero et al., "FitNets", 2015

A feature is the output of a module of the float model. The prepared graph may lack this module, since it was
fused or was traced through. With quantization off the graph computes the same values as the float model, so the
feature is the graph's first value that equals the module's output. Before any training, this value is searched for with
the example as input, and the shapes of the features in model and teacher are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.phase import inference, set_phase
from qatkit.graph.signature import Example, call, in_float32
from qatkit.graph.trace import copy_of
from qatkit_verify.errors import ConfigError, did_you_mean

KEY = "schedule.distill_features"
_NEAR = 1e-4  # relative tolerance, since float sums depend on their order


@dataclass(frozen=True)
class Feature:
    """A pair of modules whose outputs are compared.

    Attributes:
        ours, theirs: paths of the modules in the float model and in the teacher.
        node: name of the value in the prepared graph.
    """

    ours: str
    theirs: str
    node: str


def feature_loss(ours: Tensor, theirs: Tensor) -> Tensor:
    """Returns the mean squared error relative to the teacher's mean square, so that all layers count equally."""
    ours, theirs = ours.float(), theirs.float()  # autocast computes in fewer bits
    return F.mse_loss(ours, theirs) / theirs.square().mean().clamp(min=torch.finfo(theirs.dtype).tiny)


@torch.no_grad()
def watched(model: nn.Module, batch: Example, paths: Sequence[str]) -> tuple[Any, list[Tensor]]:
    """Returns the outputs of a model, and the outputs of its modules at `paths` within the same call.

    Of a tuple, only the first value is returned; of several calls of a module, the last one counts.

    Raises:
        KeyError: the model does not call one of the modules.
    """
    found: dict[str, Tensor] = {}
    with _hooks(model, paths, found):
        outputs = call(model, batch)
    return outputs, [found[path] for path in paths]


@contextmanager
def _hooks(model: nn.Module, paths: Sequence[str], found: dict[str, Tensor]) -> Iterator[None]:
    """Registers hooks that fill `found` only within the context, because the model is also traced and exported."""

    def keeper(path: str) -> Any:
        def keep(module: nn.Module, given: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            # Later operators may write into the module's output: an in-place ReLU, the sum of a residual
            # block.
            found[path] = value.clone() if isinstance(value, Tensor) else value

        return keep

    handles = [model.get_submodule(path).register_forward_hook(keeper(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_features(
    graph_module: fx.GraphModule,
    tensors: tuple[Tensor, ...],
    model: nn.Module,
    teacher: nn.Module,
    pairs: Sequence[str],
    example: Example,
) -> list[Feature]:
    """Returns the features of `pairs` ("OURS" or "OURS:THEIRS"), with their values in the prepared graph.

    Args:
        graph_module: the graph prepared from `model`; a graph of the same structure has the same names.
        tensors, example: one batch, as the inputs of the graph and as the input of the models.
        model, teacher: the models, in inference mode.
        pairs: paths of modules in the model, each followed by ":" and a path in the teacher if that differs.

    Raises:
        ConfigError: a path is not a module, the output of a module is not a tensor, the graph has no such
            value, or shapes differ.
    """
    paths = [(one.partition(":")[0], one.partition(":")[2] or one) for one in pairs]
    given = in_float32(example)
    ours = _outputs(model, given, [path for path, _ in paths], "the model")
    theirs = _outputs(teacher, given, [path for _, path in paths], "the teacher")
    for (one, other), a, b in zip(paths, ours, theirs, strict=True):
        if a.shape != b.shape:
            told = f"{one} returns {_sizes(a)} and the teacher's {other} returns {_sizes(b)}"
            wanted = f"modules whose outputs have the same shape; {told}"
            raise ConfigError(KEY, one if one == other else f"{one}:{other}", wanted)
    names = _equal_values(graph_module, tensors, ours)
    for (path, _), name in zip(paths, names, strict=True):
        if name is None:
            wanted = (
                "a module whose output the quantized graph computes, such as the last one of a block; this output "
                "is changed by an algorithm or disappears by fusing"
            )
            raise ConfigError(KEY, path, wanted)
    return [Feature(a, b, name) for (a, b), name in zip(paths, names, strict=True) if name is not None]


def with_drawn_norms(model: nn.Module) -> nn.Module:
    """Returns a copy with random BatchNorm statistics, so that the output of a Conv differs from that of its norm.

    The norms of an untrained model are identities.
    """
    drawn, generator = copy_of(model), torch.Generator().manual_seed(0)
    for norm in drawn.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.track_running_stats:
            cast(Tensor, norm.running_mean).normal_(0, 0.5, generator=generator)
            cast(Tensor, norm.running_var).uniform_(0.5, 2, generator=generator)
    return drawn


def _sizes(tensor: Tensor) -> list[int]:
    return list(tensor.shape[1:])


def _outputs(model: nn.Module, batch: Example, paths: Sequence[str], who: str) -> list[Tensor]:
    known = [path for path, _ in model.named_modules() if path]
    for path in paths:
        if path not in known:
            raise ConfigError(KEY, path, f"a module of {who}{did_you_mean(path, known, 3)}")
    try:
        found = watched(model, batch, paths)[1]
    except KeyError as error:
        raise ConfigError(KEY, error.args[0], f"a module that {who} calls") from error
    for path, one in zip(paths, found, strict=True):
        if not isinstance(one, Tensor) or not one.is_floating_point():
            kind = str(one.dtype).removeprefix("torch.") if isinstance(one, Tensor) else type(one).__name__
            allowed = f"a module of {who} that returns a float tensor; this one returns {kind}"
            raise ConfigError(KEY, path, allowed)
    return found


class _Looking(fx.Interpreter):
    """An interpreter that finds, for each tensor of `wanted`, the name of the first equal value of a graph."""

    def __init__(self, graph_module: fx.GraphModule, wanted: Sequence[Tensor]) -> None:
        super().__init__(graph_module)
        self.wanted, self.names = wanted, list[str | None]([None] * len(wanted))

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op != "placeholder":
            for i, wanted in enumerate(self.wanted):
                if self.names[i] is None and _equal(value, wanted):
                    self.names[i] = n.name
        return value


def _equal(value: Tensor, wanted: Tensor) -> bool:
    if value.shape != wanted.shape or not value.is_floating_point():
        return False
    return float((value - wanted).abs().max()) <= _NEAR * float(wanted.abs().max())


def _equal_values(
    graph_module: fx.GraphModule, tensors: tuple[Tensor, ...], wanted: Sequence[Tensor]
) -> list[str | None]:
    looking = _Looking(graph_module, wanted)
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        looking.run(*tensors)
    return looking.names


def tapped(graph_module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Returns a graph with the outputs (outputs of `graph_module`, values of the nodes `names`).

    It shares modules and parameters with `graph_module`.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(graph_module.graph, copies)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output((outputs, tuple(by_name[name] for name in names)))
    return fx.GraphModule(graph_module, graph)
