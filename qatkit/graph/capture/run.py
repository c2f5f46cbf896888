"""Runs a model once under the recorder, with leaf modules and wrapped functions as single nodes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _wrapped_fns_to_patch

from qatkit.graph.attention.multi_head import multi_head_attention
from qatkit.graph.capture.calls import tensors_in
from qatkit.graph.capture.recorder import Recorder
from qatkit.graph.capture.sizes import drawn_output
from qatkit.graph.nodes import is_opaque, known_type
from qatkit.graph.signature import Example, call, output_leaves, unflatten
from qatkit.graph.weights.held import is_held

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class Recording:
    """The result of one run.

    Attributes:
        graph: the graph of all calls, with its outputs.
        constants: tensors, by name, that are neither computed by a node nor parameters or buffers: made from NumPy
            arrays or Python numbers, or kept as attributes of modules.
        random: nodes that draw random numbers.
        outputs: names of the outputs.
        tensors: the output tensors.
        dropped: the paths of outputs other than tensors and None, each joined by "_".
        only_training: paths of modules that returned their input, and may do something else in training.
        contexts: names of contexts that the model enters and the graph leaves out.
        changed: names of buffers that the run changed; they are restored.
        drawn: paths of modules whose outputs were drawn at random (`qatkit.graph.capture.sizes`).
        read_values: whether the graph depends on values that tensors of the model had.
        shares: whether numbers in the graph are, or may be, fractions of the batch size.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    random: list[fx.Node]
    outputs: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    dropped: tuple[str, ...]
    only_training: set[str]
    contexts: set[str]
    changed: set[str]
    drawn: set[str]
    read_values: bool
    shares: bool = False


def record(
    model: nn.Module,
    example: Example,
    tensors: Sequence[Tensor],
    names: Sequence[str],
    opened: frozenset[str],
    *,
    trace_sizes: bool = False,
) -> Recording:
    """Records a run of `model` on `tensors`, arranged as in `example`.

    Args:
        model: the model.
        example: the example.
        tensors: the tensors of the inputs.
        names: the names of the inputs.
        opened: paths of attention modules that are not recorded as leaves.
        trace_sizes: see `Recorder`.

    Raises:
        UntraceableError: a line of the model can't be part of a graph.
    """
    recorder = Recorder(model, trace_sizes=trace_sizes)
    copies = [tensor.clone() for tensor in tensors]
    for name, tensor in zip(names, copies, strict=True):
        recorder.placeholder(name, tensor)
    calls = _Calls(model, recorder, opened)
    contexts: set[str] = set()
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), torch.compiler.set_stance("force_eager"), plain_contexts(contexts)):
            stack.enter_context(context)
        changed = stack.enter_context(kept_buffers(model))
        stack.enter_context(calls.patched())
        stack.enter_context(recorder)
        result = call(model, unflatten(example, copies))
    found, outputs, dropped = output_leaves(result)
    nodes = [recorder.node_of(tensor) for tensor in outputs]
    recorder.graph.output(nodes[0] if len(nodes) == 1 else tuple(nodes))
    return Recording(
        recorder.graph,
        recorder.constants,
        recorder.random,
        found,
        outputs,
        dropped,
        calls.only_training,
        contexts,
        changed,
        calls.drawn,
        recorder.read_values or bool(recorder.constants),
    )


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[set[str]]:
    """Restores all buffers afterwards; the yielded set then has the names of the buffers that were changed.

    Changes that do not raise a buffer's version (`F.batch_norm`) are undone, but not in this set.
    """
    before = [(module, dict(module._buffers)) for module in model.modules()]
    found = list(model.named_buffers())
    names = {id(buffer): name for name, buffer in found}
    values = {name: (buffer.clone(), buffer._version) for name, buffer in found}
    changed: set[str] = set()
    try:
        yield changed
    finally:
        for module, buffers in before:
            for key, buffer in buffers.items():
                if buffer is None:
                    continue
                value, version = values[names[id(buffer)]]
                if module._buffers.get(key) is not buffer or buffer._version != version:
                    changed.add(names[id(buffer)])
                module._buffers[key] = buffer
                if buffer._version != version or not _equal(buffer, value):
                    buffer.data.copy_(value)


def _equal(buffer: Tensor, value: Tensor) -> bool:
    """Returns whether a buffer has these values; assumes so if its layout is not strided.

    The values are compared, since `F.batch_norm` changes its statistics without raising their version.
    """
    return buffer.layout is not torch.strided or torch.equal(buffer, value)


@contextlib.contextmanager
def plain_contexts(found: set[str]) -> Iterator[None]:
    """Disables contexts that the model enters: inference_mode, and autocast on the CPU.

    `found` gets "autocast" if the model enters the latter.

    Tensors made in inference mode do not count in-place changes, and the types of autocast do not belong in a graph
    that is quantized.
    """
    inference: Any = torch.inference_mode.__enter__
    autocast: Any = torch.autocast.__enter__
    changed: list[tuple[Any, str]] = []  # a decorator's context is entered again after the capture

    def enter_inference(context: Any) -> None:
        if context.mode:
            changed.append((context, "mode"))
            context.mode = False
        inference(context)

    def enter_autocast(context: Any) -> Any:
        if context._enabled and context.device == "cpu":
            found.add("autocast")
            changed.append((context, "_enabled"))
            context._enabled = False
        return autocast(context)

    torch.inference_mode.__enter__ = enter_inference  # type: ignore[method-assign]
    torch.autocast.__enter__ = enter_autocast  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = inference  # type: ignore[method-assign]
        torch.autocast.__enter__ = autocast  # type: ignore[method-assign]
        for context, name in changed:
            setattr(context, name, True)


