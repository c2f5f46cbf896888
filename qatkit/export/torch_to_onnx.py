"""Exports an nn.Module to one checked ONNX file with reproducible names and bytes.

torch's exporter runs at opset 18, or at the requested opset if this is higher, with our own translations of operators
that it does not know or translates wrongly. `lower` then converts the graph to a requested opset below 18, since the
exporter's own conversion to 13 fails on ReduceMean and LayerNormalization.
Stack traces, which contain paths of the exporting machine, are removed, so that the same module gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import Tensor, fx, nn

from qatkit.config.fields import limit_of
from qatkit.config.schema import ExportConfig
from qatkit.export.decompositions import decomposed_where_needed
from qatkit.export.default_rules import apply_default_rules
from qatkit.export.fixed_sizes import at_fixed_sizes
from qatkit.export.format_functions import add_format_functions
from qatkit.export.lower_opset import lower
from qatkit.export.node_names import name_functions, name_nodes
from qatkit.export.ort_fusions import for_onnxruntime
from qatkit.export.pack_int4 import pack
from qatkit.export.packed_formats import pack_formats
from qatkit.export.promotions import promoted_where_needed
from qatkit.export.quiet import quiet
from qatkit.export.refusals import refusal, refuse_inputs, refuse_modules, refuse_program
from qatkit.export.registry import tables_made_once
from qatkit.export.shift_weights import shift_weights
from qatkit.export.size_constraints import quotients_divided_term_by_term, unsolved_constraints_allowed
from qatkit.export.translations import translations
from qatkit.export.write_model import write_model
from qatkit.graph.capture.axis_sizes import FreeAxis
from qatkit.graph.capture.free_axes import with_sizes
from qatkit.graph.convert.integer_modules import QuantizeDequantize
from qatkit.graph.signature import (
    Example,
    batch_multiple,
    batch_size,
    flatten,
    graph_axes,
    graph_inputs,
    in_float32,
    inputs_of,
    resized,
)
from qatkit.graph.single_precision import in_single_precision
from qatkit_verify.errors import ConfigError

TORCH_OPSET = 18
_ONE_BATCH = "; set export.dynamic_batch=false to write a file for one batch size"
# Types of constants that are not folded to float32, although the operators that read them need float32.
_NARROW = (
    *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16),
    ir.DataType.FLOAT16,
)


def export_onnx(  # noqa: PLR0913  independent settings of a file, by name
    module: nn.Module,
    example: Example,
    path: Path,
    *,
    opset: int = 13,
    dynamic_batch: bool = True,
    template: bool = False,
    pack_int4: bool = False,
    weights_for_amx: bool = False,
    dequantize: bool = False,
) -> str:
    """Writes `module` (in inference mode) to `path`, atomically, after onnx.checker and ONNX Runtime have accepted it.

    A single input is called "input" and a single output "output". Several inputs of a graph have the names of the
    model's arguments (`graph.meta["inputs"]`), and several outputs the names that the model gives them
    (`graph.meta["outputs"]`; NAME_output if an input has the same name). Several inputs or outputs of any other module
    are numbered (input_0, output_0).

    Args:
        module: a graph, or a module whose forward takes the tensors of `example` as positional arguments. A module in
            half, bfloat16 or double precision is exported as a float32 copy, with float32 inputs and outputs.
        example: inputs of the real shapes: images [N, C, H, W], or several tensors in the graph's order or by name.
            Floating-point tensors may have any precision.
        path: the file to write.
        dynamic_batch: whether the file accepts any batch size. This has no effect on a graph that supports only one
            batch size (`graph.meta["batch_axes"]`).
        opset: the opset of the file, as in `export.opset`.
        template: whether to keep every constant under the name of its buffer for `refill`, even if some are equal.
            Weights in number formats are then not packed.
        pack_int4: whether to store weights of up to 4 bits as int4 (`export.pack_int4`).
        weights_for_amx: whether to shift weights so that convolutions can use AMX (`export.weights_for_amx`).
        dequantize: whether to store weights in number formats as `export.packed_weights=dequantize_linear` does.

    Returns:
        The reason why axes that are dynamic in the graph have the example's size in the file; "" if there are none.
        If one of these axes was requested by name, an error is raised instead.

    Raises:
        ConfigError: the opset is out of range, an operator cannot be expressed in this opset or in ONNX (the message
            names its module), an input is complex, or the number of inputs differs from the graph's.
        ValueError: the checker or ONNX Runtime refuses the file.
    """
    limit_of(ExportConfig, "opset").check("export.opset", opset)
    module, example = in_single_precision(module)[0], in_float32(example)
    refuse_modules(module)
    named = name_functions(module) if isinstance(module, fx.GraphModule) else module
    tensors = inputs_of(module, example) if isinstance(module, fx.GraphModule) else flatten(example)
    axes = graph_axes(module, tensors) if dynamic_batch else (None,) * len(tensors)
    ends = _ends(module, len(tensors))
    refuse_inputs(module, ends.inputs, tensors)
    wanted = _Wanted(opset, axes, template, pack_int4, weights_for_amx, dequantize)
    model, fixed = _free_or_fixed(module, named, tensors, ends, wanted)
    write_model(model, path)
    return fixed


class _Wanted(NamedTuple):
    """The settings of `export_onnx`; `axes` has the batch axis of each input, or None."""

    opset: int
    axes: Sequence[int | None]
    template: bool
    pack_int4: bool
    weights_for_amx: bool
    dequantize: bool


class _Ends(NamedTuple):
    """The names of a file's inputs and outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _ends(module: nn.Module, inputs: int) -> _Ends:
    names = graph_inputs(module)
    if len(names) != inputs:  # a module that is not a graph
        names = tuple(f"input_{i}" for i in range(inputs))
    outputs = tuple(getattr(module, "meta", {}).get("outputs", ("output",)))
    return _Ends(names, tuple(f"{name}_output" if name in names else name for name in outputs))


