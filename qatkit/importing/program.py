"""A graph of ONNX nodes as a PyTorch module that runs them in order.

    initializers, constants and values computed from them  →  constants
    nodes with constant weights (Conv, Gemm, LSTM)      →  ordinary torch modules with parameters
    nodes without a PyTorch equivalent                  →  an `Island` of nodes that run in ONNX Runtime
    If                                                  →  both branches; the condition selects the one that runs
    all other nodes                                     →  an `Operator`, which calls the function of its operator

The path of a module follows from the name of its node, so overrides and reports use the names of the file.
Sizes, axes and other integers that do not depend on values of the inputs are NumPy arrays while the program runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qatkit.graph.selectors import FileNode
from qatkit.importing.island import Island
from qatkit.importing.operators import Node, UnsupportedError, function_of
from qatkit.importing.operators.table import Array, Value
from qatkit.importing.operators.values import array, one_int, tensor
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import use_library

LARGE = 4096  # constants with at least this many values are not stored a second time
_SIZES = 16  # outputs with at most this many values are converted value by value


class Operator(nn.Module):
    """A node that is computed by the function of its operator.

    Args:
        node: the node to compute.
        constants: the constant inputs, by position among the inputs; float arrays with several values become buffers.

    Raises:
        UnsupportedError: the operator has no PyTorch equivalent.
    """

    one_operator = True  # its call is named by its path only (`qatkit.graph.trace.name_sites`)

    def __init__(self, node: Node, constants: Mapping[int, Array]) -> None:
        super().__init__()
        function_of(node)  # raises UnsupportedError now rather than when it runs
        self.node = node
        self.known: dict[int, Array] = {}
        for place, value in constants.items():
            if value.dtype.kind == "f" and value.size > 1:
                self.register_buffer(f"input_{place}", torch.from_numpy(value.copy()))
            else:
                self.known[place] = value

    def forward(self, *values: Value) -> Any:
        """Returns tensors, or arrays if no input is a tensor."""
        given = [self.known.get(i, self._buffers.get(f"input_{i}", value)) for i, value in enumerate(values)]
        apply = function_of(self.node)
        if any(isinstance(value, Tensor) for value in given):
            return apply(self.node, *given)
        with (
            torch._C.DisableTorchFunction()
        ):  # arrays do not depend on values, so a recorded graph leaves this out
            return _as_arrays(apply(self.node, *given))


class Refused(nn.Module):
    """A node without a PyTorch equivalent, in a branch: an error is raised only if the branch is taken."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def forward(self, *values: Value) -> Any:
        raise UnsupportedError(self.reason)


@dataclass(frozen=True)
class Original:
    """Shape and digest of a constant in the file, to find out whether the copy in a module has changed."""

    shape: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, array: Array) -> Original:
        """Returns the shape and digest of an array, as float32."""
        return cls(array.shape, _digest(array))

    def equals(self, array: Array) -> bool:
        """Returns whether an array has the same values in the same order, whatever its shape."""
        return self.digest == _digest(array)


def _digest(array: Array) -> str:
    values = np.ascontiguousarray(array, np.float32) + np.float32(0)  # turns -0 into 0
    return hashlib.sha256(values.tobytes()).hexdigest()


@dataclass(frozen=True)
class Step:
    """A node of the file, or an island, as a program runs it.

    Attributes:
        path: the path of its module; "" for an If.
        name: the name of the node in messages.
        inputs: names of the values that it reads; "" for constants and omitted inputs.
        constants: constants by position among the inputs, except large ones that its module holds.
        outputs: names of the values that it computes.
        branches: the programs of an If for a true and for a false condition; None for other nodes.
        originals: shape and digest of the large constants that its module holds, by position among the inputs.
        node: the description of the node for selectors; None for an island and an If.
    """

    path: str
    name: str
    inputs: tuple[str, ...]
    constants: Mapping[int, Array]
    outputs: tuple[str, ...]
    branches: tuple[Program, Program] | None = None
    originals: Mapping[int, Original] = field(default_factory=dict)
    node: FileNode | None = None

    def original(self, place: int) -> Original | None:
        """Returns shape and digest of an input's constant in the file; None if it is not a constant."""
        if place in self.constants:
            return Original.of(self.constants[place])
        return self.originals.get(place)

    def shape(self, place: int) -> tuple[int, ...]:
        """Returns the shape of a constant input."""
        return self.originals[place].shape if place in self.originals else self.constants[place].shape

    def captured(self) -> list[str]:
        """Returns the outer values that the branches of an If read."""
        inside = [inner for branch in self.branches or () for inner in branch.steps]
        made = {name for inner in inside for name in inner.outputs}
        read = [name for inner in inside for name in (*inner.inputs, *inner.captured())]
        read += [
            name for branch in self.branches or () for name in branch.outputs if name not in branch.constants
        ]
        return [name for name in dict.fromkeys(read) if name and name not in made]


