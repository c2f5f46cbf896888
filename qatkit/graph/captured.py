"""Records a float model and proves the graph once; any number of modules are made from copies of the graph.

    model ── trace ──> its graph ── copy ──> fuse, stub, prove, prepare_qat ──> a module
                                 ├─ copy ──> fuse, stub, prepare_qat ─────────> the float control
                                 └─ copy ──> ...                                candidates of a search

If possible, the recorded graph has the model's own parameters and buffers. It then needs no memory in addition to the
model, and a copy has the weights that the model has at the time of the copy. Otherwise the model is recorded again
after it was trained (`Captured.trained`).
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, fx, nn

from qatkit.graph.capture.free_axes import Wanted
from qatkit.graph.proof import prove
from qatkit.graph.sharing import large_parameters
from qatkit.graph.signature import Example
from qatkit.graph.single_precision import in_single_precision
from qatkit.graph.trace import trace, what_copies_share


class Captured:
    """Makes copies of the graph of one float model.

    Args:
        model: the float model; it is not changed.
        example: an example input of the model (see `QATModule`).
        dynamic_axes: see `qatkit.graph.capture.model.capture`.
    """

    def __init__(self, model: nn.Module, example: Example, dynamic_axes: Wanted = "none") -> None:
        self.model, self._example, self._dynamic_axes = model, example, dynamic_axes
        self._graph: fx.GraphModule | None = None
        self._proven = self._follows = False

    def graph(self, *, share: bool = False) -> fx.GraphModule:
        """Returns a copy of the traced graph with the current weights of the model.

        Args:
            share: whether large weights stay in the model's memory (`qatkit.graph.sharing`). If so, nothing may write
                into them.

        Raises:
            ConfigError: the model can't be traced.
        """
        if self._graph is None:
            self._graph = self._traced()
        elif self._follows:
            _share(self.model, self._graph)
        return _copied(self._graph, large_parameters(self._graph) if share else {})

    def prove(self, opened: fx.GraphModule) -> None:
        """Compares a fused and opened copy with the model, unless this was done before (`qatkit.graph.proof`).

        Raises:
            ConfigError: the model fails on other values or batch sizes, or the outputs differ by more than
                rounding.
        """
        if not self._proven:
            prove(in_single_precision(self.model)[0], opened, self._example)
            self._proven = True

    def trained(self) -> None:
        """Records that the model was trained.

        The graph stays valid unless it depends on previous values of the model's tensors or has copies of
        them. In that case the model is traced and proven again.
        """
        if not self._follows:
            self._graph, self._proven = None, False
        elif self._graph is not None:
            self._graph.train(self.model.training)

    def release(self) -> None:
        """Frees the float model's weights once no further graph is needed, since checking a file needs the memory."""
        self._graph = None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.new_empty(0)

    def _traced(self) -> fx.GraphModule:
        model, given = in_single_precision(self.model)
        graph = trace(model, self._example, self._dynamic_axes)
        read_values = graph.meta.pop("read_values", True)
        self._follows = not given and not read_values and _has_its_values(self.model, graph)
        if self._follows:
            _share(self.model, graph)
        return graph


def _has_its_values(model: nn.Module, graph: fx.GraphModule) -> bool:
    """Returns whether the model has all parameters and buffers of the graph, with the same names and values."""
    for kind in ("named_parameters", "named_buffers"):
        known = dict(getattr(model, kind)(remove_duplicate=False))
        for name, tensor in getattr(graph, kind)(remove_duplicate=False):
            other = known.get(name)
            if other is None or other.dtype != tensor.dtype or not other.equal(tensor):
                return False
    return True


def _share(model: nn.Module, graph: fx.GraphModule) -> None:
    """Puts the model's own parameters and buffers into its graph, each under its name."""
    for path, module in graph.named_modules(remove_duplicate=False):
        for held, known in (("_parameters", "get_parameter"), ("_buffers", "get_buffer")):
            tensors: dict[str, Tensor | None] = getattr(module, held)
            for name in [name for name, tensor in tensors.items() if tensor is not None]:
                tensors[name] = getattr(model, known)(f"{path}.{name}" if path else name)


def _copied(graph: fx.GraphModule, shared: dict[int, Any]) -> fx.GraphModule:
    """Returns a deep copy with its parameters in the same order; tensors in `shared`, by id, are not copied.

    GraphModule's own copy registers parameters in the order of its nodes, and makes all buffers persistent.
    Optimizers and checkpoints of the original would not fit such a copy.
    """
    memo: dict[int, Any] = shared | what_copies_share(graph)
    copied: fx.GraphModule = graph.__new__(type(graph))
    type(copied).__name__ = type(
        graph
    ).__name__  # each has a class of its own with the name of the model's class
    memo[id(graph)] = copied
    copied.__dict__ = copy.deepcopy(graph.__dict__, memo)
    copied.graph = copied.__dict__.pop("_graph")
    return copied
