"""Helpers that quantize a file, write it back, and compare the result with its module and its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx_models import Array
from torch import Tensor, fx

from qatkit import QATModule
from qatkit.config.schema import OverrideConfig
from qatkit.importing import ImportedModel, import_onnx
from qatkit.importing.write_back import write_back

Feeds = Mapping[str, Tensor]
PAIR = ("QuantizeLinear", "DequantizeLinear")


@dataclass
class Written:
    """A written file and the models that it was written from.

    Attributes:
        path: the written file.
        model: the imported module, whose source is `model.file`.
        converted: the converted graph that was written back.
        module: the calibrated module before its conversion.
    """

    path: Path
    model: ImportedModel
    converted: fx.GraphModule
    module: QATModule

    def optimized(self) -> Counter[str]:
        """Counts the operators that ONNX Runtime runs."""
        target = self.path.with_suffix(".optimized.onnx")
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(target), 3
        onnxruntime.InferenceSession(str(self.path), options)
        return Counter(node.op_type for node in onnx.load(str(target)).graph.node)


def write(
    source: Path,
    feeds: Feeds,
    *,
    batches: int = 3,
    fixed: Mapping[str, Any] | None = None,
    overrides: Mapping[str, OverrideConfig] | None = None,
    **settings: Any,
) -> Written:
    """Imports a file, calibrates it on values like those of `feeds`, converts it and writes it back."""
    model = import_onnx(source, fixed=fixed)
    module = QATModule(model, feeds, overrides=overrides, **settings)
    module.mixed_scales = "report"  # random weights and inputs cause mixed scales
    module.calibrate([feeds, *({n: _like(value) for n, value in feeds.items()} for _ in range(batches - 1))])
    converted = module.convert().graph
    target = source.with_name(f"{source.stem}_int8.onnx")
    write_back(model, converted, target)
    onnx.checker.check_model(str(target), full_check=True)
    return Written(target, model, converted, module)


def _like(value: Tensor) -> Tensor:
    """Returns similar values: floats with the same mean and spread, or the same integers in another order."""
    if value.is_floating_point() and value.numel() > 1:
        return torch.randn_like(value) * value.std() + value.mean()
    return value.flatten()[torch.randperm(value.numel())].reshape(value.shape)


def outputs(path: Path, feeds: Feeds, *, optimized: bool) -> list[Array]:
    """Returns all outputs of a file in ONNX Runtime."""
    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)
    names = {one.name for one in session.get_inputs()}
    found: list[Array] = session.run(None, {n: v.numpy() for n, v in feeds.items() if n in names})
    return found


def same(
    written: Written,
    feeds: Feeds,
    *,
    steps: float = 0.05,
    converted: fx.GraphModule | None = None,
    optimized: bool = True,
) -> None:
    """Checks that the file computes the same as the converted module, with and without optimizations.

    Args:
        written: the file and its module.
        feeds: values by input name.
        steps: tolerance of an output in steps of 1/255 of its range.
        converted: the module converted for other sizes, if `feeds` have these.
        optimized: whether to compare with optimizations too; false for files of other runtimes.
    """
    graph = converted or written.converted
    with torch.no_grad():
        names = graph.meta["inputs"]  # the file's names, unless Python does not accept them
        names = names if set(names) <= set(feeds) else written.model.inputs
        found = graph(*(_as_float32(feeds[name]) for name in names))
    wanted = [one.numpy() for one in (found if isinstance(found, (tuple, list)) else (found,))]
    for level in (False, True)[: 1 + optimized]:
        got = outputs(written.path, feeds, optimized=level)
        assert len(got) == len(wanted)
        for a, b in zip(wanted, got, strict=True):
            assert a.shape == b.shape
            if a.dtype.kind == "f":
                assert np.abs(a - b).max(initial=0) < (1 + 1e-4) * steps * _step(a)
            else:
                assert np.array_equal(a, b)


def _as_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _step(values: Array) -> float:
    """Returns 1/255 of an output's range; the range of a single value starts at zero."""
    ends = values if values.size > 1 else np.append(values, 0)
    return max(float(ends.max() - ends.min()), 1e-6) / 255


def for_sizes(written: Written, feeds: Feeds) -> fx.GraphModule:
    """Converts the same module for the sizes of `feeds`, since a traced graph holds sizes as constants."""
    module = QATModule(written.model, feeds)
    module.load_state_dict(written.module.state_dict())
    return module.convert().graph


@dataclass
class Difference:
    """Differences of a written file from its source, apart from Q/DQ pairs and their constants.

    Attributes:
        gone: names of removed nodes.
        new: number of added nodes by operator, without Q/DQ pairs.
        pairs: number of quantized values.
        changed: names of nodes with another operator or attribute.
    """

    gone: set[str] = field(default_factory=set)
    new: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    changed: set[str] = field(default_factory=set)


def difference(source: Path, target: Path) -> Difference:
    """Compares two files.

    Checks that inputs, output names, metadata, doc strings and the order of kept nodes agree and that no int8
    matrix is stored twice.
    """
    old, new = onnx.load(str(source)), onnx.load(str(target))
    constants = {one.name for one in old.graph.initializer}
    for one in old.graph.input:
        for dim in one.type.tensor_type.shape.dim:
            if dim.dim_value < 0:  # not a valid size, so like a dynamic axis
                dim.Clear()
    assert [one for one in old.graph.input if one.name not in constants] == list(new.graph.input)
    assert [one.name for one in old.graph.output] == [one.name for one in new.graph.output]
    for mine in ("metadata_props", "doc_string", "domain", "model_version", "producer_name"):
        assert getattr(old, mine) == getattr(new, mine)
    assert old.graph.name == new.graph.name
    assert old.graph.doc_string == new.graph.doc_string
    before = {_key(node): node for node in old.graph.node}
    after = {_key(node): node for node in new.graph.node}
    kept = [key for key in before if key in after]
    assert kept == [key for key in after if key in before]
    found = Difference({before[key].name for key in before if key not in after})
    for key, node in after.items():
        if key not in before:
            found.new[node.op_type] += 1
    found.pairs = found.new.pop("QuantizeLinear", 0)
    found.new.pop("DequantizeLinear", None)
    for key in kept:
        a, b = before[key], after[key]
        assert a.doc_string == b.doc_string
        if a.op_type != b.op_type or list(a.attribute) != list(b.attribute):
            found.changed.add(a.name)
    _stored_once(new.graph.initializer)
    return found


def _key(node: onnx.NodeProto) -> str:
    return str(node.name) or str(node.output[0])


def _stored_once(initializers: Sequence[onnx.TensorProto]) -> None:
    """Checks that no two int8 matrices have the same bytes."""
    whole = [
        one.raw_data for one in initializers if one.data_type == onnx.TensorProto.INT8 and len(one.dims) > 1
    ]
    assert len(set(whole)) == len(whole)
