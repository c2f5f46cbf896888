"""Makes steps of the imported program read other values in the file, by changing the inputs of the steps' nodes.

A step may stand for several nodes of the file (`patterns`).
"""

from __future__ import annotations

import onnx_ir as ir

from qatkit.export.rewrite import subgraphs
from qatkit.importing.island import Island
from qatkit.importing.program import Step
from qatkit.importing.written_file import WrittenFile, refused

_PASSING = ("Identity", "Dropout")


class Rewired:
    """Makes steps of a file read other values."""

    def __init__(self, file: WrittenFile) -> None:
        self.file = file

    def reads(self, step: Step, name: str, place: int, value: ir.Value) -> None:
        """Makes a step read `value` instead of the value `name`.

        Args:
            step: the step.
            name: the name of the old value.
            place: the position among the inputs of the step (two inputs may have the same name).
            value: the new value.

        Raises:
            ConfigError: the nodes of the step do not read the old value.
        """
        source = origin(self.file.value(name))
        last = self.file.maker(next(one for one in step.outputs if one))
        direct = [i for i, one in enumerate(last.inputs) if one is not None and origin(one) is source]
        parts = self._parts(step, last, source)
        for i in [place] if place in direct and len(last.inputs) >= len(step.inputs) else direct:
            last.replace_input_with(i, value)
        if not direct and not parts:
            raise refused(self.file.path, f"node '{step.name}' has no input '{name}'")
        for node in parts:
            for i, one in enumerate(node.inputs):
                if one is not None and origin(one) is source:
                    node.replace_input_with(i, value)

    def inside(self, step: Step, name: str, value: ir.Value) -> None:
        """Makes the branches of an If read `value` instead of the value `name`."""
        old = self.file.value(name)
        self._replace(subgraphs(self.file.maker(next(one for one in step.outputs if one))), old, value)

    def island(self, island: Island, name: str, value: ir.Value) -> None:
        """Makes the nodes of an island, including their inner graphs, read `value` instead of the value `name`."""
        source = origin(self.file.value(name))
        for output in island.region.nodes:
            node = self.file.maker(output)
            for i, one in enumerate(node.inputs):
                if one is not None and origin(one) is source:
                    node.replace_input_with(i, value)
            self._replace(subgraphs(node), self.file.value(name), value)

    def _replace(self, waiting: list[ir.Graph], old: ir.Value, value: ir.Value) -> None:
        """Makes graphs, and the graphs inside them, read `value` instead of `old`."""
        while waiting:
            graph = waiting.pop()
            for node in graph:
                waiting += subgraphs(node)
                for i, one in enumerate(node.inputs):
                    if one is not None and (one is old or origin(one) is origin(old)):
                        node.replace_input_with(i, value)
            for i, one in enumerate(graph.outputs):
                if one is old:
                    graph.outputs[i] = value

    def _parts(self, step: Step, last: ir.Node, source: ir.Value) -> list[ir.Node]:
        """Returns the nodes of a step between `source` and its last node.

        If nodes outside the step read them too, the step gets copies of them, which are returned instead.
        """
        ends = {id(origin(self.file.value(name))) for name in step.inputs if name in self.file.values}
        found: list[ir.Node] = []
        waiting = [last]
        while waiting:
            for value in waiting.pop().inputs:
                node = None if value is None or id(origin(value)) in ends else value.producer()
                if node is not None and node not in found and node not in self.file.added:
                    found.append(node)
                    waiting.append(node)
        order = {id(node): i for i, node in enumerate(self.file.graph)}
        found = [node for node in sorted(found, key=lambda n: order[id(n)]) if _depends(node, source, found)]
        inside = {*found, last}
        shared = any(reader not in inside for node in found for v in node.outputs for reader, _ in v.uses())
        return self._copies(found, last) if shared else found

    def _copies(self, nodes: list[ir.Node], last: ir.Node) -> list[ir.Node]:
        made: dict[ir.Value, ir.Value] = {}
        copies = []
        for node in nodes:
            inputs = [None if value is None else made.get(value, value) for value in node.inputs]
            new = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                name=self.file.name(f"{node.name}_copy"),
                num_outputs=len(node.outputs),
            )
            for old, value in zip(node.outputs, new.outputs, strict=True):
                value.name = self.file.name(f"{old.name}_copy")
                made[old] = value
            self.file.graph.insert_after(node, new)
            copies.append(new)
        for i, one in enumerate(last.inputs):
            if one is not None and one in made:
                last.replace_input_with(i, made[one])
        return copies


def origin(value: ir.Value) -> ir.Value:
    """Returns the value that only passes Identity and Dropout nodes on its way to `value`, or `value` itself."""
    node = value.producer()
    while node is not None and node.op_type in _PASSING and node.domain == "":
        before = node.inputs[0]
        if before is None:
            break
        value, node = before, before.producer()
    return value


def _depends(node: ir.Node, source: ir.Value, among: list[ir.Node]) -> bool:
    waiting, seen = [node], set[int]()
    while waiting:
        for value in waiting.pop().inputs:
            if value is None or id(value) in seen:
                continue
            seen.add(id(value))
            if origin(value) is source:
                return True
            maker = value.producer()
            if maker is not None and maker in among:
                waiting.append(maker)
    return False
