"""Builds the program that runs the graph of an ONNX file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from qatkit.graph.selectors import FileNode
from qatkit.importing.inputs import batch_axes, fixed_inputs, one_sample_per_run
from qatkit.importing.island import Island, Region
from qatkit.importing.islands import DOMAIN, RANDOM, cut_islands
from qatkit.importing.operators import Node, UnsupportedError, module_of
from qatkit.importing.operators.elementwise import drops
from qatkit.importing.operators.table import Array
from qatkit.importing.operators.values import array
from qatkit.importing.paths import Paths
from qatkit.importing.patterns import join_patterns
from qatkit.importing.program import LARGE, ImportedModel, Operator, Original, Program, Refused, Step
from qatkit.importing.read import infer_shapes, read
from qatkit_verify.errors import ConfigError, one_line

_PASSING = ("Identity", "Dropout")
_QUANTIZED = (
    "QLinear",
    "QGemm",
    "QAttention",
    "ConvInteger",
    "MatMulInteger",
    "DynamicQuantize",
    "QuantizeLinear",
)
_STANDARD = ("", "ai.onnx")


def built(file: Path, fixed: Mapping[str, Any], any_batch: bool, library: Path | None) -> ImportedModel:
    """Returns the module of a file; see `qatkit.importing.program.import_onnx`.

    Whenever nodes turn out to have no PyTorch equivalent, the file is read again, and these nodes become islands, which
    run in ONNX Runtime.
    """
    unsupported: dict[str, str] = {}
    while True:
        made, found = _attempt(file, fixed, any_batch, library, unsupported)
        if not found.keys() - unsupported.keys():
            return made.eval()
        unsupported |= found


def _attempt(
    file: Path,
    fixed: Mapping[str, Any],
    any_batch: bool,
    library: Path | None,
    unsupported: Mapping[str, str],
) -> tuple[ImportedModel, dict[str, str]]:
    """Returns a module, and why nodes have no PyTorch equivalent: a reason by the name of a node's first output."""
    model = read(file)
    given = fixed_inputs(file, model.graph, fixed)
    constants = {name: array(value) for name, value in given.items() if value.dtype.kind not in "OUS"}
    inputs = [value for value in model.graph.inputs if value.name not in given]
    several = any_batch and one_sample_per_run(inputs, model.graph)
    outputs = [str(value.name) for value in model.graph.outputs]
    made = ImportedModel(file, [str(value.name) for value in inputs], outputs, several)
    made.fixed = given
    made.batch_axes = batch_axes(inputs, several)
    infer_shapes(model)  # the modules for BatchNorm and PReLU depend on ranks
    regions = cut_islands(file, model, given, unsupported, several)
    join_patterns(model.graph)
    versions = {
        ("" if domain in _STANDARD else domain): version for domain, version in model.opset_imports.items()
    }
    builder = _Builder(file, made, versions, regions, library)
    made.program = builder.program(model.graph, constants)
    for step in made.program.modules():
        _add(made, step.path, builder.modules[step.path])
    return made, builder.unsupported


class _NeverError(UnsupportedError):
    """Raised for a random or quantized operator, which must not become part of an island either."""