def _free_or_fixed(
    module: nn.Module, named: nn.Module, tensors: tuple[Tensor, ...], ends: _Ends, wanted: _Wanted
) -> tuple[ir.Model, str]:
    """Exports with dynamic axes or, if this fails and none was requested by name, with axes of the example's size.

    Args:
        module: the module to export.
        named: the module with named functions (`name_functions`), or `module` itself.
        tensors: the example inputs.
        ends: the names of inputs and outputs.
        wanted: the settings of the export.

    Returns:
        The model, and the reason why axes that are dynamic in the module have the example's size, or "".

    Raises:
        ConfigError: the module cannot be exported.
    """
    free: Sequence[FreeAxis] = getattr(module, "meta", {}).get("free_axes", ())
    try:
        return _model(named, tensors, ends, wanted, free), ""
    except ConfigError as error:
        if not free or any(axis.asked for axis in free):
            raise
        assert isinstance(module, fx.GraphModule)  # only a captured graph has dynamic axes
        fixed = name_functions(at_fixed_sizes(module, tensors, wanted.axes))
        names = ", ".join(f"{axis.name} ({axis.size})" for axis in free)
        subject = "this axis is" if len(free) == 1 else "these axes are"
        reason = f"{subject} fixed at the example's size: {names}, because {error.problem}"
        return _model(fixed, tensors, ends, wanted, ()), reason