class _Calls:
    """The replacements for nn.Module.__call__ and for leaf functions while a model is recorded."""

    def __init__(self, model: nn.Module, recorder: Recorder, opened: frozenset[str]) -> None:
        self.recorder, self.opened = recorder, opened
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.only_training: set[str] = set()
        self.drawn: set[str] = set()
        self.within_leaf = False

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Applies the patches, and restores everything afterwards."""
        original, scripted = nn.Module.__call__, torch.jit.ScriptFunction.__call__
        functions = {key: frame[key[1]] for key, frame in _wrapped_fns_to_patch.items() if key[1] in frame}
        calls = self

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return calls.module(original, module, args, kwargs)

        def script_call(function: Any, *args: Any, **kwargs: Any) -> Any:
            plain = getattr(function, "_torchdynamo_inline", None)
            return scripted(function, *args, **kwargs) if plain is None else plain(*args, **kwargs)

        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.jit.ScriptFunction.__call__ = script_call  # type: ignore[method-assign, assignment]
        for key, function in functions.items():
            _wrapped_fns_to_patch[key][key[1]] = self._leaf_function(function)
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            torch.jit.ScriptFunction.__call__ = scripted  # type: ignore[method-assign]
            for key, function in functions.items():
                _wrapped_fns_to_patch[key][key[1]] = function

    def _leaf_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def leaf(*args: Any, **kwargs: Any) -> Any:
            if self.within_leaf or not any(True for _ in tensors_in((args, kwargs))):
                return function(*args, **kwargs)
            # Some functions (torchvision's Swin3d) write into the lists they are given.
            given = tuple(list(a) if isinstance(a, list) else a for a in args)
            with self._leaf():
                return self.recorder.record_leaf(function, ("call_function", function), given, kwargs)

        return leaf

    def module(self, original: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records the call of a module: a leaf as one node, any other module as the calls inside it.

        A module that only returns its input (`_idle`) becomes a node too.
        """
        path = self.paths.get(id(module))
        if self.within_leaf or path is None or not any(True for _ in tensors_in((args, kwargs))):
            return original(module, *args, **kwargs)
        stack = self.recorder.stack
        if path and is_leaf(module, args, kwargs) and path not in self.opened:
            stack.append((path, type(module)))
            try:
                with self._leaf():
                    run: Callable[..., Any] = functools.partial(self._outputs, original, module, path)
                    return self.recorder.record_leaf(run, ("call_module", path), args, kwargs)
            finally:
                stack.pop()
        before = len(self.recorder.graph.nodes)
        stack.append((path, type(module)))
        try:
            if path in self.opened and isinstance(module, nn.MultiheadAttention):
                return multi_head_attention(module, *args, **kwargs)
            result = original(module, *args, **kwargs)
        finally:
            stack.pop()
        if path and isinstance(result, Tensor) and self._idle(module, before, args, result):
            with torch._C.DisableTorchFunction():
                self.only_training.add(path)
                return self.recorder.passed(
                    result, self.recorder.emit("call_module", path, (self.recorder.node_of(result),), {})
                )
        return result

    def _outputs(self, original: Any, module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a leaf's output, drawn at random if it depends on the inputs and `drawn_output` supports the leaf.

        The values of such an output are never read, so they need not be computed.
        """
        drawn = drawn_output(module, args, kwargs) if self.recorder.depend(args) else None
        if drawn is None:
            return original(module, *args, **kwargs)
        self.drawn.add(path)
        return drawn

    @contextlib.contextmanager
    def _leaf(self) -> Iterator[None]:
        """Turns recording off for calls inside a leaf."""
        self.within_leaf = True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self.within_leaf = False

    def _idle(self, module: nn.Module, before: int, args: tuple[Any, ...], result: Tensor) -> bool:
        """Returns whether a module only returned its input, as stochastic depth and noise do in inference.

        Containers and modules with parameters do not count.
        """
        return (
            bool(args)
            and result is args[0]
            and not isinstance(module, _CONTAINERS)
            and not getattr(module, "one_operator", False)
            and len(self.recorder.graph.nodes) == before
            and not any(True for _ in module.parameters())
        )


def is_leaf(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a module is recorded as one node.

    Opaque modules, which something other than PyTorch computes, are leaves, and so are modules whose weight
    is computed by a parametrization or a hook that `open_held` supports.

    Other modules with parametrizations or hooks are not, nor are those whose forward was replaced on the instance. Of
    the rest, nn.MultiheadAttention, the modules of the operator table (`known_type`) and modules of torch.nn without
    children are leaves.
    """
    if is_held(module) or is_opaque(module):
        return True
    if hasattr(module, "parametrizations") or module._forward_pre_hooks or module._forward_hooks:
        return False
    if "forward" in vars(module):  # set on the instance, as adapters and profilers do
        return False
    if isinstance(module, nn.MultiheadAttention):
        return True
    if known_type(module) is not None:
        return True
    return type(module).__module__.startswith("torch.nn") and not any(True for _ in module.children())
