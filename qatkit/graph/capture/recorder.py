"""Records the torch calls of a running model as nodes of a torch.fx graph.

The recorder is a TorchFunctionMode, which receives each call with real tensors. Therefore sizes (unless they are
traced), types and devices are plain Python values, `isinstance(x, Tensor)` is true, and branches that depend only on
them are taken as in the model. Reading values of a tensor that depends on the inputs is rejected, and so are in-place
changes that cannot be written as nodes. A leaf module (`qatkit.graph.capture.run.is_leaf`) is one node of the graph
and runs with the mode off.
"""

from __future__ import annotations

import keyword
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from qatkit.graph.capture.aliases import Aliases, shares_memory
from qatkit.graph.capture.assignment import assign, places, spread
from qatkit.graph.capture.calls import (
    DROPOUTS,
    OUT_OF_PLACE,
    RANDOM,
    SHAPE_ONLY,
    VALUE_READS,
    WHOLE_BATCH,
    WITHOUT_VALUES,
    UntraceableError,
    as_node,
    dropout_arguments,
    is_random,
    out_of_place,
    tensors_in,
    values_read,
    where,
)
from qatkit.graph.capture.constant_sizes import with_numbers
from qatkit.graph.capture.picked import PickedValues
from qatkit.graph.capture.traced_sizes import Expression, Quotient, TracedSize, emitted, traced
from qatkit.graph.capture.written_out import written_out
from qatkit.graph.nodes import classifies_in_training

# Functions that make tensors from Python numbers; their values are known now and the same in every run.
_CONSTANTS = ("tensor", "as_tensor", "asarray", "frombuffer", "from_numpy")
_NO_CHANGE = ("requires_grad_", "share_memory_", "retain_grad")


