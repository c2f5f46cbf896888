"""Reports in one line what can't be exported: the place in the model, the operator, and what is missing.

torch's exporter raises a page of advice around the cause, or silently exports less than was requested: one batch size
for every batch, an LSTM without its projection.
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

_NO_COMPLEX = "which ONNX has no type for; give the real and imaginary parts"
_UNKNOWN = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")


def refuse_modules(module: nn.Module) -> None:
    """Refuses what torch's exporter would write wrongly, or ONNX Runtime has no kernels for.

    Raises:
        ConfigError: names the module.
    """
    for path, child in module.named_modules():
        if is_opaque(child):
            reason = f"'{path}' is computed by ONNX Runtime, and torch's exporter has no form for it: only editing the "
            raise ConfigError(
                "onnx", path, reason=f"{reason}given file writes it (qatkit.importing.write_back)"
            )
        if isinstance(child, nn.LSTM) and child.proj_size:
            raise _refused(path, "an LSTM with proj_size, for which ONNX has no operator")


def refuse_inputs(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Refuses complex inputs.

    Raises:
        ConfigError: names the input.
    """
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_complex():
            raise _refused(name, f"an input with complex numbers, {_NO_COMPLEX} (torch.view_as_real)")


def refuse_program(
    program: torch.export.ExportedProgram,
    model: ir.Model,
    *,
    dynamic_batch: bool,
    free: Sequence[tuple[int, int]] = (),
) -> None:
    """Refuses what the exporter has changed or left out silently.

    Args:
        dynamic_batch: whether the file takes batches of any size.
        free: inputs and those of their axes that have any size too.

    Raises:
        ConfigError: a batch, or an axis, that was to be of any size has one; a complex output; places in pools that
            have only values.
    """
    sizes = [value.shape[0] for value in model.graph.inputs if value.shape is not None and len(value.shape)]
    if dynamic_batch and sizes and all(isinstance(size, int) for size in sizes):
        reason = f"an operator of this model takes batches of {sizes[0]} alone; false writes a file for these"
        raise ConfigError("export.dynamic_batch", dynamic_batch, reason=reason)
    for i, axis in free:
        value = model.graph.inputs[i]
        size = value.shape[axis] if value.shape is not None else None
        if isinstance(size, int):
            reason = (
                f"an operator of this model takes a size of {size} alone along axis {axis} of {value.name}; "
            )
            key = f"export.dynamic_axes.{value.name}.{axis}"
            raise ConfigError(key, size, reason=f"{reason}none writes a file for it")
    for node in program.graph.nodes:
        if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in VALUES_ONLY:
            pool = node.args[0]
            raise _refused(_path(pool), f"the indices of {pool.target} have no form in ONNX")
        for value in node.all_input_nodes if node.op == "output" else ():
            found = value.meta.get("val")
            if isinstance(found, torch.Tensor) and found.is_complex():
                raise _refused(
                    _path(value), f"an output with complex numbers, {_NO_COMPLEX} (torch.view_as_real)"
                )


def refusal(error: Exception, module: nn.Module) -> ConfigError:
    """Returns the error of torch's exporter as one line that names the place in `module`."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = (str(cause).strip() or type(cause).__name__).splitlines()
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    unknown = _UNKNOWN.search(first)
    if unknown:
        why = f"torch's exporter knows no form in ONNX for {unknown[1]}.{unknown[2]}"
    else:
        why = f"torch's exporter refuses it: {first}"
    return _refused(_place(error, module), why)


def _refused(place: str, why: str) -> ConfigError:
    return ConfigError("model.name", place or "the model", reason=why)


def _place(error: BaseException, module: nn.Module) -> str:
    """Returns the module that was being translated, or was running, when the error or its cause was raised."""
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
    """Returns the module that an fx node of torch's exporter comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