@dataclass(frozen=True)
class Program:
    """The steps of a graph in order, and its outputs.

    Attributes:
        steps: the steps, in the order in which they run.
        outputs: names of the values that it returns.
        constants: the outputs that are constants, by name.
    """

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Array]

    def modules(self) -> Iterator[Step]:
        """Yields the steps that are modules, including those in branches."""
        for step in self.steps:
            if step.path:
                yield step
            for branch in step.branches or ():
                yield from branch.modules()


class ImportedModel(nn.Module):
    """A float ONNX file as a PyTorch module (`import_onnx`).

    Attributes:
        file: the path of the file.
        inputs: names of the file's inputs that are not fixed, in the file's order.
        outputs: names of the file's outputs, in the file's order.
        program: the steps that compute the outputs.
        any_batch: whether the module accepts any number of images although the file accepts one per run.
        fixed: values of inputs of the file that are constants here, by name.
        batch_axes: the batch axis of each input, as the file declares it; None for an input without one.
        taken: the branch (0: then, 1: else) of each If whose condition is constant, by its first output.
        custom_ops: a library of custom operators that the file needs; None if it needs none.
    """

    def __init__(self, path: Path, inputs: Sequence[str], outputs: Sequence[str], any_batch: bool) -> None:
        super().__init__()
        self.file, self.inputs, self.outputs, self.any_batch = path, tuple(inputs), tuple(outputs), any_batch
        self.program = Program((), (), {})
        self.fixed: dict[str, Array] = {}
        self.batch_axes: dict[str, int | None] = {}
        self.taken: dict[str, int] = {}
        self.custom_ops: Path | None = None

    @property
    def islands(self) -> dict[str, Island]:
        """The regions that ONNX Runtime computes in float, by the paths of their modules."""
        return {path: module for path, module in self.named_modules() if isinstance(module, Island)}

    @property
    def file_nodes(self) -> dict[str, FileNode]:
        """The nodes of the file by the paths of their modules (`qatkit.graph.selectors`)."""
        return {step.path: step.node for step in self.program.modules() if step.node is not None}

    @property
    def paths(self) -> dict[str, str]:
        """The paths of modules, by the names of their nodes and of these nodes' outputs."""
        found: dict[str, str] = {}
        for step in self.program.modules():
            found |= dict.fromkeys((*filter(None, step.outputs), step.name), step.path)
        return found

    @property
    def norms_in_parts(self) -> list[str]:
        """The names of the nodes x - ReduceMean(x), with which a LayerNorm of simple operators begins."""
        makers = {name: step for step in self.program.steps for name in step.outputs}
        kinds = {name: self._kind(step) for name, step in makers.items()}
        return [
            step.name
            for step in self.program.steps
            if self._kind(step) == "Sub"
            and len(step.inputs) > 1
            and kinds.get(step.inputs[1]) == "ReduceMean"
        ]

    def _kind(self, step: Step) -> str:
        own = self.get_submodule(step.path) if step.path else None
        return own.node.op_type if isinstance(own, Operator) else type(own).__name__

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor | dict[str, Tensor]:
        """Runs the file's nodes.

        Args:
            args: the inputs in the file's order.
            kwargs: the inputs by name.

        Returns:
            The only output, or all of them by name.

        Raises:
            ConfigError: an input is missing, or a node has no PyTorch equivalent for these inputs.
        """
        values = self.values(dict(zip(self.inputs, args, strict=False)) | kwargs)
        found = {
            name: _of_sizes(values[source])
            if source not in self.program.constants
            else tensor(values[source])
            for name, source in zip(self.outputs, self.program.outputs, strict=True)
        }
        return found if len(found) > 1 else next(iter(found.values()))

    def values(self, inputs: Mapping[str, Value], keep: bool = False) -> dict[str, Value]:
        """Runs the file's nodes and returns the values of `program.outputs`; with `keep`, every value.

        Raises:
            ConfigError: an input is missing, or a node has no PyTorch equivalent for the given inputs.
        """
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise ConfigError(
                "inputs", ", ".join(inputs) or "none", f"{', '.join(self.inputs)}; '{missing[0]}' is missing"
            )
        values: dict[str, Value] = {name: _given(value) for name, value in inputs.items()}
        self._run(self.program, values, keep)
        return values

    def _run(self, program: Program, values: dict[str, Value], keep: bool) -> None:
        last = {} if keep else _last_readers(program)
        values |= program.constants
        for number, step in enumerate(program.steps):
            given = [values[name] if name else None for name in step.inputs]
            try:
                made = self._branch(step, given[0], values) if step.branches else self.computed(step, given)
            except UnsupportedError as error:
                raise ConfigError("onnx", self.file, reason=f"node '{step.name}': {error}") from error
            except ConfigError:
                raise
            except Exception as error:
                error.add_note(f"in node '{step.name}' of {self.file}")
                raise
            values |= {name: value for name, value in zip(step.outputs, made, strict=False) if name}
            for name in last.get(number, ()):
                values.pop(name, None)

    def computed(self, step: Step, given: Sequence[Value]) -> tuple[Value, ...]:
        """Returns the outputs of one node; constant inputs are taken from the step."""
        given = [step.constants.get(i, value) for i, value in enumerate(given)]
        module = self.get_submodule(step.path)
        if not isinstance(module, (Operator, Refused)) and not getattr(module, "positional", False):
            given = [tensor(value) for value, name in zip(given, step.inputs, strict=True) if name]
        made = module(*given)
        return made if isinstance(made, tuple) else (made,)

    def _branch(self, step: Step, condition: Value, values: dict[str, Value]) -> tuple[Value, ...]:
        assert step.branches is not None
        chosen = step.branches[0 if one_int(condition) else 1]
        inner = dict(values)
        self._run(chosen, inner, keep=True)
        return tuple(inner[name] for name in chosen.outputs)