class Recorder(TorchFunctionMode):
    """Records the torch calls of one run.

    Args:
        model: the model, whose parameters and buffers the graph reads by name.
        trace_sizes: whether sizes that depend on the inputs are computed in the graph (`TracedSize`) instead of
            being numbers.

    Attributes:
        graph: the recorded graph.
        constants: tensors, by name, that are neither computed by a node nor parameters or buffers: made from NumPy
            arrays or Python numbers, or kept as attributes of modules.
        random: nodes that draw random numbers.
        read_values: whether Python code read values of a tensor.
    """

    def __init__(self, model: nn.Module, *, trace_sizes: bool = False) -> None:
        super().__init__()
        self.trace_sizes = trace_sizes
        self.sizes: dict[Expression, fx.Node] = {}
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.random: list[fx.Node] = []
        self.read_values = False
        self.stack: list[tuple[str, type[nn.Module]]] = []
        self.depends: set[fx.Node] = set()
        self.auxiliary = classifies_in_training(model)  # if so, the run is in training mode
        self.names = {
            id(t): name
            for name, t in [*model.named_buffers(remove_duplicate=False), *model.named_parameters()]
        }
        self.aliases = Aliases(self.emit, self._first, self.not_followed)
        self.picked = PickedValues(self)

    def placeholder(self, name: str, tensor: Tensor) -> None:
        """Adds an input of the graph."""
        node = self.graph.placeholder(name)
        if not name.isidentifier() or keyword.iskeyword(name) or name == "self":
            node.target = node.name  # a parameter of the function that the graph becomes
        node.meta["shape"] = tuple(tensor.shape)
        self.depends.add(node)
        self.aliases.bind(tensor, (node,), ())

    def emit(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Adds and returns a node, whose meta has the module and the line of code that are running."""
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["nn_module_stack"] = OrderedDict((path, (path, kind)) for path, kind in self.stack)
        node.meta["where"] = where()
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name not in SHAPE_ONLY and any(n in self.depends for n in node.all_input_nodes):
            self.depends.add(node)
        return node

    def depend(self, args: Any) -> bool:
        """Returns whether a tensor in `args` depends on values of the inputs."""
        return any(self.aliases.node_of(tensor) in self.depends for tensor in tensors_in(args))

    def refuse(self, reason: str, hint: str = WITHOUT_VALUES) -> UntraceableError:
        """Returns an error with this reason and advice for the line that is running."""
        return UntraceableError(reason, where(), self.stack[-1][0] if self.stack else "", hint)

    def not_followed(self, reason: str) -> UntraceableError:
        """Returns an error with this reason for an in-place change in the line that is running."""
        return self.refuse(reason, OUT_OF_PLACE)

    def node_of(self, value: Any) -> Any:
        """Returns an argument of a call as the argument of a node: nodes in place of tensors and traced sizes.

        Raises:
            UntraceableError: the argument has a type that a graph can't contain, or a tensor can't be followed.
        """
        if isinstance(value, Tensor):
            return self.aliases.node_of(value)
        if isinstance(value, (list, tuple)):
            return (
                type(value)(map(self.node_of, value))
                if type(value) is list
                else tuple(map(self.node_of, value))
            )
        if isinstance(value, dict):
            return {key: self.node_of(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.node_of, (value.start, value.stop, value.step)))
        if isinstance(value, (TracedSize, Quotient)):
            return emitted(value, self.emit, self.sizes)
        if isinstance(value, np.generic):  # np.float64 is a float, but not in code that is written out
            return value.item()
        if isinstance(value, fx.node.base_types) or value is None or value is Ellipsis:
            return value
        if isinstance(value, np.ndarray):
            return self.node_of(torch.as_tensor(value))
        if isinstance(value, type(torch.FloatTensor)):  # torch.FloatTensor as an argument of `x.type`
            return value.dtype
        raise self.refuse(f"an argument of type {type(value).__name__} can't be part of a graph")

    def _first(self, tensor: Tensor) -> fx.Node:
        self.picked.check(tensor)
        name = self.names.get(id(tensor))
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise self.refuse(
                "functions transformed by torch.vmap or torch.func can't be traced", WHOLE_BATCH
            )
        if name is None:
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
        node = self.graph.create_node("get_attr", name, (), {})
        node.meta["where"] = where()
        return node

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        parts = written_out(func, args, kwargs)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if self.picked.concerns(name, args, kwargs):
            return self.picked.record(func, args, kwargs)
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        return self._recorded(func, name, args, kwargs)

    def _recorded(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_constant(name, values_read(name, args, kwargs))
        if name == "__iter__":
            return iter(self(torch.Tensor.unbind, args[0], 0))
        if name == "__deepcopy__":
            return self(torch.Tensor.clone, args[0])
        if name == "__setitem__":
            return assign(self, *args)
        if name == "__getitem__":
            args = (args[0], places(self, args[1]))
        args, kwargs = with_numbers(name, args, kwargs, self._known)
        if func in DROPOUTS:
            given = dropout_arguments(func, args, kwargs)
            if self.auxiliary or not given["training"] or not given["p"]:
                return self._dropout(func, args, kwargs)
        return self.record(func, args, kwargs)

    def __call__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records a call that the recorder itself makes while it records another one."""
        return self.record(func, args, kwargs)

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call and returns its result; if it returns or changes tensors, it becomes a node.

        There is no node for a call that returns one of its inputs unchanged. Tensors made of Python numbers
        or NumPy arrays get none either, except for a few integers (`_few_numbers`).

        Raises:
            UntraceableError: an argument or an in-place change can't be part of a graph.
        """
        sources = list(tensors_in((args, kwargs)))
        for tensor in sources:
            self.aliases.node_of(tensor)  # before the call, which may change it
        versions = [tensor._version for tensor in sources]
        nodes = (self.node_of(args), self.node_of(kwargs)) if sources else ((), {})
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
            changed = [t for t, v in zip(sources, versions, strict=True) if t._version != v]
        changed = self._without_statistics(changed, args)
        if changed or _renamed(func, args, result):
            self._changed(func, args, kwargs, nodes, changed)
            return result
        if not any(True for _ in tensors_in(result)) or any(result is tensor for tensor in sources):
            return self._sized(func.__name__, args, kwargs, result)
        if not sources:
            if func.__name__ in _CONSTANTS and not _few_numbers(args):
                return result
            nodes = (self.node_of(args), self.node_of(kwargs))
        node = self.emit(*as_node(func, *nodes))
        if is_random(func, args, kwargs):
            self.random.append(node)
        self.bind(result, node, sources)
        return result

    def record_leaf(
        self, run: Callable[..., Any], call: tuple[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a module or function and records it as one node, which stands for all calls inside it.

        Args:
            run: the function to run.
            call: op and target of the node.
            args, kwargs: the arguments of the call.

        Raises:
            UntraceableError: an argument can't be part of a graph, or is changed in place but not returned.
        """
        sources = list(tensors_in((args, kwargs)))
        nodes = self.node_of(args), self.node_of(kwargs)
        versions = [tensor._version for tensor in sources]
        result = run(*args, **kwargs)
        node = self.emit(*call, *nodes)
        changed = [t for t, v in zip(sources, versions, strict=True) if t._version != v]
        if not changed and any(result is tensor for tensor in sources):
            return self.passed(result, node)
        for tensor in changed:
            if tensor is not result:
                name = getattr(call[1], "__name__", call[1])
                raise self.not_followed(f"{name} changes a tensor in place, which can't be followed")
            self.aliases.changed(tensor, node)
        if not changed:
            self.bind(result, node, sources)
        return result

    def bind(
        self, result: Any, node: fx.Node, sources: Sequence[Tensor], chain: tuple[fx.Node, ...] = ()
    ) -> None:
        """Binds `result` to `node`; each tensor in a list or tuple is bound to a new node for its element.

        Args:
            result: the result of a call.
            node: the node of the call, or of an element of its result.
            sources: tensors whose memory the result may share.
            chain: the nodes from the call to `node`, without `node`.
        """
        if isinstance(result, Tensor):
            node.meta |= {"shape": tuple(result.shape), "complex": result.is_complex()}
            self.aliases.bind(result, (*chain, node), sources)
        elif isinstance(result, (list, tuple)):
            for i, part in enumerate(result):
                if any(True for _ in tensors_in(part)):
                    item = self.emit("call_function", operator.getitem, (node, i), {})
                    self.bind(part, item, sources, (*chain, node))

    def _changed(
        self, func: Any, args: Any, kwargs: Any, nodes: tuple[Any, Any], changed: Sequence[Tensor]
    ) -> None:
        """Records a call that changed tensors in place as a node that computes the new values out of place."""
        name, target = func.__name__, kwargs.get("out", args[0] if args else next(iter(changed), None))
        if name in ("set_", "resize_"):
            raise self.not_followed(f"{name} changes a tensor in place, which can't be followed")
        if "out" in kwargs:
            plain = {k: v for k, v in nodes[1].items() if k != "out"}
            node = self.emit(*as_node(func, nodes[0], plain))
        elif name in ("copy_", "fill_", "zero_", "constant_"):
            given = [*args[1:], *(kwargs[key] for key in ("value", "val", "src") if key in kwargs), 0]
            node = spread(self, self.node_of(given[0]), given[0], target)
        elif name in RANDOM:
            node = self.emit("call_function", torch.rand, (tuple(target.shape),), {})
            self.random.append(node)
        else:
            call = out_of_place(func, *nodes)
            if call is None or not all(shares_memory(tensor, target) for tensor in changed):
                raise self.not_followed(f"{name} changes a tensor in place, which can't be followed")
            node = self.emit(*call)
        self.aliases.changed(target, node)

    def _without_statistics(self, changed: Sequence[Tensor], args: tuple[Any, ...]) -> list[Tensor]:
        """Drops the running statistics that a normalization updates, since they are not part of its result."""
        kept = []
        for tensor in changed:
            if id(tensor) in self.names and not any(tensor is arg for arg in args[:1]):
                self.aliases.values[tensor].version = tensor._version
            else:
                kept.append(tensor)
        return kept

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Records functional dropout without applying it; `follow_mode` makes the node a module or removes it."""
        given = dropout_arguments(func, args, kwargs)
        x: Tensor = given["input"]
        node = self.emit("call_function", func, (self.node_of(x), given["p"], False), {})
        return self.passed(x, node)

    def passed(self, x: Tensor, node: fx.Node) -> Tensor:
        """Returns a new tensor object with the memory of `x`, for a call that returns its input."""
        with torch._C.DisableTorchFunction():
            result = x.view_as(x)
        self.aliases.bind(result, (node,), (x,))
        return result

    def _attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = getattr(func.__self__, "__name__", "")
        tensor = args[0]
        if func.__name__ == "__set__":
            return self._set(func, name, *args)
        with torch._C.DisableTorchFunction():
            result = func(*args)
        if not isinstance(result, Tensor) or result is tensor:
            return self._sized(name, args, {}, result)
        if name == "T":
            return self(torch.Tensor.permute, tensor, *reversed(range(tensor.ndim)))
        if name == "mT":
            return self(torch.Tensor.transpose, tensor, -2, -1)
        if name == "data":
            return self(torch.Tensor.detach, tensor)
        node = self.emit("call_function", getattr, (self.node_of(tensor), name), {})
        self.bind(result, node, (tensor,))
        return result

    def _sized(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Returns `result`; with `trace_sizes`, sizes of inputs and recorded tensors become traced sizes."""
        if not self.trace_sizes or name not in ("shape", "size", "numel") or id(args[0]) in self.names:
            return result
        if args[0] not in self.aliases.values:
            return result
        return traced(name, args, kwargs, self.aliases.node_of, result)

    def _set(self, func: Any, name: str, tensor: Tensor, value: Any) -> None:
        """Runs `x.name = y`; records it for `data`, unless y has the memory of x (as at the end of `x.data *= z`)."""
        if name == "data":
            node = self.node_of(value)
            if not shares_memory(tensor, value):
                self.aliases.node_of(tensor)
                self.aliases.moved(tensor, node)
        elif name not in ("requires_grad", "grad"):
            raise self.not_followed(f"a tensor's {name} is assigned, which can't be followed")
        with torch._C.DisableTorchFunction():
            func(tensor, value)

    def check_constant(self, name: str, values: Any) -> None:
        """Rejects reading values that depend on the inputs.

        Raises:
            UntraceableError: a tensor in `values`, which the function `name` reads, depends on the inputs.
        """
        for tensor in tensors_in(values):
            self.read_values = True
            if self.aliases.node_of(tensor) in self.depends:
                what = "the computation" if name in VALUE_READS else "the shape of the result"
                raise self.refuse(f"{what} depends on values of a tensor ({name.strip('_')})")

    def _known(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has the same values in every run; if so, they are read (`read_values`)."""
        known = self.aliases.node_of(tensor) not in self.depends
        self.read_values |= known
        return known


def _few_numbers(args: tuple[Any, ...]) -> bool:
    """Returns whether a tensor is made of at most 8 integers, one of which may be the batch size."""
    given = args[0] if args else ()
    data = list(given) if isinstance(given, (list, tuple)) else [given]
    return len(data) <= 8 and all(type(number) in (int, TracedSize) for number in data)


def _renamed(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Returns whether a method changed its tensor's shape in place (`x.unsqueeze_(0)`).

    Such a change does not raise the tensor's version.
    """
    name: str = func.__name__
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_CHANGE
    return bool(args) and result is args[0] and in_place
