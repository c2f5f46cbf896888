"""Reports in one line what cannot be exported: the place in the model, the operator, and what is missing.

torch's exporter hides the cause in a page of advice, or silently exports something else: a fixed batch size instead of
any size, or an LSTM without its projection.
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import fx, nn

from qatkit.export.translations import VALUES_ONLY
from qatkit.graph.nodes import is_opaque
from qatkit_verify.errors import ConfigError

_NO_COMPLEX = (
    "is complex, and ONNX computes with real numbers only; use real and imaginary parts (torch.view_as_real)"
)
_UNKNOWN = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")


def refuse_modules(module: nn.Module) -> None:
    """Refuses modules that torch's exporter cannot write, or would write wrongly.

    Raises:
        ConfigError: `module` contains such a module; the message names it.
    """
    for path, child in module.named_modules():
        if is_opaque(child):
            reason = "this part of the file runs in ONNX Runtime, so torch cannot export it"
            raise ConfigError(
                "onnx", path, reason=f"{reason}; edit the given file instead (qatkit.importing.write_back)"
            )
        if isinstance(child, nn.LSTM) and child.proj_size:
            raise _refused(module, path, "this LSTM has proj_size, for which ONNX has no operator")


def refuse_inputs(module: nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuses complex inputs.

    Raises:
        ConfigError: an input is complex; the message names it.
    """
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_complex():
            raise _refused(module, "", f"input '{name}' {_NO_COMPLEX}")


def refuse_program(
    program: torch.export.ExportedProgram,
    model: ir.Model,
    module: nn.Module,
    *,
    dynamic_batch: bool,
    free: Sequence[tuple[int, int, str]] = (),
) -> None:
    """Refuses programs that the exporter has silently changed, or exported in part.

    Args:
        program: the exported program.
        model: its ONNX model.
        module: the exported module, for messages.
        dynamic_batch: whether the file should accept batches of any size.
        free: further axes that should accept any size, each as (index of the input, index of the axis, name of the
            axis).

    Raises:
        ConfigError: the batch or an axis has a fixed size although any size was requested, an output is complex, or a
            pool whose indices are needed gives only values.
    """
    sizes = [value.shape[0] for value in model.graph.inputs if value.shape is not None and len(value.shape)]
    if dynamic_batch and sizes and all(isinstance(size, int) for size in sizes):
        reason = f"an operator of this model works only with batches of {sizes[0]}"
        raise ConfigError(
            "export.dynamic_batch",
            dynamic_batch,
            reason=f"{reason}; set export.dynamic_batch=false to write a file for this size",
        )
    for i, axis, name in free:
        value = model.graph.inputs[i]
        size = value.shape[axis] if value.shape is not None else None
        if isinstance(size, int):
            reason = (
                f"an operator of this model works only with size {size} along axis {axis} of '{value.name}'"
            )
            key = f"export.dynamic_axes.{value.name}.{axis}"
            raise ConfigError(key, name, reason=f"{reason}; remove this axis from export.dynamic_axes")
    for node in program.graph.nodes:
        if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in VALUES_ONLY:
            pool = node.args[0]
            reason = f"ONNX has no operator for the indices that {pool.target} returns"
            raise _refused(module, _path(pool), reason)
        for value in node.all_input_nodes if node.op == "output" else ():
            found = value.meta.get("val")
            if isinstance(found, torch.Tensor) and found.is_complex():
                raise _refused(module, _path(value), f"an output {_NO_COMPLEX}")


def refusal(error: Exception, module: nn.Module) -> ConfigError:
    """Returns a one-line error for an error of torch's exporter; its message names the place in `module`."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = (str(cause).strip() or type(cause).__name__).splitlines()
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    unknown = _UNKNOWN.search(first)
    if unknown:
        why = f"torch's exporter cannot translate {unknown[1]}.{unknown[2]} to ONNX"
    else:
        why = f"torch's exporter failed ({first})"
    return _refused(module, _place(error, module), why)


def _refused(module: nn.Module, place: str, why: str) -> ConfigError:
    where = f"in module '{place}', " if place else ""
    return ConfigError("model.name", type(module).__name__, reason=where + why)


def _place(error: BaseException, module: nn.Module) -> str:
    """Returns the path of the module that was being translated, or was running, when an error was raised."""
    paths: dict[int, str] = {id(child): path for path, child in module.named_modules()}
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        for frame in reversed(list(traceback.walk_tb(cause.__traceback__))):
            node, owner = (frame[0].f_locals.get(name) for name in ("node", "self"))
            if isinstance(node, fx.Node) and "nn_module_stack" in node.meta:
                return _path(node)
            if id(owner) in paths and (path := paths[id(owner)]):
                return path
    return ""


def _path(node: fx.Node) -> str:
    """Returns the path of the module from which an fx node of torch's exporter comes."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
