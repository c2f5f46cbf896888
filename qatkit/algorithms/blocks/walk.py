"""Walks through every block of a graph once, in order.

Each block first runs in float on the outputs of the earlier float blocks. Then the algorithm changes it, and
it runs quantized on the outputs of the earlier quantized blocks.

    float inputs ──── block in float ────────────────────────→ float outputs, the target
    quantized inputs ─ learn(block): changes its operators ──→ block quantized ─→ quantized outputs

Later blocks therefore see earlier ones in their final state. Apart from learning, the model runs over the
images only twice, for any number of blocks. Only the tensors that are alive between two blocks are kept
(`qatkit.algorithms.blocks.cached`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.algorithms.blocks.algorithm import BlockAlgorithm
from qatkit.algorithms.blocks.cached import Cache
from qatkit.algorithms.blocks.fisher import fisher_diagonal
from qatkit.algorithms.blocks.journal import Found, Journal, current, fingerprint
from qatkit.algorithms.blocks.lesson import Learner, Lesson, Tensors, changeable
from qatkit.algorithms.blocks.partition import Block, extract, is_end
from qatkit.graph.nodes import is_float_tensor, module_of, results, site
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.placement import constants
from qatkit.graph.quantizers import quantizer_of
from qatkit.graph.signature import Example, batch_size, graph_axes, inputs_of
from qatkit.progress import shown
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATOperator

_FLOAT, _QUANTIZED, _FISHER = "float", "quantized", "fisher"
# A step uses this many positions (rows of a Linear, pixels of a Conv) or images, whichever is reached first.
_ROWS, _MOST_IMAGES = 1024, 32
_MIB = 2**20


@dataclass(frozen=True)
class BlockWalk:
    """A call of an algorithm: its graph and images, the operators that it may change, and its finished blocks.

    Attributes:
        graph_module: the calibrated graph; fake quantization is on after each walk.
        operators: the operators that may be changed, by site.
        skipped: (site, reason) of the other operators.
        batches: the graph's inputs, by chunk.
        journal: the finished blocks, which are not learned again.
        memory: the limit for cached tensors in memory, in MiB.
    """

    graph_module: fx.GraphModule
    operators: dict[str, QATOperator]
    skipped: list[tuple[str, str]]
    batches: list[Tensors]
    journal: Journal
    memory: int

    @classmethod
    def of(
        cls, algorithm: BlockAlgorithm, graph_module: fx.GraphModule, inputs: Iterable[Example]
    ) -> BlockWalk:
        """Returns a walk over the images that the algorithm needs, with the finished blocks of a killed run."""
        operators, skipped = changeable(graph_module, algorithm.stays, tables=algorithm.tables)
        batches = _chunks(graph_module, inputs, algorithm.images, algorithm.batch_size)
        journal = Journal(current().file, _key(graph_module, batches, algorithm))
        return cls(graph_module, operators, skipped, batches, journal, algorithm.memory)

    def walk(
        self,
        blocks: Sequence[Block],
        learner: Learner,
        title: str,
        *,
        fisher: bool = False,
        targets: bool = True,
    ) -> None:
        """Applies `learner` to all blocks of the graph, in order.

        Args:
            blocks: the blocks of the graph.
            learner: the learner that changes them.
            title: the title of the progress bar.
            fisher: whether to provide `Lesson.importance`, by a forward and a backward pass per batch through
                the part of the float graph that follows the block.
            targets: whether to provide `Lesson.targets`; if not, outputs that no later block reads are not
                computed.
        """
        if not self.operators:
            return
        with inference(self.graph_module), closing(_State(self)) as state:
            for number, (block, _) in enumerate(
                shown([(block, block.operators) for block in blocks], title, current().progress, "operators")
            ):
                lesson = state.lesson(block, number)
                later = {node for rest in blocks[number + 1 :] for node in rest.inputs}
                state.run(lesson, _FLOAT, set(block.outputs) if targets else later)
                if lesson.operators:
                    learner.apply(lesson, self.journal.next(partial(state.taught, learner, lesson, fisher)))
                state.run(lesson, _QUANTIZED, later)
                state.forget(later)
                current().between()
        set_phase(self.graph_module, observe=False, quantize=True)


class _State:
    """The tensors that are alive at a point of the walk."""

    def __init__(self, walker: BlockWalk) -> None:
        graph_module, batches = walker.graph_module, walker.batches
        self.graph_module, self.operators, self.chunks = graph_module, walker.operators, len(batches)
        self.cache = Cache(walker.memory * _MIB)
        self.device = next(p.device for p in graph_module.parameters())
        inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.axes = graph_axes(graph_module, batches[0])
        self.images = batch_size(batches[0], self.axes)
        self.example = batch_size([node.meta["value"] for node in inputs], self.axes)
        for i, batch in enumerate(batches):
            for node, tensor in zip(inputs, batch, strict=True):
                self.cache.put((_FLOAT, node), i, tensor, exact=True)
        self.alive = set(inputs)

    def lesson(self, block: Block, number: int) -> Lesson:
        mine = [site(node) for node in block.operators]
        own = {name: self.operators[name] for name in mine if name in self.operators}
        return Lesson(
            block,
            block.extract(),
            own,
            self.chunks,
            torch.Generator().manual_seed(1000 * current().seed + number),
            self.together(block),
            lambda chunks: self.joined(_QUANTIZED, block.inputs, chunks),
            lambda chunks: self.joined(_FLOAT, block.inputs, chunks),
            lambda chunks: self.joined(_FLOAT, block.outputs, chunks),
        )

    def together(self, block: Block) -> int:
        """Returns the number of chunks per step.

        With it, the operator with the fewest positions gets about `_ROWS` of them in a step, from at most about
        `_MOST_IMAGES` images. It is 1 if an input or output of the block does not have one row per image.
        """
        if not all(self.by_rows(node) for node in (*block.inputs, *block.outputs)):
            return 1
        sizes = [_positions(node) * self.images // self.example for node in block.operators]
        return max(1, min(_ROWS // max(1, min(sizes, default=1)), -(-_MOST_IMAGES // self.images)))

    def by_rows(self, node: fx.Node) -> bool:
        """Returns whether a tensor has one row per image.

        Its first axis then has the size of the batch, for the example and for each chunk.
        """
        value = node.meta.get("value")
        return (
            isinstance(value, Tensor)
            and value.ndim > 0
            and len(value) == self.example
            and all(axis == 0 for axis in self.axes)
        )

    def joined(self, side: str, nodes: Sequence[fx.Node], chunks: Sequence[int]) -> Tensors:
        parts = [self.get(side, nodes, chunk) for chunk in chunks]
        return (
            parts[0] if len(parts) == 1 else tuple(torch.cat(values) for values in zip(*parts, strict=True))
        )

    def taught(self, learner: Learner, lesson: Lesson, fisher: bool) -> Found:
        return learner.learn(self.weighed(lesson) if fisher else lesson)

    def weighed(self, lesson: Lesson) -> Lesson:
        """Returns the lesson with the importance of its floating-point outputs."""
        outputs = lesson.block.outputs
        tail, inputs = self.behind(lesson.block)
        chosen = [i for i, node in enumerate(inputs) if node in outputs and is_float_tensor(node)]
        for i in range(self.chunks):
            found = fisher_diagonal(tail, self.get(_FLOAT, inputs, i), chosen, lesson.generator)
            for index, weights in zip(chosen, found, strict=True):
                self.cache.put((_FISHER, inputs[index]), i, weights)
        nodes = [inputs[i] for i in chosen]
        return replace(lesson, importance=lambda chunks: self.joined(_FISHER, nodes, chunks))

    def behind(self, block: Block) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Returns the float graph after a block, and the nodes whose values are its inputs."""
        graph, free = self.graph_module.graph, constants(self.graph_module.graph)
        order = list(graph.nodes)
        after = [node for node in order[order.index(block.nodes[-1]) + 1 :] if not is_end(node)]
        inputs = [node for node in order if node in self.alive]
        inside = [node for node in after if node.op != "placeholder" and node not in free]
        tail = extract(inside, inputs, results(graph))
        set_phase(tail, observe=False, quantize=False)
        return tail, inputs

    def get(self, side: str, nodes: Sequence[fx.Node], chunk: int) -> Tensors:
        keys = [(_FLOAT if node.op == "placeholder" else side, node) for node in nodes]
        return tuple(_on(self.device, self.cache.get(key, chunk)) for key in keys)

    def run(self, lesson: Lesson, side: str, kept: Collection[fx.Node]) -> None:
        """Computes a block and stores those of its outputs that are in `kept`; if none are, it is not computed."""
        outputs = [node in kept for node in lesson.block.outputs]
        if not any(outputs):
            return
        set_phase(lesson.module, observe=False, quantize=side == _QUANTIZED)
        for i in range(self.chunks):
            values = lesson.module(*self.get(side, lesson.block.inputs, i))
            for node, value in compress(zip(lesson.block.outputs, values, strict=True), outputs):
                source = quantizer_of(node)  # its grid also contains values that were only moved afterwards
                quantizer = None if source is None else cast(FakeQuantize, module_of(source))
                self.cache.put((side, node), i, value, quantizer)
        self.alive.update(compress(lesson.block.outputs, outputs))

    def forget(self, wanted: Collection[fx.Node]) -> None:
        """Drops the tensors that are not in `wanted`, and the importance of all tensors."""
        for node in self.alive.difference(wanted):
            for side in (_FLOAT, _QUANTIZED):
                self.cache.drop((side, node))
        for node in list(self.alive):
            self.cache.drop((_FISHER, node))
        self.alive.intersection_update(wanted)

    def close(self) -> None:
        self.cache.close()


