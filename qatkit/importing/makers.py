"""Finds the region of a prepared or converted graph that computes a tensor of the file.

A region is the set of all nodes of the graph that belong to one node of the file (`regions`). The search passes
through nodes of the file that the graph lacks, because they became part of a range (Relu) or of weights (a
BatchNormalization, a layer scale), and through nodes that only move or combine values.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from qatkit.importing.program import ImportedModel, Operator, Step
from qatkit.importing.regions import INPUT, Regions, region_of

# Operators that the graph may lack, because they became part of a range; operators that move or combine values.
_ABSORBED = ("Relu", "Clip")
_NOTHING = (
    *(
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Slice",
        "Pad",
        "Expand",
        "Tile",
        "Cast",
        "CastLike",
    ),
    *("Concat", "Resize", "Upsample", "Split", "Gather", "Sum", "Max", "Min", "Mean"),
)


class Way(NamedTuple):
    """The path from a tensor back to the region that computes it.

    Attributes:
        region: the region; "input NAME" for an input of the file; "" if no region is found (sizes, constants).
        absorbed: number of nodes on the path that are part of a range or of weights.
        moved: whether there are nodes on the path that move or combine values.
    """

    region: str
    absorbed: int = 0
    moved: bool = False


class Makers:
    """Finds the regions of a graph that compute the tensors of the file.

    Args:
        model: the imported model.
        regions: the regions of the prepared or converted graph.
    """

    def __init__(self, model: ImportedModel, regions: Regions) -> None:
        self.model, self.regions = model, regions
        self.by_output = {name: step for step in model.program.steps for name in step.outputs if name}
        inner = regions.steps.values()  # including branches
        self._inside = {name: step for step in inner for name in step.outputs if name}

    def is_folded(self, step: Step) -> bool:
        """Returns whether a step is folded into the weights before it, so that no node of the graph computes it."""
        if step.path in self.regions.nodes:
            return False
        own = self.model.get_submodule(step.path)
        norm = isinstance(own, nn.modules.batchnorm._BatchNorm)
        return norm or (isinstance(own, Operator) and own.node.op_type == "Mul" and _factor(step))

    def region(self, name: str) -> str:
        """Returns the region that computes a value of the file; "" if there is none."""
        return self.way(name).region

    def way(self, name: str) -> Way:
        """Returns the path from a value of the file back to the region that computes it."""
        absorbed, moved = 0, False
        while (step := self.by_output.get(name) or self._inside.get(name)) is not None:
            if region_of(step) in self.regions.nodes:
                return Way(region_of(step), absorbed, moved)
            if step.branches:  # a branch may return an outer value
                place = step.outputs.index(name)
                ways = (self.way(branch.outputs[place]) for branch in step.branches)
                return next((way for way in ways if way.region), Way(""))
            own = self.model.get_submodule(step.path)
            kind = own.node.op_type if isinstance(own, Operator) else type(own).__name__
            if kind in _NOTHING:
                moved = True
            elif kind in _ABSORBED or self.is_folded(step):
                absorbed += 1
            else:
                return Way("")
            name = next((one for one in step.inputs if one), "")
        return Way(f"{INPUT}{name}" if name in self.model.inputs else "", absorbed, moved)


def _factor(step: Step) -> bool:
    """Returns whether exactly one input of a Mul is a constant of floats."""
    return len(step.constants) == 1 and next(iter(step.constants.values())).dtype.kind == "f"
