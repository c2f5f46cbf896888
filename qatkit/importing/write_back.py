"""Writes a converted module of an imported file back by editing that file.

    regions.py           maps nodes of the converted graph to nodes of the file, and finds the pairs between them
    written_file.py      edits the file in memory: names, new nodes, constants and pairs
    written_weights.py   replaces float weights with integers and scales
    written_packed.py    writes packed weights of few bits, multiplied with float activations
    written_forms.py     replaces nodes with several others: gates, SiLU, transposed convolutions, image means

All nodes of the graph that belong to one node of the file form a region. For each input of a region, the graph
shows whether the node of the file must read the value directly or after a pair of QuantizeLinear and
DequantizeLinear. The pair is inserted after the value in the file, and only the inputs that are quantized in the
graph read it. Nodes that the graph has absorbed (a ReLU in a range that starts at zero, a reshape around a Linear)
stay in the file. A BatchNorm or a layer scale that was folded into weights is removed.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir
import torch
from torch import fx, nn

from qatkit.encryption.vault import readable
from qatkit.export.write_model import write_model
from qatkit.graph.convert.integer_modules import Quantized, QuantizeDequantize
from qatkit.graph.convert.recurrent_modules import QuantizedRecurrent
from qatkit.graph.convert.weight_only_modules import WeightOnly
from qatkit.graph.nodes import module_of
from qatkit.importing.island import Island
from qatkit.importing.island_graph import dtype_of
from qatkit.importing.makers import Makers
from qatkit.importing.program import ImportedModel, Operator, Step
from qatkit.importing.read import MAX_BYTES
from qatkit.importing.regions import (
    CONSTANT,
    INPUT,
    Edge,
    Regions,
    carries,
    pair_of,
    region_of,
    shape,
)
from qatkit.importing.rewired import Rewired
from qatkit.importing.written_file import BARRIER, Chain, Layout, Pair, WrittenFile, refused
from qatkit.importing.written_forms import Form, has_another_form
from qatkit.importing.written_packed import PackedWeights, is_packed
from qatkit.importing.written_weights import WrittenWeights
from qatkit.quant.spec import WHOLE, WIDE
from qatkit_verify.errors import ConfigError, counted, one_line
from qatkit_verify.files import whole
from qatkit_verify.session import open_session

_PER_TENSOR, _PER_CHANNEL = (
    11,
    13,
)  # the lowest opsets for pairs and Clips by inputs, and for scales along an axis
_HELD = (*WHOLE, *WIDE)  # number types that pairs may have
_NORM = {"Sub", "ReduceMean"}


def write_back(model: ImportedModel, converted: fx.GraphModule, path: Path) -> None:
    """Writes the file of `model` to `path` with the integers of its converted module, atomically.

    Names, inputs, outputs, metadata and doc strings do not change, nor do nodes without quantized inputs or
    weights. The opset is raised only if pairs need a higher one. An input that was fixed becomes a constant, and
    an If with a constant condition becomes the branch that it takes. In any other If, the branch that the example
    does not take stays float. The nodes of an `Island` stay float as well. Fused operators
    and local functions are written as their parts (`qatkit.importing.read`).

    Args:
        model: the file, imported by `import_onnx`.
        converted: `QATModule(model, example).convert().graph`.
        path: the file to write.

    Raises:
        ConfigError: a part of the converted module cannot be written into this file, or the file can no longer be
            read.
    """
    _Writer(model, converted).write(path)


def write_given(model: ImportedModel, path: Path) -> None:
    """Writes the float file of `model` to `path`, atomically.

    The file is copied if it has no external data, no input was fixed and no If has a constant condition. Otherwise
    it is written again with constants for fixed inputs, the chosen branches in place of such Ifs, and all weights
    inside.

    Raises:
        ConfigError: the file can no longer be read.
        ValueError: the checker or ONNX Runtime refuses the file that was written again.
    """
    with readable(model.file) as plain:
        tensors = (value.const_value for value in ir.load(plain).graph.initializers.values())
        alone = not any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)
        if alone and not model.fixed and not model.taken:
            with whole(path) as temporary:
                shutil.copyfile(plain, temporary)
            return
    file = WrittenFile(model, 1)
    file.tidy()
    write_model(file.model, path)


class _Writer:
    def __init__(self, model: ImportedModel, converted: fx.GraphModule) -> None:
        self.model, self.graph = model, converted
        self.regions = Regions(model, converted)
        self.outer = [step for step in model.program.steps if step.path]
        self.makers = Makers(model, self.regions)
        self.file = WrittenFile(model, self._opset())
        self.weights = WrittenWeights(self.file)
        self.packed = PackedWeights(self.weights)
        self.rewired = Rewired(self.file)
        self.readers: dict[str, set[str]] = defaultdict(set)
        for step in self.outer:
            own = model.get_submodule(step.path)
            if isinstance(own, Operator):
                for name in step.inputs:
                    self.readers[name].add(own.node.op_type)

    def write(self, path: Path) -> None:
        for step in self.outer:
            self._fold(step)
        for step in self.outer:
            for module in self._modules(step.path):
                if not has_another_form(self.regions, step.path, ()):
                    self._weight(step, module)
        for step in self.model.program.steps:
            if step.branches:
                self._branch(step)
            if self.regions.nodes.get(region_of(step)):
                self._edges(step)
        self._outputs()
        self._declare_outputs()
        self.file.tidy()
        held = (value.const_value for value in self.file.graph.initializers.values())
        if sum(tensor.nbytes for tensor in held if tensor is not None) > MAX_BYTES:
            raise refused(self.model.file, "the constants would exceed 2 GB, the most that one file can hold")
        try:
            write_model(self.file.model, path)
        except ValueError as error:
            raise refused(self.model.file, f"the edited file is not valid ({one_line(error)})") from error

    def _weight(self, step: Step, module: nn.Module) -> None:
        if is_packed(module):
            self.packed.write(step, module)
        else:
            self.weights.write(step, module)

    def _opset(self) -> int:
        """Returns the lowest opset that supports the pairs.

        Raises:
            ConfigError: a pair has a number type that cannot be written into the file.
        """
        modules = list(self.graph.modules())
        for module in modules:
            if isinstance(module, QuantizeDequantize) and (kind := pair_of(module).dtype) not in _HELD:
                raise ConfigError(
                    "onnx",
                    self.model.file,
                    reason=f"activations in {kind} cannot be written into the given file, only {', '.join(_HELD)}",
                )
        scales = [module.weight_scale for module in modules if isinstance(module, Quantized)]
        return _PER_CHANNEL if any(scale.ndim for scale in scales) else _PER_TENSOR

    def _modules(self, path: str) -> list[nn.Module]:
        nodes = self.regions.nodes.get(path, ())
        return [module_of(node) for node in nodes if node.op == "call_module"]

    def _branch(self, step: Step) -> None:
        """Writes packed weights and weights of recurrent nodes in branches of an If; others are refused there."""
        for node in self.regions.nodes.get(region_of(step), ()):
            module = module_of(node) if node.op == "call_module" else None
            inner = self.regions.steps[self.regions.part[node]]
            if isinstance(module, (QuantizedRecurrent, WeightOnly)):
                self._weight(inner, module)
            elif module is not None and _differs(module, self.model.get_submodule(str(node.target))):
                where = f"node '{inner.name}' is in a branch of '{step.name}', whose condition is computed"
                why = "its changed weights cannot be written"
                if type(module).__name__.startswith("Quantized"):
                    why = "it cannot be quantized there; keep it in float with backend.overrides"
                raise refused(self.model.file, f"{where}, so {why}")

    def _fold(self, step: Step) -> None:
        """Removes a node from the file if its arithmetic is folded into the weights before it."""
        source = next((name for name in step.inputs if name), "")
        if self.makers.is_folded(step) and self.makers.region(source):
            self.file.bypass(self.file.value(step.outputs[0]), self.file.value(source))

    def _edges(self, step: Step) -> None:
        """Makes the node of a step read the same values and pairs as its region."""
        edges = self.regions.edges(region_of(step))
        if step.path and has_another_form(self.regions, step.path, edges):
            self._form(step, edges, dict(self._matched(step, edges)))
            return
        if self.regions.loses(region_of(step)):
            raise refused(
                self.model.file,
                f"values inside node '{step.name}' are quantized, which a single node cannot express",
            )
        if step.branches:
            self._captured(step, edges)
            return
        own = self.model.get_submodule(step.path)
        for place, wanted in dict(self._matched(step, edges)).items():
            nodes = own.region.nodes if isinstance(own, Island) else (next(n for n in step.outputs if n),)
            chain = wanted if isinstance(own, Island) else self._fitted(step, place, wanted)
            if any(_keeps_layout(self.file.maker(name)) for name in nodes):
                chain = self._in_layout(step, place, chain, edges)
            if chain:
                name = step.inputs[place]
                value = self.file.link(self._source(name, chain), chain)
                if isinstance(own, Island):
                    self.rewired.island(own, name, value)
                else:
                    self.rewired.reads(step, name, place, value)

    def _in_layout(self, step: Step, place: int, chain: Chain, edges: Sequence[Edge]) -> Chain:
        """Appends a `Layout` to the chain if the value has 1 to 3 spatial axes.

        ONNX Runtime's Transposes, which move channels to the last axis, then stop before the node.
        """
        maker = self.makers.region(step.inputs[place])
        axes = len(shape(next(edge.source for edge in edges if edge.maker == maker))) - 2
        return (*chain, Layout(axes)) if axes in (1, 2, 3) else chain

    def _captured(self, step: Step, edges: Sequence[Edge]) -> None:
        """Makes both branches of an If read the same values and pairs as the branch that the example took."""
        for maker in dict.fromkeys(edge.maker for edge in edges):
            chains = {edge.chain for edge in edges if edge.maker == maker}
            names = [name for name in step.captured() if self.makers.region(name) == maker]
            if not names:
                raise refused(self.model.file, _unread(f"the branches of node '{step.name}' read", maker))
            if len(chains) > 1:
                reason = f"the branches of node '{step.name}' read one value with different quantizations"
                raise refused(self.model.file, reason)
            for name in names if any(chains) else ():
                chain = next(iter(chains))
                self.rewired.inside(step, name, self.file.link(self._source(name, chain), chain))

    def _form(self, step: Step, edges: Sequence[Edge], chains: dict[int, Chain]) -> None:
        values = {}
        for edge in edges:
            found = [p for p, chain in chains.items() if chain == edge.chain and self._makes(step, p, edge)]
            name = step.inputs[found[0]] if found else ""
            values[edge.place] = self.file.link(self._source(name, edge.chain), edge.chain)
        Form(self.file, self.packed, self.regions, step).write(values)

    def _makes(self, step: Step, place: int, edge: Edge) -> bool:
        return self.makers.region(step.inputs[place]) == edge.maker

    def _matched(self, step: Step, edges: Sequence[Edge]) -> Iterator[tuple[int, Chain]]:
        """Yields the position of each input from another region, and the chain after which the node reads it.

        Raises:
            ConfigError: the region reads a value that the node does not read, or its inputs are ambiguous.
        """
        makers = {place: self.makers.region(name) for place, name in enumerate(step.inputs) if name}
        for maker in dict.fromkeys(edge.maker for edge in edges):
            own = [edge for edge in edges if edge.maker == maker]
            places = [place for place, found in makers.items() if found == maker]
            if not places:
                raise refused(self.model.file, _unread(f"node '{step.name}' reads", maker))
            chains = [edge.chain for edge in own]
            if len(set(chains)) > 1 and len(chains) != len(places):
                reason = f"node '{step.name}' reads one value with different quantizations"
                raise refused(self.model.file, f"{reason}, and it is ambiguous which input has which")
            for i, place in enumerate(places):
                yield place, chains[i if len(chains) == len(places) else 0]

    def _source(self, name: str, chain: Chain) -> ir.Value:
        """Returns the value from which a chain starts.

        It is the input of an absorbed Clip whose upper bound is below the maximum of the chain's first pair, and
        otherwise the value `name`.
        """
        step = self.makers.by_output.get(name)
        first = next((link for link in chain if isinstance(link, Pair)), None)
        if step is None or first is None or step.path in self.regions.nodes:
            return self.file.value(name)
        own = self.model.get_submodule(step.path)
        if not isinstance(own, Operator) or own.node.op_type != "Clip" or not _clips(step, own, first):
            return self.file.value(name)
        return self.file.value(step.inputs[0])

    def _fitted(self, step: Step, place: int, chain: Chain) -> Chain:
        """Returns a chain with exactly the barriers that ONNX Runtime needs at this node."""
        node = self.file.maker(next(name for name in step.outputs if name))
        if node.op_type in ("LayerNormalization", "Gelu") and chain[-1:] == (BARRIER,):
            return chain[:-1]  # a single node in the file, so there is no fusion to prevent
        if node.op_type in _NORM and carries(chain[-1:]) and self.readers[step.inputs[place]] >= _NORM:
            return (*chain, BARRIER)  # a LayerNorm in parts, which is not fused if each part has its own pair
        if node.op_type == "AveragePool" and node.attributes.get_int("ceil_mode", 0) == 1 and carries(chain):
            return (*chain, BARRIER)  # the int8 kernel would count the cells that only the rounding adds
        if node.op_type == "Add" and not chain and self._becomes_gemm(step, step.inputs[place]):
            return (BARRIER,)
        return chain

    def _becomes_gemm(self, step: Step, name: str) -> bool:
        """Returns whether ONNX Runtime fuses an int8 MatMul and the Add after it into one float Gemm.

        It does so for matrices, and for more axes if all sizes are known and a vector is added.
        """
        maker = self.makers.by_output.get(name)
        modules = [] if maker is None else self._modules(maker.path)
        if maker is None or not any(isinstance(module, Quantized) for module in modules):
            return False
        rank = max(len(shape(node)) for node in self.regions.nodes[maker.path])
        added = next(iter(step.constants.values()), None)
        gemm = rank < 3 or (self.file.is_static() and added is not None and added.ndim < 2)
        return gemm and self.file.maker(name).op_type == "MatMul"

    def _outputs(self) -> None:
        """Inserts the pairs of quantized outputs; the dequantized values keep the names of the outputs."""
        found = [one for one in self.regions.outputs() if one[0].op != "output"]
        named = list(zip(self.model.outputs, self.model.program.outputs, strict=True))
        if len(found) != len(named):
            raise refused(
                self.model.file,
                f"the file has {counted(len(named), 'output')}, but the converted graph has {len(found)}",
            )
        for place, ((name, source), (node, chain)) in enumerate(zip(named, found, strict=True)):
            if self.regions.region[node] == CONSTANT or not chain:
                continue
            if self.file.graph.outputs[place].is_graph_input():
                continue  # the output is an input of the file, which must not be quantized
            if self.makers.region(source) != self.regions.region[node]:
                raise refused(
                    self.model.file,
                    f"output '{name}' is not computed by the same node in the file and in the converted graph",
                )
            self._output(place, self.file.link(self._source(source, chain), chain), source)

    def _declare_outputs(self) -> None:
        """Sets the types and shapes of outputs that onnx cannot infer because other domains' operators precede them."""
        outputs = self.file.graph.outputs
        if all(value.type is not None and value.shape is not None for value in outputs):
            return
        found = open_session(self.model.file, threads=1, optimize=False).get_outputs()
        kinds = {one.name: dtype_of(one.type) for one in found}
        nodes = [one[0] for one in self.regions.outputs()]
        for value, name, node in zip(outputs, self.model.outputs, nodes, strict=True):
            if value.type is None and (kind := kinds[name]) is not None:
                value.type = ir.TensorType(kind)
            if value.shape is None:
                value.shape = ir.Shape([None] * len(shape(node)))

    def _output(self, place: int, value: ir.Value, source: str) -> None:
        outputs = self.file.graph.outputs
        old = outputs[place]
        if old is value:
            return
        if old is not self.file.value(source):  # an Identity follows
            cast(ir.Node, old.producer()).replace_input_with(0, value)
            return
        name = str(old.name)
        old.name = self.file.name(f"{name}_float")
        value.name, value.shape, value.type = name, old.shape, old.type
        outputs[place] = value