class _Builder:
    """Builds the modules of a model's graphs."""

    def __init__(
        self,
        file: Path,
        model: ImportedModel,
        versions: Mapping[str, int],
        regions: Sequence[Region],
        library: Path | None,
    ) -> None:
        self.file, self.model, self.versions = file, model, versions
        self.regions, self.library = regions, library
        self.unsupported: dict[str, str] = {}
        self.paths = Paths(set(dir(model)))
        self.modules: dict[str, nn.Module] = {}
        self.known: dict[str, Array] = {}
        self.aliases: dict[str, str] = {}
        self.inside = 0
        self.parameters: dict[tuple[str, str, str], nn.Parameter] = {}

    def program(self, graph: ir.Graph, constants: Mapping[str, Array] | None = None) -> Program:
        """Returns a program with the steps of a graph, and adds their modules to `modules`."""
        self.known |= constants or {}
        for value in graph.initializers.values():
            if value.const_value is not None and value.dtype != ir.DataType.STRING:
                self.known[str(value.name)] = array(value.const_value.numpy())
        steps = [step for node in graph for step in self._steps(node)]
        outputs = tuple(self.aliases.get(str(value.name), str(value.name)) for value in graph.outputs)
        held = {name: self.known[name] for name in outputs if name in self.known}
        return Program(tuple(_needed(steps, outputs)), outputs, held)

    def _steps(self, node: ir.Node) -> Iterable[Step]:
        given = self._node(node)
        if node.op_type in _PASSING and given.domain == "":
            yield from self._passed(given)
            return
        if given.domain == DOMAIN:
            yield self._island(node, given)
            return
        if node.op_type == "If":
            yield from self._branched(node, given)
            return
        constants = [self.known.get(name) if name else None for name in given.inputs]
        if not self._folded(given, constants):
            yield self._step(given, constants)

    def _passed(self, node: Node) -> Iterable[Step]:
        """Yields the steps of a node that returns its first input: one if a Dropout also returns a mask, else none."""
        constants = [self.known.get(name) if name else None for name in node.inputs]
        if node.op_type == "Dropout" and drops(node, constants):
            reason = "Dropout in training mode draws random numbers, so no two runs would be equal"
            raise self._refused(node, _NeverError(reason))
        if node.outputs[0]:
            self.aliases[node.outputs[0]] = node.inputs[0]
            if node.inputs[0] in self.known:
                self.known[node.outputs[0]] = self.known[node.inputs[0]]
        if any(node.outputs[1:]):
            yield self._step(replace(node, outputs=("", *node.outputs[1:])), constants)

    def _node(self, node: ir.Node) -> Node:
        domain = "" if node.domain in _STANDARD else node.domain
        names = [
            self.aliases.get(str(v.name), str(v.name)) if v is not None and v.name else ""
            for v in node.inputs
        ]
        outputs = tuple(str(value.name) if value.name else "" for value in node.outputs)
        ranks = tuple(None if v is None or v.shape is None else len(v.shape) for v in node.inputs)
        attributes = {
            name: _plain(item)
            for name, item in node.attributes.items()
            if item.type != ir.AttributeType.GRAPH
        }
        name = node.name or f"{node.op_type}_{next((o for o in outputs if o), '')}"
        version = self.versions.get(domain, 1)
        return Node(
            name,
            node.op_type,
            domain,
            version,
            attributes,
            tuple(names),
            outputs,
            ranks,
            self.model.any_batch,
        )

    def _folded(self, node: Node, constants: Sequence[Array | None]) -> bool:
        """Computes a node whose inputs are constants, and adds its outputs to `known`; returns whether it was computed.

        Random and quantized operators and those without a PyTorch equivalent are not computed.
        """
        given = [value is not None for value, name in zip(constants, node.inputs, strict=True) if name]
        if (
            not all(given)
            or node.op_type in RANDOM
            or any(node.op_type.startswith(one) for one in _QUANTIZED)
        ):
            return False
        try:
            made = Operator(node, {})(*constants)
        except UnsupportedError:
            return False
        except Exception as error:  # torch's errors about constants that the operator does not accept
            raise self._refused(node, error) from error
        parts = made if isinstance(made, tuple) else (made,)
        self.known |= {name: part for name, part in zip(node.outputs, parts, strict=False) if name}
        return True

    def _step(self, node: Node, constants: Sequence[Array | None]) -> Step:
        held = {i: value for i, value in enumerate(constants) if value is not None}
        path = self.paths.of(node.name)
        try:
            made: nn.Module = self._module(node, constants, held)
        except _NeverError as error:
            if not self.inside:
                raise self._refused(node, error) from error
            made = Refused(str(error))
        except UnsupportedError as error:
            self.unsupported[next(name for name in node.outputs if name)] = str(error)
            made = Refused(str(error))
        except Exception as error:  # torch's errors about weights that the operator does not accept
            raise self._refused(node, error) from error
        self._share(node, made)
        self.modules[path] = made
        inputs = tuple("" if i in held else name for i, name in enumerate(node.inputs))
        takes_all = isinstance(made, Refused) or getattr(made, "positional", False)
        own = {
            i: one for i, one in held.items() if one.dtype.kind == "f" and one.size >= LARGE and not takes_all
        }
        rest = {i: one for i, one in held.items() if i not in own}
        originals = {i: Original.of(one) for i, one in own.items()}
        return Step(path, node.name, inputs, rest, node.outputs, originals=originals, node=_file_node(node))

    def _island(self, node: ir.Node, given: Node) -> Step:
        """Returns the step of a region; its session is opened now, so that errors of ONNX Runtime appear early."""
        made: nn.Module = Island(self.regions[node.attributes.get_int("index", 0)], self.library)
        path = self.paths.of(given.name)
        try:
            assert isinstance(made, Island)
            _ = made.session
        except UnsupportedError as error:
            if not self.inside:
                raise self._refused(given, error) from error
            made = Refused(str(error))
        self.modules[path] = made
        return Step(path, given.name, given.inputs, {}, given.outputs)

    def _refused(self, node: Node, error: Exception) -> ConfigError:
        return ConfigError("onnx", self.file, reason=f"node '{node.name}': {one_line(error)}")

    def _share(self, node: Node, made: nn.Module) -> None:
        """Makes a module share parameters with an earlier one, if operator, initializer and values are the same."""
        for owner in list(made.modules()):
            for name, parameter in list(owner._parameters.items()):
                place = {"bias": 2}.get(name, 0 if node.op_type == "Gather" else 1)
                if parameter is None or len(node.inputs) <= place:
                    continue
                known = self.parameters.setdefault((node.op_type, name, node.inputs[place]), parameter)
                if known is not parameter and known.shape == parameter.shape and known.equal(parameter):
                    owner._parameters[name] = known

    def _module(self, node: Node, constants: Sequence[Array | None], held: Mapping[int, Array]) -> nn.Module:
        if node.op_type in RANDOM:
            raise _NeverError(f"{node.op_type} draws random numbers, so no two runs would be equal")
        if any(node.op_type.startswith(one) for one in _QUANTIZED):
            raise _NeverError(
                f"{node.operator} shows that the model is quantized already; give a float model"
            )
        return module_of(node, constants) or Operator(node, held)

    def _branched(self, node: ir.Node, given: Node) -> Iterable[Step]:
        """Yields the steps of an If: the branch that a constant condition selects, or one step with both branches."""
        graphs = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        condition = self.known.get(given.inputs[0])
        if condition is not None:
            taken = 0 if condition.reshape(-1)[0] else 1
            self.model.taken[next(name for name in given.outputs if name)] = taken
            program = self.program(graphs[taken])
            yield from program.steps
            self.known |= {
                n: program.constants[o]
                for n, o in zip(given.outputs, program.outputs, strict=True)
                if o in program.constants
            }
            self.aliases |= dict(zip(given.outputs, program.outputs, strict=True))
            return
        self.inside += 1
        branches = self.program(graphs[0]), self.program(graphs[1])
        self.inside -= 1
        yield Step("", given.name, given.inputs, {}, given.outputs, branches)


def _file_node(node: Node) -> FileNode:
    """Returns the description of a node, against which selectors are matched."""
    weight = {"Gather": 0}.get(node.op_type, 1)
    turned = node.op_type in ("MatMul", "ConvTranspose") or (
        node.op_type == "Gemm" and not node.get("transB", 0)
    )
    return FileNode(node.name, node.op_type, node.inputs, node.outputs, weight, int(turned))


def _needed(steps: Sequence[Step], outputs: Sequence[str]) -> list[Step]:
    """Returns the steps on which an output depends."""
    wanted, kept = set(outputs), []
    for step in reversed(steps):
        if wanted & set(step.outputs):
            wanted |= {*step.inputs, *step.captured()}
            kept.append(step)
    return kept[::-1]


def _add(model: nn.Module, path: str, made: nn.Module) -> None:
    *above, name = path.split(".")
    owner = model
    for part in above:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    owner.add_module(name, made)


def _plain(item: ir.Attr) -> Any:
    """Returns an attribute as a Python value; a tensor becomes an array."""
    value = item.value
    if item.type == ir.AttributeType.TENSOR:
        return value.numpy()
    if item.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
        return list(value)
    return value
