"""Measures the range of every tensor of a float model by running it with all tensors as outputs.

Without batches of inputs, the inputs are random. Tensors in branches and loop bodies are not measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit_verify.feeds import feeds
from qatkit_verify.session import open_session

_UNKNOWN = (1, 3, 224, 224)  # the sizes of dynamic axes; smaller sides are tried first
_LEAST_SIDE = 32


@dataclass
class Range:
    """The range of one float32 tensor over all runs, without infinities and NaN.

    Attributes:
        low, high: the smallest and the largest value.
        least: the smallest nonzero magnitude; infinite if all values are zero.
        finite: whether all values were finite.
    """

    low: float = np.inf
    high: float = -np.inf
    least: float = np.inf
    finite: bool = True

    @property
    def largest(self) -> float:
        """The largest magnitude; 0 if no value was finite."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    def add(self, values: NDArray[Any]) -> None:
        """Widens the range so that it contains an array's values."""
        finite = values[np.isfinite(values)]
        self.finite = self.finite and finite.size == values.size
        if finite.size:
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
            magnitudes = np.abs(finite[finite != 0])
            self.least = min(self.least, float(magnitudes.min())) if magnitudes.size else self.least


def ranges(model: ir.Model, batches: Iterable[Any]) -> dict[str, Range]:
    """Returns the range of each float32 tensor of the main graph, including constants, by its name.

    Args:
        model: the float model.
        batches: batches of inputs (`qatkit_verify.feeds`). Without batches, inputs are random; if the model does not
            accept them, only constants are measured.
    """
    found: dict[str, Range] = {}
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
            found.setdefault(str(value.name), Range()).add(value.const_value.numpy())
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    ends = {one.name for one in proto.graph.output}
    made = dict.fromkeys(
        name for node in proto.graph.node for name in node.output if name and name not in ends
    )
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.onnx"
        onnx.save(proto, str(path))
        session = open_session(path, threads=1, optimize=False)
        names = [one.name for one in session.get_outputs()]
        for feed in _feeds(session, batches):
            for name, values in (*feed.items(), *zip(names, session.run(None, feed), strict=True)):
                if isinstance(values, np.ndarray) and values.dtype == np.float32:
                    found.setdefault(name, Range()).add(values)
    return found


def nodes_of_infinity(model: ir.Model, batches: Iterable[Any]) -> list[ir.Node]:
    """Returns the operators that read or compute infinities (masks, pads, open bounds) or NaN.

    Such values cannot be quantized. If all constants are finite, the result is empty, and the model is not run.
    """
    held = (value.const_value for value in model.graph.initializers.values())
    floats = (one.numpy() for one in held if one is not None and one.dtype == ir.DataType.FLOAT)
    if all(np.isfinite(values).all() for values in floats):
        return []
    infinite = {name for name, known in ranges(model, batches).items() if not known.finite}
    return [
        node
        for node in model.graph
        if any(value is not None and value.name in infinite for value in (*node.inputs, *node.outputs))
    ]


def _feeds(session: Any, batches: Iterable[Any]) -> list[dict[str, NDArray[Any]]]:
    """Returns the inputs of the runs: the given batches or, without any, a random batch that the model accepts."""
    inputs = session.get_inputs()
    given = [feeds(session, batch) for batch in batches]
    if given:
        return given
    drawn = ({one.name: _drawn(one, side) for one in inputs} for side in (_LEAST_SIDE, _UNKNOWN[-1]))
    return next(([feed] for feed in drawn if _runs(session, feed)), [])


def _runs(session: Any, feed: dict[str, NDArray[Any]]) -> bool:
    """Returns whether the model accepts these inputs."""
    try:
        session.run(None, feed)
    except Exception:  # ONNX Runtime's exceptions have no public common base
        return False
    return True


def _drawn(one: Any, side: int) -> NDArray[Any]:
    """Returns values from a normal distribution for a float32 input, and zeros for any other input."""
    rank = len(one.shape)
    open_sizes = (*_UNKNOWN[:2], side, side)[:rank] + (side,) * max(0, rank - 4)
    shape = [
        size if isinstance(size, int) else usual for size, usual in zip(one.shape, open_sizes, strict=True)
    ]
    if one.type != "tensor(float)":
        kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
        return np.zeros(shape, kinds.get(one.type, np.float32))
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
