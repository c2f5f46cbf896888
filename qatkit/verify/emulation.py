"""Emulates how a processor without VNNI runs a file; ONNX Runtime runs everything that cannot saturate.

    optimized graph ─ cut before and after each operator that can saturate for some input ─> stretches
    stretch of nodes ─ one ONNX Runtime session        operator ─ qatkit.verify.int8_kernels

The graph is optimized at level EXTENDED, which creates all integer operators that a session runs; level ALL
changes only the memory layout. Operators whose weights rule out saturation stay in their stretch. Since they
cannot saturate, the results of a stretch are exact on any processor, with VNNI or without.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qatkit.verify.audit import Origin
from qatkit.verify.graph_view import matrix_ops, read_model, weight_of
from qatkit.verify.int8_kernels import Int8Kernel, Judged
from qatkit.verify.int8_nodes import judged
from qatkit.verify.partition import Observer, Parts, Walk, bodies
from qatkit_verify.feeds import Array, feeds
from qatkit_verify.int8_operators import PRECISE
from qatkit_verify.session import fixed_batch, in_its_batches, integer_io, open_session

_TAKEN = "If"  # the operator whose branches are emulated


class Emulation:
    """A quantized file that can be run exactly, or as on a processor without VNNI.

    Attributes:
        kernels: the uint8 x int8 operators with constant weights, in graph order. Each is either emulated or
            cannot saturate with its weights.
        others: the other operators that may multiply uint8 by int8, as "NAME (REASON)" with the reason why
            they are not emulated.
    """

    def __init__(self, path: Path, *, options: Mapping[str, str], threads: int) -> None:
        """Reads and cuts the file.

        Args:
            path: an ONNX file.
            options: the backend's session config entries.
            threads: the number of intra-op threads.

        Raises:
            ConfigError: ONNX Runtime cannot load the file.
        """
        self._threads = threads
        self._file = open_session(path, threads=threads, optimize=False, options=options)
        self._ends = integer_io(self._file)
        with tempfile.TemporaryDirectory() as folder:
            saved, level = Path(folder) / "optimized.onnx", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            open_session(path, threads=threads, optimize=level, options=options, optimized_path=saved)
            self._model = read_model(saved)
            ir.external_data.load_to_model(self._model)
        origin = Origin(read_model(path).graph)
        found = [] if options.get(PRECISE) == "1" else list(_judged(self._model.graph, origin, Counter()))
        self.kernels = [one for _, one, reason in found if isinstance(one, Judged) and not reason]
        self.others = [f"{name} ({reason})" for name, _, reason in found if reason]
        mine = {one.node: one for one in self.kernels if isinstance(one, Int8Kernel) and one.can_saturate}
        self._parts = Parts(self._model.graph, mine, self._model, threads)

    def outputs(
        self, batch: Any, saturate: Collection[str] = (), observe: Observer | None = None
    ) -> tuple[Array, ...]:
        """Returns all outputs for a batch (`qatkit_verify.feeds`).

        Args:
            batch: the batch, in any form that the file accepts.
            saturate: the names of the kernels to compute as a processor without VNNI does; all others are
                computed exactly.
            observe: a function that is called with each kernel that can saturate, and its input.

        Raises:
            ConfigError: ONNX Runtime cannot run a part of the graph separately.
        """
        given, fixed = feeds(self._file, batch, self._ends), fixed_batch(self._file)

        def run(fed: Mapping[str, Array]) -> tuple[Array, ...]:
            known = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in fed.items()}
            # Copies, because an OrtValue may lend memory that is freed with it.
            return tuple(np.array(one.numpy()) for one in self._parts.run(known, Walk(saturate, observe)))

        found = in_its_batches(run, given, fixed)
        return found if self._ends is None else tuple(map(self._ends.floats, found))


def _judged(
    graph: ir.Graph, origin: Origin | None, taken: Counter[str], body: str = ""
) -> Iterator[tuple[str, Judged | None, str]]:
    """Yields (name, operator, reason) for every node that may multiply uint8 by int8.

    Names are unique; the operator and the reason are those that `judged` returns.

    Args:
        graph: an optimized graph, or the body of one of its nodes.
        origin: finds the nodes of the file from which those of the outermost graph were made; None in a body.
        taken: the number of times each name has occurred.
        body: the type of the operator whose body this is, if that operator is not emulated; else "".
    """
    for node in graph:
        name = _name(origin, node)
        one, reason = judged(node, name, body)
        if one is not None or reason:
            taken[name] += 1
            if taken[name] > 1:  # from the same node, or with the same name in another body
                name = f"{name} {taken[name]}"
                one = None if one is None else replace(one, name=name)
            yield name, one, reason
        for inner in bodies(node):
            yield from _judged(inner, None, taken, body or (node.op_type if node.op_type != _TAKEN else ""))


def _name(origin: Origin | None, node: ir.Node) -> str:
    source = None
    if origin is not None and node.op_type in matrix_ops():
        source = origin.find(node, weight_of(node))
    names = (None if source is None else source.name, node.name, *(value.name for value in node.outputs))
    return next((str(name) for name in names if name), node.op_type)