def import_onnx(
    path: Path | str,
    *,
    fixed: Mapping[str, Any] | None = None,
    any_batch: bool = True,
    custom_ops: Path | str | None = None,
) -> ImportedModel:
    """Returns a float ONNX file as a PyTorch module in inference mode.

    Nodes without a PyTorch equivalent (unknown operators, loops, sizes that depend on values) become an
    `Island`. It stays float, and no gradient passes through it.

    Args:
        path: the file, with its external data next to it.
        fixed: values of inputs that become constants, by name, such as a sampling rate.
        any_batch: whether to allow any batch size if the first axis of every input has size 1. A Reshape to [1, ...]
            then keeps the first axis. `prove_import` checks whether the file allows it.
        custom_ops: a library of custom operators (`SessionOptions.register_custom_ops_library`), which every later
            session of this process loads.

    Raises:
        ConfigError: the file cannot be read or is quantized already, a fixed value fits no input, a node draws random
            numbers, or neither PyTorch nor ONNX Runtime can run a node.
    """
    from qatkit.importing.build import built

    library = None if custom_ops is None else Path(custom_ops)
    if library is not None:
        use_library(library)
    model = built(Path(path), fixed or {}, any_batch, library)
    model.custom_ops = library
    return model


def _of_sizes(value: Value) -> Tensor:
    """Returns an output as a tensor.

    An array of a few numbers is converted number by number, so that a recorded graph follows sizes that change.
    """
    if not isinstance(value, np.ndarray) or value.ndim > 1 or value.size > _SIZES:
        return tensor(value)
    kind = tensor(value).dtype
    numbers = [torch.full((1,), one, dtype=kind) for one in value.reshape(-1).tolist()]
    return torch.cat(numbers) if value.ndim else numbers[0].reshape(())


def _last_readers(program: Program) -> dict[int, list[str]]:
    """Returns the values to drop after each step, by its index: no later step reads them, and they are no outputs."""
    readers: dict[str, int] = {}
    for number, step in enumerate(program.steps):
        for name in (*step.inputs, *step.outputs, *step.captured()):
            readers[name] = number
    kept = {*program.outputs, ""}
    last: dict[int, list[str]] = {}
    for name, number in readers.items():
        if name not in kept:
            last.setdefault(number, []).append(name)
    return last


def _given(value: Any) -> Value:
    """Returns an input as a tensor; a float tensor gets torch's default type (float64 in `qatkit.graph.proof`)."""
    found = value if isinstance(value, Tensor) else torch.from_numpy(array(value))
    wanted = torch.get_default_dtype() if found.is_floating_point() else found.dtype
    return found if found.dtype == wanted else found.to(wanted)


def _as_arrays(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(map(_as_arrays, made))
    return made.numpy() if isinstance(made, Tensor) else np.asarray(made)
