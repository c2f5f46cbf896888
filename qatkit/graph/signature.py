"""Describes a model's inputs and outputs as flat tuples of named tensors: the graph's inputs and outputs.

    example                      call                     tensors of the graph
    x                            model(x)                 (x,)                   "input"
    (image, ids)                 model(image, ids)        (image, ids)           the names of forward's arguments
    {"ids": ids, "mask": mask}   model(ids=.., mask=..)   (ids, mask)            "ids", "mask"
    ({"left": a, "right": b},)   model({..})              (a, b)                 "pair_left", "pair_right"

Tensors may be anywhere in lists, tuples, mappings and dataclasses. Any other value (a flag, None) is constant.
A batch is any value with the structure of the example; `flatten` returns its tensors in the graph's order.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit_verify.errors import ConfigError

Example = Tensor | Sequence[Any] | Mapping[str, Any]
Path = tuple[str, ...]


def arguments_of(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments with which a model is called for `example`."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example), {}


def call(model: Callable[..., Any], example: Example) -> Any:
    """Calls `model` with the arguments that `example` describes."""
    args, kwargs = arguments_of(example)
    return model(*args, **kwargs)


def flatten(example: Example) -> tuple[Tensor, ...]:
    """Returns the tensors of an example or a batch, in the order of the graph's inputs."""
    return tuple(tensor for _, tensor in leaves(arguments_of(example)) if isinstance(tensor, Tensor))


def in_float32(example: Example) -> Example:
    """Returns `example` with its floating-point tensors in float32."""
    return unflatten(example, [t.float() if t.is_floating_point() else t for t in flatten(example)])


def unflatten(example: Example, tensors: Sequence[Tensor]) -> Example:
    """Returns `example` with other tensors, in the order of `flatten`."""
    left = iter(tensors)
    new = _mapped(example, lambda value: next(left) if isinstance(value, Tensor) else value)
    return cast(Example, new)


def example_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
    """Returns the example for a call; with keyword arguments, it is a mapping of all arguments by name."""
    if not kwargs:
        return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args
    return arguments_by_name(signature.bind(*args, **kwargs)) if args else dict(kwargs)


def like(example: Example, batch: Any, names: Sequence[str] = ("input",)) -> tuple[Tensor, ...]:
    """Returns the tensors of `batch` in the order of the tensors in `example`.

    Args:
        example: the example that the graph was made with.
        batch: a value with the structure of `example` (keys of mappings in any order), a sequence of all tensors, or a
            mapping of them by `names`. Values other than tensors are ignored. A tensor where `example` has none (such
            as labels, or a mask that the example lacks) is rejected.
        names: the names of the graph's inputs.

    Raises:
        ConfigError: `batch` has another structure.
    """
    found = _paired(example, batch)
    if found is None and isinstance(batch, Mapping) and set(names) == set(batch):
        found = [batch[name] for name in names]
    if found is None and isinstance(batch, (tuple, list)):
        found = list(batch)
    count = len(flatten(example))
    if found is None or len(found) != count or not all(isinstance(one, Tensor) for one in found):
        raise ConfigError("batch", _form(batch), f"the same structure as the example, {_form(example)}")
    return tuple(found)


def _paired(example: Any, batch: Any) -> list[Any] | None:
    """Returns the values of `batch` at the paths where `example` has tensors; None if a path is missing."""
    if isinstance(example, Tensor):
        return [batch] if isinstance(batch, Tensor) else None
    parts, given = _parts(example), _parts(batch)
    if parts is None or given is None:
        return None if flatten((example,)) or flatten((batch,)) else []
    by_name = dict(given)
    more = [value for name, value in given if name not in dict(parts)]
    if isinstance(example, Mapping) != isinstance(batch, Mapping) or flatten((more,)):
        return None
    pairs = [_paired(part, by_name.get(name)) for name, part in parts]
    return None if any(pair is None for pair in pairs) else [one for pair in pairs for one in pair or ()]


def inputs_of(graph_module: fx.GraphModule, batch: Any) -> tuple[Tensor, ...]:
    """Returns the tensors of `batch` in the order of the graph's inputs: by name from a mapping, else in given order.

    Raises:
        ConfigError: the numbers of tensors and of the graph's inputs differ.
    """
    names = graph_inputs(graph_module)
    if isinstance(batch, Mapping):
        named = {"_".join(path): value for path, value in leaves(batch) if isinstance(value, Tensor)}
        if set(names) == set(named):
            return tuple(named[name] for name in names)
    found = flatten(batch)
    if len(found) != len(names):
        count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        raise ConfigError("batch", _form(batch), f"{count} ({', '.join(names)})")
    return found


