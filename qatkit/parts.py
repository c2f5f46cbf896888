"""Parts: a model that can't be traced as a whole is quantized where it can, and the rest stays as it is.

A detector's box logic depends on data, so torch.fx can't follow it; its backbone and the convolutions of its
heads it can. Each named submodule goes through fuse, stub and prepare_qat and takes its place in the model
again, which is then calibrated, fine-tuned and evaluated by whatever code it came with:

    parts = Parts(fasterrcnn_resnet50_fpn(), ["backbone", "roi_heads.box_head"], [image])
    parts.calibrate(batches)            # each batch is what the model takes
    ...                                 # train parts.model
    converted = parts.convert()         # the model with int8 parts, in PyTorch
    files = parts.export(folder)        # one ONNX file a part

The files are of the size of the tensors that the example gave each part, with a dynamic batch.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from qatkit.backends import FBGEMM, Backend
from qatkit.calibration import calibrate_parts
from qatkit.config.schema import OverrideConfig
from qatkit.errors import ConfigError, near_matches
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import inference
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.observers import MinMaxObserver
from qatkit.weight_fake_quantize import Quantizers

# Calls of one part whose largest inputs are farther apart leave the smallest one 5 bits or fewer.
_FAR_APART = 8.0


class Part(nn.Module):
    """A graph in the place of the submodule that it was traced from: the same input, the same kind of output."""

    def __init__(self, graph: fx.GraphModule, original: nn.Module) -> None:
        super().__init__()
        self.graph = graph
        # Detection models ask their backbone for it.
        if hasattr(original, "out_channels"):
            self.out_channels = original.out_channels

    def forward(self, x: Tensor) -> Any:
        result = self.graph(x)
        names = self.graph.meta["outputs"]
        return result if isinstance(result, Tensor) else OrderedDict(zip(names, result, strict=True))


class Parts:
    """A model with quantized parts.

    Args:
        model: the float model; left untouched.
        scope: paths of the submodules to quantize. Each takes one float tensor; one that is called several
            times (a head over a pyramid's levels) has one range for all calls; `calibrate` warns if these are
            far apart.
        example: one input of `model`.
        backend, batch_norm: as in `QATModule`.
        quantizers: make the quantizers and observers. An observer that averages over calls would clip the widest level.
        overrides: by part, then by pattern within it.

    Attributes:
        model: the copy that holds the parts; calibrate it, train it, evaluate it.
        skipped: (site, reason) of what was left as it was.

    Raises:
        ConfigError: a path that isn't there, lies in another part, is never called or takes something else, or
            a part that can't be traced.
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
        self.model, self.backend, self.skipped = copy.deepcopy(model), backend, list[tuple[str, str]]()
        self.inputs = _inputs(self.model, scope, example)
        for path in scope:
            original, x = self.model.get_submodule(path), self.inputs[path]
            try:
                fused = fuse(original, batch_norm, x, depthwise=True)
                stubbed = stub(fused.graph, x)
                prepared = prepare_qat(stubbed.graph, backend, x, (overrides or {}).get(path), quantizers)
            except ConfigError as error:
                raise ConfigError("model.scope", path, error.allowed) from error
            self.skipped += [(f"{path}.{s}", r) for one in (fused, stubbed, prepared) for s, r in one.skipped]
            self.model.set_submodule(path, Part(prepared.graph, original))

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The prepared graph of each part, by path."""
        return {path: self._part(path).graph for path in self.inputs}

    def _part(self, path: str) -> Part:
        part = self.model.get_submodule(path)
        assert isinstance(part, Part)
        return part

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Finds the ranges: each of `batches` is handed to the model.

        A part whose calls turn out to have ranges far apart is added to `skipped`, with a warning.
        """
        with _Calls({path: self._part(path) for path in self.inputs}) as calls:
            calibrate_parts(self.graphs, self.model, calls.counted(self.model), batches)
        for path, reason in calls.far_apart():
            self.skipped.append((path, reason))
            warnings.warn(f"{path}: {reason}", stacklevel=2)

    def convert(self) -> nn.Module:
        """A copy of the model, in inference mode, with int8 parts."""
        converted = copy.deepcopy(self.model).eval()
        for path, graph in self.graphs.items():
            part = converted.get_submodule(path)
            assert isinstance(part, Part)
            part.graph = convert(graph).graph
        return converted

    def export(self, folder: Path, opset: int = 13) -> dict[str, Path]:
        """Writes PATH.int8.onnx for each part; returns the files by path."""
        files = {}
        for path, graph in self.graphs.items():
            x = self.inputs[path]
            files[path] = folder / f"{path}.int8.onnx"
            # Two of them: a batch of one would be taken for a constant.
            export_onnx(
                convert(graph).graph, x if len(x) > 1 else torch.cat([x, x]), files[path], opset=opset
            )
        return files


class _Calls:
    """The largest input of every part, call by call: the first of an image, the second, ..."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.largest: dict[str, list[float]] = {path: [] for path in parts}
        self.done = dict.fromkeys(parts, 0)
        self.handles = [p.register_forward_pre_hook(self._recorder(path)) for path, p in parts.items()]

    def _recorder(self, path: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: tuple[Any, ...]) -> None:
            found, call = self.largest[path], self.done[path]
            found.extend([0.0] * (call + 1 - len(found)))
            if args[0].numel():  # a head may be given no box at all
                found[call] = max(found[call], float(args[0].abs().max()))
            self.done[path] += 1

        return record

    def counted(self, model: nn.Module) -> Callable[[Any], Any]:
        """`model`, with the counts started anew for each batch."""

        def run(batch: Any) -> Any:
            self.done = dict.fromkeys(self.done, 0)
            return model(batch)

        return run

    def far_apart(self) -> Iterable[tuple[str, str]]:
        """(path, reason) of the parts with a call that is left fewer than 32 of the 256 steps."""
        for path, found in self.largest.items():
            ends = [value for value in found if value > 0]
            if ends and max(ends) > _FAR_APART * min(ends):
                yield (
                    path,
                    f"one range for {len(found)} calls whose inputs differ {max(ends) / min(ends):.0f}-fold "
                    f"({min(ends):.3g} to {max(ends):.3g}): the smallest is left few of the 256 steps; "
                    "normalize them, or name submodules that each serve one call",
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
            raise ConfigError("model.scope", path, f"no such submodule; near: {near_matches(path, names)}")
        inside = next((other for other in scope if path.startswith(f"{other}.")), None)
        if inside is not None:
            raise ConfigError("model.scope", path, f"lies inside '{inside}', which is quantized as a whole")


def _inputs(model: nn.Module, scope: Sequence[str], example: Any) -> dict[str, Tensor]:
    """What each part is called with (first call), from one run of the model."""
    seen: dict[str, tuple[Any, ...]] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.setdefault(path, (*args, *kwargs.values()))

        return record

    handles = [
        model.get_submodule(path).register_forward_pre_hook(recorder(path), with_kwargs=True)
        for path in scope
    ]
    try:
        with inference(model):
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    for path in scope:
        if path not in seen:
            raise ConfigError("model.scope", path, "is never called for this example")
        if len(seen[path]) != 1 or not isinstance(seen[path][0], Tensor):
            kinds = ", ".join(type(value).__name__ for value in seen[path])
            raise ConfigError(
                "model.scope", path, f"must take one tensor, not ({kinds}); name submodules of it"
            )
    return {path: args[0].detach() for path, args in seen.items()}
