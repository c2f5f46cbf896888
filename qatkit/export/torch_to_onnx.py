"""Export: an nn.Module to one ONNX file, checked, with names and bytes that can be relied on.

torch's exporter runs at opset 18 (its own way down to 13 fails on ReduceMean and LayerNormalization), with
a translation for our operators; `lower` brings the graph to the opset asked for. Stack traces, which hold
paths of the exporting machine, are removed, so that the same module gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx_ir.passes import common
from onnxscript import opset18 as op
from onnxscript import optimizer, rewriter
from torch import Tensor, fx, nn

import qatkit.graph.integer_modules  # noqa: F401  defines the operators that `translations` names
from qatkit.config.fields import limit_of
from qatkit.config.schema import ExportConfig
from qatkit.errors import ConfigError
from qatkit.export.lower_opset import lower
from qatkit.export.node_names import name_functions, name_nodes
from qatkit.export.ort_fusions import for_onnxruntime
from qatkit.files import whole

TORCH_OPSET = 18


def _quantize(x, scale, zero_point):  # type: ignore[no-untyped-def]
    return op.QuantizeLinear(x, scale, zero_point)


def _dequantize(q, scale, zero_point, axis: int):  # type: ignore[no-untyped-def]
    return op.DequantizeLinear(q, scale, zero_point, axis=axis)


def _barrier(x):  # type: ignore[no-untyped-def]
    return op.Sum(x)


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """How our three operators look in ONNX."""
    return {
        torch.ops.qatkit.quantize.default: _quantize,
        torch.ops.qatkit.dequantize.default: _dequantize,
        torch.ops.qatkit.barrier.default: _barrier,
    }


def export_onnx(
    module: nn.Module,
    example: Tensor,
    path: Path,
    *,
    opset: int = 13,
    dynamic_batch: bool = True,
    template: bool = False,
) -> None:
    """Writes `module` (in inference mode) to `path`; whole, or not at all.

    The file has one input "input" and one output "output"; of a graph with several outputs they have the names
    that the model gave them (`trace`). It has passed `onnx.checker` with full check,
    and ONNX Runtime has loaded it.

    Args:
        example: an input of the real shape, [N, C, H, W]; N at least 2 when the batch is dynamic.
        opset: as `export.opset`.
        template: keep every constant under the name of its buffer, equal ones too, for `refill`.

    Raises:
        ConfigError: an opset that can't be had.
        ValueError: an operator that has no form in that opset; names the node.
    """
    limit_of(ExportConfig, "opset").check("export.opset", opset)
    named = name_functions(module) if isinstance(module, fx.GraphModule) else module
    outputs = tuple(getattr(module, "meta", {}).get("outputs", ("output",)))
    model = _torch_export(
        named.cpu().eval(), example, max(opset, TORCH_OPSET), dynamic_batch, outputs, template
    )
    backend = getattr(module, "meta", {}).get("backend")
    with quiet():
        for_onnxruntime(model, opset, bytes_too=backend is None or backend.for_onnxruntime)
        lower(model, opset)
        _clean(model, outputs, set(tensors_of(named)))
    write_model(model, path)


def refill(template: Path, module: nn.Module, path: Path) -> None:
    """Writes the file `template` with the values of another converted module: same graph, other ranges.

    Raises:
        ValueError: a buffer of another shape or type than in the template.
    """
    model = ir.load(template)
    values = tensors_of(module)
    for name, value in model.graph.initializers.items():
        tensor = values.get(name)
        if tensor is None:
            continue
        new = ir.tensor(tensor.detach().cpu().numpy(), name=name)
        if new.shape != value.shape or new.dtype != value.dtype:
            raise ValueError(
                f"{name}: {new.dtype} {new.shape}, not {value.dtype} {value.shape} as in {template}"
            )
        value.const_value = new
    ir.save(model, path)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the names that their initializers have in a file."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _torch_export(
    module: nn.Module,
    example: Tensor,
    opset: int,
    dynamic_batch: bool,
    outputs: tuple[str, ...],
    template: bool,
) -> ir.Model:
    batch = ({0: torch.export.Dim("batch", min=1)},) if dynamic_batch else None
    with quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                opset_version=opset,
                input_names=["input"],
                output_names=list(outputs),
                dynamic_shapes=batch,
                custom_translation_table=translations(),
                verbose=False,
                optimize=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise ConfigError("model.name", type(module).__name__, _why(error)) from error
    assert program is not None
    with quiet():
        _optimize(program.model, merge=not template)
    return program.model


def _optimize(model: ir.Model, *, merge: bool) -> None:
    """What torch's exporter does by `optimize=True`; equal constants become one only if `merge` is set."""
    common.InlinePass()(model)
    # By the name of what they make: the constant folder calls the parts of "split" "split_split_0" and on.
    sequences = {
        n.outputs[0].name: dict(n.metadata_props) for n in model.graph if n.op_type == "SplitToSequence"
    }
    for _ in range(2):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        rewriter.rewrite(model)
    for node in model.graph:
        if node.op_type == "Split" and not node.metadata_props:  # what the folder makes of a sequence
            node.metadata_props.update(sequences.get(str(node.outputs[0].name).rpartition("_split_")[0], {}))
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    if merge:
        common.DeduplicateInitializersPass()(model)
        _merge_int8(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _merge_int8(graph: ir.Graph) -> None:
    """Equal int8 weights of any size become one: those of tied operators. The pass above leaves large ones."""
    kept: dict[tuple[tuple[int, ...], bytes], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.INT8 or value.is_graph_output():
            continue
        array = tensor.numpy()
        same = kept.setdefault((array.shape, hashlib.sha256(array.tobytes()).digest()), value)
        if same is not value:
            ir.convenience.replace_all_uses_with(value, same)
            del graph.initializers[name]


def _why(error: BaseException) -> str:
    """The first cause, in one line: what torch's exporter raises in the end is a page of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"torch's exporter refuses it: {first}"


def _clean(model: ir.Model, outputs: tuple[str, ...], tensors: set[str]) -> None:
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        value.name = name
    name_nodes(model, tensors)
    for cleaning in (
        common.RemoveUnusedNodesPass(),
        common.ClearMetadataAndDocStringPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.NameFixPass(),
    ):
        cleaning(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.producer_name, model.producer_version = "qatkit", None


def write_model(model: ir.Model, path: Path) -> None:
    """Serialises, checks and loads a temporary file, then renames it: whole or not at all.

    Raises:
        ValueError: the checker or ONNX Runtime refuses it.
    """
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]  # inferred shapes of the opset-18 graph; readers infer their own
    with whole(path) as temporary:
        temporary.write_bytes(proto.SerializeToString(deterministic=True))
        try:
            onnx.checker.check_model(str(temporary), full_check=True)
            options = ort.SessionOptions()
            options.log_severity_level = 3
            ort.InferenceSession(str(temporary), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ValueError(f"{path.name}: {str(error).strip().splitlines()[0]}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter and the tools print, log (some by the root logger) and warn; a failure still raises."""
    loggers = [logging.getLogger(name) for name in ("", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