def refill(template: Path, module: nn.Module, path: Path, first: Mapping[str, Tensor]) -> None:
    """Writes the file `template` with the values of another converted module that has the same graph.

    Args:
        template: a file that `export_onnx` wrote with `template=True`.
        module: the converted module with the new values.
        path: the file to write.
        first: `may_be_literals` of the module from which the template was exported.

    Raises:
        ValueError: a tensor has another shape or type than in the template, or it has other values although the
            template has no initializer of its name (the slope of a PReLU, γ of a GroupNorm, the bounds of a Clip).
    """
    model = ir.load(template)
    values, named = tensors_of(module), model.graph.initializers
    for name, literal in may_be_literals(module).items():
        if name not in named and (name not in first or not torch.equal(literal, first[name])):
            raise ValueError(f"{name} differs from {template}, which has no tensor of this name to replace")
    for name, value in named.items():
        tensor = values.get(name)
        if tensor is None:
            continue
        new = ir.tensor(tensor.detach().cpu().numpy(), name=name)
        if new.shape != value.shape or new.dtype != value.dtype:
            held = f"{value.dtype} {value.shape} in {template}"
            raise ValueError(f"{name} is {new.dtype} {new.shape}, but {held}")
        value.const_value = new
    ir.save(model, path)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by the names that their initializers have in a file."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def may_be_literals(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors, by name, that the exporter may write as something other than an initializer of this name.

    These are the tensors of modules from outside qatkit (except BatchNorm's counts of batches), and the bounds to which
    a `QuantizeDequantize` clips. In the file, the others keep their name, or have that of the quantizer after them.
    """
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, QuantizeDequantize) and part.ends is not None:
            found[f"{path}.ends"] = torch.tensor(part.ends)
        if not type(part).__module__.startswith("qatkit."):
            tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            # BatchNorm's count of batches is not used in inference.
            found |= {
                f"{path}.{name}".lstrip("."): one for name, one in tensors if name != "num_batches_tracked"
            }
    return found


def _model(
    module: nn.Module, tensors: tuple[Tensor, ...], ends: _Ends, wanted: _Wanted, free: Sequence[FreeAxis]
) -> ir.Model:
    """Exports a module to a model in which the axes `free` accept any size.

    Raises:
        ConfigError: the module cannot be exported.
    """
    backend = getattr(module, "meta", {}).get("backend")
    model = _torch_export(module.cpu().eval(), tensors, ends, wanted, free)
    with quiet():
        for_onnxruntime(model, wanted.opset, bytes_too=backend is None or backend.for_onnxruntime)
        lower(model, wanted.opset)
        add_format_functions(model, wanted.opset)
        if not wanted.template:
            pack_formats(model, module, dequantize=wanted.dequantize)
        if wanted.pack_int4:
            pack(model, module)
        if wanted.weights_for_amx:
            shift_weights(model)
        _clean(model, ends.outputs, set(tensors_of(module)))
    return model


def _torch_export(
    module: nn.Module, tensors: tuple[Tensor, ...], ends: _Ends, wanted: _Wanted, free: Sequence[FreeAxis]
) -> ir.Model:
    axes = wanted.axes
    multiple = batch_multiple(module)
    shapes: list[dict[int, Any]] = [{} for _ in tensors]
    if any(axis is not None for axis in axes):
        batch = torch.export.Dim("batch", min=1)
        batch = batch if multiple == 1 else multiple * batch
        shapes = [{} if axis is None else {axis: batch} for axis in axes]
        # At least two samples, because the exporter treats a batch of one as a constant.
        tensors = resized(tensors, max(2 * multiple, batch_size(tensors, axes)), axes)
    for one in free:
        # The largest captured size, since strides may reduce the example's size to 1. The exporter treats a size of 1
        # as a constant.
        tensors = with_sizes(tensors, dict.fromkeys(one.places, max(2, one.size, *one.others)))
        for i, axis in one.places:
            shapes[i][axis] = one.name
    with (
        quiet(),
        torch.no_grad(),
        tables_made_once(),
        decomposed_where_needed(way_out="" if free else _ONE_BATCH),
        promoted_where_needed(),
        unsolved_constraints_allowed(),
        quotients_divided_term_by_term(),
    ):
        try:
            program = torch.onnx.export(
                module,
                tensors,
                dynamo=True,
                opset_version=max(wanted.opset, TORCH_OPSET),
                input_names=list(ends.inputs),
                output_names=list(ends.outputs),
                dynamic_shapes=tuple(shapes) if any(shapes) else None,
                custom_translation_table=translations(),
                verbose=False,
                optimize=False,
            )
            assert program is not None and program.exported_program is not None
            _optimize(program.model, merge=not wanted.template)
        except Exception as error:
            raise refusal(error, module) from error
    refuse_program(
        program.exported_program,
        program.model,
        module,
        dynamic_batch=any(axis is not None for axis in axes),
        free=[(*place, one.name) for one in free for place in one.places],
    )
    return program.model


def _optimize(model: ir.Model, *, merge: bool) -> None:
    """Optimizes like torch's exporter with `optimize=True`, but merges equal constants only if `merge` is set."""
    common.InlinePass()(model)
    # By the name of the output, since the constant folder names the parts of "split" "split_split_0" and so on.
    sequences = {
        n.outputs[0].name: dict(n.metadata_props) for n in model.graph if n.op_type == "SplitToSequence"
    }
    for _ in range(2):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=_folds)
        apply_default_rules(model)
        _register_constants(model.graph)
    for node in model.graph:
        if node.op_type == "Split" and not node.metadata_props:  # made from a SplitToSequence
            node.metadata_props.update(sequences.get(str(node.outputs[0].name).rpartition("_split_")[0], {}))
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    if merge:
        common.DeduplicateInitializersPass()(model)
        _merge_bytes(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _register_constants(graph: ir.Graph) -> None:
    """Registers constants that belong to no graph.

    Rules that join a Min and a Max to a Clip name the bounds after the input. If two Clips read the same tensor, their
    bounds have the same names, and those of the second Clip are left without registration.
    """
    known = {id(value) for value in graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is None or value.const_value is None or id(value) in known:
                continue
            if value.producer() is None and not value.is_graph_input():
                known.add(id(value))
                while value.name in graph.initializers:
                    value.name = f"{value.name}_"
                graph.register_initializer(value)


def _folds(node: ir.Node) -> bool | None:
    """Returns False for Casts of weights and scales in 8 or 16 bits; otherwise None, so that the folder decides."""
    source = node.inputs[0] if node.op_type == "Cast" else None
    return False if source is not None and source.dtype in _NARROW else None


def _merge_bytes(graph: ir.Graph) -> None:
    """Merges equal integer weights (of tied operators) of any size, since onnx_ir's pass skips large ones."""
    kept: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if (
            tensor is None
            or tensor.dtype not in (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16)
            or value.is_graph_output()
        ):
            continue
        array = tensor.numpy()
        digest = hashlib.sha256(array.tobytes()).digest()
        same = kept.setdefault((tensor.dtype, array.shape, digest), value)
        if same is not value:
            ir.convenience.replace_all_uses_with(value, same)
            del graph.initializers[name]


def _clean(model: ir.Model, outputs: tuple[str, ...], tensors: set[str]) -> None:
    if len(outputs) != len(model.graph.outputs):  # a module that is not a graph
        outputs = tuple(f"output_{i}" for i in range(len(model.graph.outputs)))
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