def graph_inputs(graph_module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a graph's inputs."""
    return tuple(getattr(graph_module, "meta", {}).get("inputs", ("input",)))


def graph_axes(graph_module: nn.Module, tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Returns the batch axis of each input: as the capture found it or, without this information, from `tensors`."""
    found = getattr(graph_module, "meta", {}).get("batch_axes")
    return batch_axes(tensors) if found is None else tuple(found)


def batch_multiple(graph_module: nn.Module) -> int:
    """Returns the number by which all batch sizes of a graph must be divisible."""
    return int(getattr(graph_module, "meta", {}).get("batch_multiple", 1))


def on(device: torch.device, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Moves `tensors` to a device."""
    return tuple(tensor.to(device) for tensor in tensors)


def on_device(batch: Example, device: torch.device) -> Example:
    """Moves a batch to a device and keeps its structure."""
    return unflatten(batch, on(device, flatten(batch)))


def input_names(model: nn.Module, example: Example) -> tuple[str, ...]:
    """Returns names of `example`'s tensors: "input" for a single tensor, else made from the arguments of forward.

    Raises:
        ConfigError: `example` does not fit the arguments of `model.forward`, or has no tensor.
    """
    args, kwargs = arguments_of(example)
    if not flatten(example):
        raise ConfigError(
            "example",
            type(example).__name__,
            "the arguments of a call of the model, with at least one tensor",
        )
    if isinstance(example, Tensor):
        return ("input",)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        allowed = f"arguments that {type(model).__name__}.forward accepts ({error})"
        raise ConfigError("example", _form(example), allowed) from error
    by_id = {id(v): "_".join(path) for path, v in leaves(arguments_by_name(bound)) if isinstance(v, Tensor)}
    return unique(by_id[id(tensor)] for tensor in flatten(example))


def arguments_by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns the bound arguments by name; arguments in **kwargs have their own names."""
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def _form(example: Any) -> str:
    """Describes the structure of an example for messages: its containers and the shapes of its tensors."""
    if isinstance(example, Tensor):
        return f"Tensor{list(example.shape)}"
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{k}: {_form(v)}" for k, v in example.items()) + "}"
    if isinstance(example, (list, tuple)):
        return "(" + ", ".join(map(_form, example)) + ")"
    return repr(example)


def output_leaves(result: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...], tuple[str, ...]]:
    """Returns names and tensors of a model's outputs, and the paths of outputs that are neither tensors nor None."""
    if isinstance(result, Tensor):
        return ("output",), (result,), ()
    found = [(path, value) for path, value in leaves(result) if value is not None]
    tensors = [(path, value) for path, value in found if isinstance(value, Tensor)]
    others = tuple("_".join(path) for path, value in found if not isinstance(value, Tensor))
    if len(tensors) == 1:
        return ("output",), (tensors[0][1],), others
    return leaf_names(path for path, _ in tensors), tuple(tensor for _, tensor in tensors), others


def leaf_names(paths: Iterable[Path]) -> tuple[str, ...]:
    """Returns names of several outputs, made from their paths: "scores", "maps_levels_0", "output_1"."""
    return unique("_".join(path if not path[0].isdigit() else ("output", *path)) for path in paths)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields (path, leaf) of nested lists, tuples, mappings and dataclasses; named tuples have field names."""
    parts = _parts(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from leaves(part, (*path, name))


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [(str(i), part) for i, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `value` with `change` applied to every leaf; containers keep their types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        pairs = {key: _mapped(part, change) for key, part in value.items()}
        return pairs if type(value) is dict else type(value)(pairs)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, change) for part in value))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_mapped(part, change) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = {field.name: _mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **new)
    return change(value)


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Returns unique names that are valid in a file: characters other than letters and digits become "_"."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name) or "_"
        found.append(plain if plain not in found else f"{plain}_{found.count(plain) + len(found)}")
    return tuple(found)


def batch_axes(tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Returns the batch axis of each tensor: 0 if its first axis has the size of the batch, else None.

    The size of the batch is that of the first axis of the first tensor with axes. A mask of positions or a temperature
    has no batch axis.
    """
    size = next((len(tensor) for tensor in tensors if tensor.ndim), None)
    return tuple(0 if tensor.ndim and len(tensor) == size else None for tensor in tensors)


def batch_size(tensors: Sequence[Tensor], axes: Sequence[int | None] | None = None) -> int:
    """Returns the number of samples in `tensors`; 1 if no tensor has an axis.

    It is the size along the first of `axes` that is not None. If there is none, it is the size of the first axis of
    the first tensor with axes.
    """
    chosen = [None] * len(tensors) if axes is None else axes
    along = (t.shape[axis] for t, axis in zip(tensors, chosen, strict=True) if axis is not None)
    return next(along, next((len(tensor) for tensor in tensors if tensor.ndim), 1))


def resized(
    tensors: Sequence[Tensor], size: int, axes: Sequence[int | None] | None = None
) -> tuple[Tensor, ...]:
    """Returns `tensors` with size `size` along their batch axes; their samples are repeated as needed."""
    chosen = batch_axes(tensors) if axes is None else axes
    return tuple(
        tensor if axis is None else tensor.index_select(axis, _rows(size, tensor.shape[axis], tensor.device))
        for tensor, axis in zip(tensors, chosen, strict=True)
    )


def _rows(size: int, given: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device) % given


def other_values(tensors: Sequence[Tensor], seed: int, *, whole: bool = True) -> tuple[Tensor, ...]:
    """Returns tensors of the same shapes with other values of the same kind.

    Noise with the standard deviation of the values is added to float tensors with axes. Whole numbers (integers,
    booleans, floats that count or name something) are shuffled within each tensor, so they stay in the range of the
    example.

    Args:
        tensors: the given tensors.
        seed: the seed of the noise.
        whole: whether whole numbers are shuffled. Some models need them in the given order (columns that index tables
            of different sizes, offsets that have to increase).
    """
    generator = torch.Generator().manual_seed(seed)

    def changed(tensor: Tensor) -> Tensor:
        counted = is_whole(tensor)
        if counted and not whole:
            return tensor
        if not counted and tensor.ndim:
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            return tensor + noise * (tensor.std() if tensor.numel() > 1 else 1.0)
        if tensor.numel() < 2:
            return tensor
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].reshape(tensor.shape)

    return tuple(map(changed, tensors))


def is_whole(tensor: Tensor) -> bool:
    """Returns whether a tensor is not floating-point, or has only whole numbers, at least three different ones."""
    if not tensor.is_floating_point():
        return True
    return bool((tensor == tensor.round()).all()) and len(tensor.unique()) > _FLAGS


_FLAGS = 2  # float tensors with only two values (an empty image, a mask) get noise like others
