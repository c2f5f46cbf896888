"""Runs the converted module as the reference for a file: its outputs, and its quantized tensors by name in the file.

In the converted module, a pair is a submodule that quantizes a tensor and dequantizes it. The exporter names a node by
the path of its submodule (`qatkit.export.node_names`), so the QuantizeLinear of the pair "conv1_quant" is called
"conv1_quant/QuantizeLinear" in the file. A pair that is called several times has several QuantizeLinear nodes; each is
matched to its call by the operator that it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from qatkit.export.node_names import name_functions
from qatkit.graph.convert.integer_modules import QuantizeDequantize, QuantizedHardSigmoid
from qatkit.graph.nodes import module_of
from qatkit.verify.accuracy import predictor
from qatkit.verify.module_outputs import module_outputs
from qatkit_verify.feeds import Array
from qatkit_verify.session import FloatArray

_PAIRS = (QuantizeDequantize, QuantizedHardSigmoid)
_Call = tuple[str, str]  # the path of a pair, and the path of the operator that it reads


class ConvertedReference:
    """Implements `qatkit.verify.checks.base.Reference` by a converted graph (`qatkit.graph.convert.to_integers`)."""

    def __init__(self, converted: fx.GraphModule) -> None:
        self._converted, self._predict = converted, predictor(converted)

    def __call__(self, images: Any) -> FloatArray:
        """Returns the logits [N, classes] of normalized images [N, C, H, W]."""
        return self._predict(images)

    def outputs(self, batch: Any) -> tuple[Array, ...]:
        """Returns all outputs for a batch (`qatkit_verify.feeds`)."""
        return module_outputs(self._converted, batch)

    @cached_property
    def _named(self) -> fx.GraphModule:
        """The graph that is exported, in which every call is a module at the path that names its nodes in the file."""
        return name_functions(self._converted).eval()

    def integers(self, images: Any, file: Path) -> dict[str, NDArray[Any]]:
        """Returns the quantized tensors for a batch, by the names of the QuantizeLinear outputs of `file`.

        Pairs without a node in the file are omitted.
        """
        calls = self._calls()
        values: dict[str, list[NDArray[Any]]] = defaultdict(list)
        handles = [
            self._named.get_submodule(path).register_forward_hook(_recorder(values[path])) for path in calls
        ]
        try:
            predictor(self._named)(images)
        finally:
            for handle in handles:
                handle.remove()
        names = self.file_names(file)
        return {name: values[path][i] for path in calls for i, name in names[path].items()}

    def file_names(self, file: Path) -> dict[str, dict[int, str]]:
        """Returns the names of QuantizeLinear outputs in `file`, by the path of the pair and the index of the call."""
        nodes = _file_nodes(ir.load(str(file)))
        return {
            path: _matched([(path, source) for source in sources], nodes.get(path, []))
            for path, sources in self._calls().items()
        }

    def _calls(self) -> dict[str, list[str]]:
        """Returns, for the path of each pair, the path of the module whose output each call quantizes.

        The path is "" if no module computes the call's input.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for node in self._named.graph.nodes:
            if node.op == "call_module" and isinstance(module_of(node), _PAIRS):
                source = node.args[0]
                found[str(node.target)].append(str(source.target) if source.op == "call_module" else "")
        return found


def _recorder(found: list[NDArray[Any]]) -> Callable[..., None]:
    def record(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, _PAIRS)
        steps = torch.round(output / module.scale) + module.zero_point
        found.append(np.asarray(steps.to(module.zero_point.dtype).cpu().numpy()))

    return record


def _file_nodes(model: ir.Model) -> dict[str, list[tuple[_Call, str]]]:
    """Returns the call and the output name of every QuantizeLinear, by the path of its pair, in the file's order."""
    found: dict[str, list[tuple[_Call, str]]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == "QuantizeLinear":
            path = _path(node)
            before = node.inputs[0].producer() if node.inputs[0] is not None else None
            found[path].append(((path, "" if before is None else _path(before)), str(node.outputs[0].name)))
    return found


def _path(node: ir.Node) -> str:
    """Returns the path of the module to which a node of the file belongs."""
    return str(node.name).rpartition("/")[0]


def _matched(calls: list[_Call], nodes: list[tuple[_Call, str]]) -> dict[int, str]:
    """Matches the calls of a pair with nodes that read the same operator; returns output names by index of call.

    This leaves, for example, several calls that read the same operator. If as many nodes as calls are left, they are
    matched in order; otherwise they are omitted.
    """
    found: dict[int, str] = {}
    for i, call in enumerate(calls):
        same = [name for other, name in nodes if other == call and name not in found.values()]
        if calls.count(call) == 1 and len(same) == 1:
            found[i] = same[0]
    open_calls = [i for i in range(len(calls)) if i not in found]
    open_names = [name for _, name in nodes if name not in found.values()]
    return found | (
        dict(zip(open_calls, open_names, strict=True)) if len(open_calls) == len(open_names) else {}
    )