def _unread(reader: str, maker: str) -> str:
    """Returns an error's reason: the graph reads a value, and the file does not; `reader` ends with a verb."""
    value = f"input '{maker.removeprefix(INPUT)}'" if maker.startswith(INPUT) else f"an output of '{maker}'"
    return f"{reader} {value} in the converted graph, but not in the file"


def _differs(module: nn.Module, own: nn.Module) -> bool:
    """Returns whether the parameters of a module of the graph differ from those of the module of the file.

    Quantized and packed modules differ if the module of the file has any.
    """
    if is_packed(module) or type(module).__name__.startswith("Quantized"):
        return any(True for _ in own.parameters())
    return any(
        a.shape != b.shape or not torch.equal(a, b)
        for a, b in zip(module.parameters(), own.parameters(), strict=True)
    )


def _keeps_layout(node: ir.Node) -> bool:
    """Returns whether ONNX Runtime fails at a node, or computes it wrongly, after it has moved channels to the end."""
    if node.op_type == "Resize":
        return node.attributes.get_string("mode", "nearest") == "cubic" or "axes" in node.attributes
    return node.op_type == "Pad" and len(node.inputs) > 3 and node.inputs[3] is not None


def _clips(step: Step, own: Operator, pair: Pair) -> bool:
    """Returns whether the maximum of a Clip is below that of the following pair by more than half a step."""
    end = step.constants.get(2, own.node.get("max"))
    return end is not None and pair.largest > float(np.asarray(end).reshape(-1)[0]) + pair.scale / 2