def _positions(node: fx.Node) -> int:
    """Returns the number of positions in an operator's output for the example: values divided by channels."""
    value, weight = node.meta["value"], cast(QATOperator, module_of(node)).weight
    return int(value.numel() // len(weight))


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_on(device, part) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _chunks(
    graph_module: fx.GraphModule, batches: Iterable[Example], images: int, size: int
) -> list[Tensors]:
    """Returns batches of at most `size` images, `images` in all; batches of a fixed size stay whole."""
    found: list[Tensors] = []
    have = 0
    for batch in batches:
        tensors = inputs_of(graph_module, batch)
        axes = graph_axes(graph_module, tensors)
        count = batch_size(tensors, axes)
        if all(axis is None for axis in axes):
            found.append(tensors)
        else:
            count = min(count, images - have)
            for start in range(0, count, size):
                rows = min(size, count - start)
                found.append(
                    tuple(
                        tensor if axis is None else tensor.narrow(axis, start, rows).clone()
                        for tensor, axis in zip(tensors, axes, strict=True)
                    )
                )
        have += count
        if have >= images:
            break
    return found


def _key(graph_module: fx.GraphModule, batches: Sequence[Tensors], algorithm: BlockAlgorithm) -> str:
    """Returns the key of a walk's inputs: graph and parameters, ranges, settings, seed and images."""
    images = {f"{i}.{j}": tensor for i, batch in enumerate(batches) for j, tensor in enumerate(batch)}
    kind = type(algorithm)
    about = {
        "code": graph_module.code,
        "seed": current().seed,
        "kind": f"{kind.__module__}.{kind.__qualname__}",
    }
    settings = {name: str(value) for name, value in vars(algorithm).items()}
    return fingerprint(about, settings, graph_module.state_dict(), images)
