"""Quantization in parts, for models that cannot be traced as a whole.

The box logic of a detector depends on data, so torch.fx cannot trace it, but it can trace the backbone and the
convolutions of the heads. Each named submodule is passed through fuse, stub and prepare_qat and put back into
the model. The model is then calibrated, fine-tuned and evaluated by its own code:

    parts = Parts(fasterrcnn_resnet50_fpn(), ["backbone", "roi_heads.box_head"], [image])
    parts.calibrate(batches)            # each batch is an input of the model
    ...                                 # train parts.model
    converted = parts.convert()         # the model with int8 parts, in PyTorch
    files = parts.export(folder)        # one ONNX file per part

The input sizes of a file are those of its part's inputs for the example, with a dynamic batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from qatkit.calibration import calibrate_parts
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import inference
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.signature import (
    Example,
    arguments_by_name,
    arguments_of,
    example_of,
    flatten,
    graph_inputs,
    like,
    unflatten,
)
from qatkit.graph.stub import stub
from qatkit.graph.trace import copy_of
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.warning import warn
from qatkit_verify.errors import ConfigError, did_you_mean

# With a larger ratio between the inputs of a part's calls, the smallest input gets 5 bits or fewer.
_FAR_APART = 8.0


class Seen(NamedTuple):
    """The first call of a part.

    Attributes:
        example: the arguments of the call.
        result: the result of the call; in a Part, its tensors have no values.
    """

    example: Example
    result: Any


class Part(nn.Module):
    """A graph that replaces the submodule it was traced from, with the same arguments and output containers."""

    def __init__(self, graph: fx.GraphModule, original: nn.Module, seen: Seen) -> None:
        super().__init__()
        self.graph, self.seen = graph, seen
        self.signature = inspect.signature(original.forward)
        # Detection models read it from their backbone.
        if hasattr(original, "out_channels"):
            self.out_channels = original.out_channels

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        by_name = isinstance(self.seen.example, Mapping) or bound.kwargs
        given = arguments_by_name(bound) if by_name else bound.args
        result = self.graph(*like(self.seen.example, given, graph_inputs(self.graph)))
        found = (result,) if isinstance(result, Tensor) else result
        if len(found) != len(flatten((self.seen.result,))):
            return result  # the graph has no auxiliary head
        return unflatten(self.seen.result, found)


class Parts:
    """A model with quantized parts.

    Args:
        model: the float model, which is not changed.
        scope: paths of the submodules to quantize. Each must get at least one tensor, and arguments of the same
            structure at every call. A submodule that is called several times (a head over a pyramid's levels) has one
            range for all calls; `calibrate` warns if the inputs of these calls differ too much.
        example: one input of `model`.
        backend: the backend, as for `QATModule`.
        batch_norm: the BatchNorm mode, as in the schedule of `QATModule`.
        quantizers: factories of quantizers and observers. An observer that averages ranges over calls would clip
            the values of the call with the widest range.
        overrides: overrides by path of a part, then by pattern within the part.

    Attributes:
        model: the copy with the parts, to calibrate, train and evaluate.
        inputs: the arguments of each part, by path.
        skipped: (site, reason) of everything left unchanged.

    Raises:
        ConfigError: a path does not exist or lies in another part, a part is never called, gets no tensors or cannot be
            traced, or an override changes nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        scope: Sequence[str],
        example: Any,
        backend: Backend = FBGEMM,
        overrides: Mapping[str, Mapping[str, OverrideConfig]] | None = None,
        quantizers: Quantizers = Quantizers(observer=MinMaxObserver),  # noqa: B008  frozen, without state
        batch_norm: str = "fold",
    ) -> None:
        _check(model, scope)
        self.model, self.backend, self.skipped = copy_of(model), backend, list[tuple[str, str]]()
        calls = _first_calls(self.model, scope, example)
        self.inputs: dict[str, Any] = {path: seen.example for path, seen in calls.items()}
        for path in scope:
            original, x = self.model.get_submodule(path), self.inputs[path]
            try:
                fused = fuse(original, x, batch_norm, depthwise=not backend.weights_alone)
                stubbed = stub(fused.graph, x)
                prepared = prepare_qat(stubbed.graph, backend, x, (overrides or {}).get(path), quantizers)
            except ConfigError as error:
                raise ConfigError("model.scope", path, reason=_advice(error.problem, x)) from error
            self.skipped += [(f"{path}.{s}", r) for one in (fused, stubbed, prepared) for s, r in one.skipped]
            self.model.set_submodule(path, Part(prepared.graph, original, _valueless(calls[path])))

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The prepared graph of each part, by path."""
        return {path: self._part(path).graph for path in self.inputs}

    def _part(self, path: str) -> Part:
        part = self.model.get_submodule(path)
        assert isinstance(part, Part)
        return part

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Finds the ranges by calling the model with each of `batches`.

        A part whose calls have very different ranges is added to `skipped`, with a warning.
        """
        with _Calls({path: self._part(path) for path in self.inputs}) as calls:
            calibrate_parts(self.graphs, self.model, calls.counted(self.model), batches)
        for path, reason in calls.far_apart():
            self.skipped.append((path, reason))
            warn(f"{path}: {reason}")

    def convert(self) -> nn.Module:
        """Returns a copy of the model, in inference mode, with int8 parts."""
        converted = copy_of(self.model).eval()
        for path, graph in self.graphs.items():
            part = converted.get_submodule(path)
            assert isinstance(part, Part)
            part.graph = convert(graph).graph
        return converted

    def export(self, folder: Path, opset: int = 13) -> dict[str, Path]:
        """Writes PATH.int8.onnx for each part into `folder`, which is created if missing.

        Returns:
            The files, by the path of their part.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for path, graph in self.graphs.items():
            files[path] = folder / f"{path}.int8.onnx"
            export_onnx(convert(graph).graph, self.inputs[path], files[path], opset=opset)
        return files


class _Calls:
    """A record of the largest absolute input value of every part, for its first, second, ... call in a batch."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.largest: dict[str, list[float]] = {path: [] for path in parts}
        self.done = dict.fromkeys(parts, 0)
        self.handles = [
            p.register_forward_pre_hook(self._recorder(path), with_kwargs=True) for path, p in parts.items()
        ]

    def _recorder(self, path: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found, call = self.largest[path], self.done[path]
            found.extend([0.0] * (call + 1 - len(found)))
            for tensor in (t for t in flatten((*args, kwargs)) if t.is_floating_point()):
                if tensor.numel():  # a head may get no box at all
                    found[call] = max(found[call], float(tensor.abs().max()))
            self.done[path] += 1

        return record

    def counted(self, model: nn.Module) -> Callable[[Any], Any]:
        """Returns a function that calls `model` and restarts the count of the parts' calls for each batch."""

        def run(batch: Any) -> Any:
            self.done = dict.fromkeys(self.done, 0)
            return model(batch)

        return run

    def far_apart(self) -> Iterable[tuple[str, str]]:
        """Yields (path, reason) of the parts with a call that uses fewer than 32 of the 256 steps."""
        for path, found in self.largest.items():
            ends = [value for value in found if value > 0]
            if ends and max(ends) > _FAR_APART * min(ends):
                yield (
                    path,
                    f"one range serves {len(found)} calls whose inputs differ {max(ends) / min(ends):.0f}-fold "
                    f"({min(ends):.3g} to {max(ends):.3g}), so the smallest uses few of the 256 steps; "
                    "normalize the inputs, or name submodules that are called only once",
                )

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _check(model: nn.Module, scope: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules() if name]
    if not scope:
        raise ConfigError("model.scope", list(scope), "the path of at least one submodule")
    for path in scope:
        if path not in names:
            raise ConfigError(
                "model.scope", path, reason=f"the model has no such submodule{did_you_mean(path, names)}"
            )
        inside = next((other for other in scope if path.startswith(f"{other}.")), None)
        if inside is not None:
            raise ConfigError(
                "model.scope",
                path,
                reason=f"the submodule lies inside '{inside}', which is quantized as a whole; list one of the two",
            )


def _first_calls(model: nn.Module, scope: Sequence[str], example: Any) -> dict[str, Seen]:
    """Returns the first call of each part, from one run of the model."""
    seen: dict[str, Seen] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if path not in seen:
                given = example_of(inspect.signature(module.forward), args, kwargs)
                seen[path] = Seen(unflatten(given, [t.detach() for t in flatten(given)]), result)

        return record

    handles = [
        model.get_submodule(path).register_forward_hook(recorder(path), with_kwargs=True) for path in scope
    ]
    try:
        with inference(model):
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    for path in scope:
        if path not in seen:
            raise ConfigError(
                "model.scope",
                path,
                reason="the model does not call this submodule on the example input; remove it from model.scope",
            )
        if not flatten(seen[path].example):
            args, kwargs = arguments_of(seen[path].example)
            kinds = ", ".join(type(value).__name__ for value in (*args, *kwargs.values()))
            given = f", only ({kinds})" if kinds else ""
            reason = f"the model passes no tensor to this submodule{given}; name a submodule that gets one"
            raise ConfigError("model.scope", path, reason=reason)
    return seen


def _valueless(seen: Seen) -> Seen:
    """Returns a call with its tensors on the meta device, so that copies of a part do not copy values."""
    return Seen(*unflatten(tuple(seen), [tensor.to("meta") for tensor in flatten(tuple(seen))]))


def _advice(reason: str, example: Example) -> str:
    """Returns why a part cannot be captured, with advice to name its submodules if it gets containers of tensors."""
    args, kwargs = arguments_of(example)
    values = (*args, *kwargs.values())
    if all(isinstance(value, Tensor) for value in values):
        return reason
    kinds = ", ".join(type(value).__name__ for value in values)
    return f"the arguments of a part must be tensors, not ({kinds}); name its submodules instead ({reason})"
