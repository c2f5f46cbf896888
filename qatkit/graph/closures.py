"""Copies the functions in a model's hooks and attributes when the model is copied.

    def keep(module, inputs, output):     # model.body.register_forward_hook(keep)
        model.features["body"] = output

`copy.deepcopy` does not copy functions. The hook of a copy would write into the original, while the copy would read its
own outdated features. A copied function therefore gets new cells and defaults, whose contents are copied along with the
model.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_HELD_APART = ("_parameters", "_buffers", "_modules")
_NO_STATE = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex, type(None))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module other than parameters, buffers and modules."""
    return {name: value for name, value in vars(module).items() if name not in _HELD_APART}


def held_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors that a value refers to.

    Containers, objects other than modules, and the closures and defaults of functions are searched.
    """
    yield from (one for one in _reached(value) if isinstance(one, Tensor))


def _reached(value: Any) -> Iterator[Any]:
    """Yields `value` and everything with state that it refers to, without searching nn.Modules and tensors."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, _NO_STATE) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif isinstance(one, types.MethodType):
            waiting.append(one.__self__)
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.FunctionType):
            waiting += [*_contents(one), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        elif not isinstance(one, (nn.Module, Tensor)):
            waiting += getattr(one, "__dict__", {}).values()


def _contents(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  asks
    except ValueError:
        return True
    return False


def rebind(model: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Makes the hooks and function attributes of a copied model refer to copies of the objects that they refer to.

    If no hook and no replaced forward refers to an object with state, nothing is changed. Functions that only the
    copy has (torch.compile makes them) already refer to the copy.

    Args:
        model: the original.
        copied: its copy, made by `copy.deepcopy`.
        memo: the memo that `copy.deepcopy` was called with.
    """
    if not any(map(_is_hooked, copied.modules())):
        return
    held = [value for module in model.modules() for value in attributes_of(module).values()]
    given = {id(one) for one in _reached(held) if isinstance(one, types.FunctionType)}
    functions = _Functions(memo)

    def again(value: Any) -> Any:
        is_own = isinstance(value, types.FunctionType) and id(value) not in given
        return value if is_own or not _has_state(value) else functions.within(value)

    for module in copied.modules():
        for name, value in attributes_of(module).items():
            if isinstance(value, dict):
                value.update({key: again(one) for key, one in value.items()})
            elif isinstance(value, list):
                value[:] = map(again, value)
            else:
                vars(module)[name] = again(value)


def _is_hooked(module: nn.Module) -> bool:
    """Returns whether a module has hooks or a replaced forward that refer to objects with state."""
    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        vars(module).get("forward"),
    )
    return any(map(_has_state, hooks)) or any(isinstance(one, types.MethodType) for one in hooks)


def _has_state(value: Any) -> bool:
    """Returns whether a value is a function that refers to objects with state.

    Classes, Python modules, strings and numbers have none; functions and tuples have none of their own.
    """
    if not isinstance(value, (types.FunctionType, functools.partial)):
        return False
    plain = (types.FunctionType, functools.partial, tuple)
    return any(not isinstance(one, plain) for one in _reached(value))


class _Functions:
    """A copier of functions; a referent that several functions share is copied once.

    Args:
        memo: the memo of `copy.deepcopy`.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.made: dict[int, Any] = {}
        self.cells: dict[int, types.CellType] = {}

    def of(self, value: Any) -> Any:
        """Returns the copy of a function with state, or of a value that such a function refers to."""
        if isinstance(value, types.FunctionType):
            if not _has_state(value):
                return value
            if id(value) not in self.made:
                self._copy(value)
            return self.made[id(value)]
        if isinstance(value, weakref.ref):
            target = self.memo.get(id(value()))
            return value if target is None else weakref.ref(target)
        for tensor in held_tensors(value):
            if not tensor.is_leaf:
                self.memo.setdefault(id(tensor), tensor.detach().clone())
        try:
            return self.within(copy.deepcopy(value, self.memo))
        except Exception:  # copying a lock or a file may raise anything; it is then shared
            return value

    def within(self, copied: Any) -> Any:
        """Copies the functions in a result of `copy.deepcopy`, which itself does not copy them."""
        if isinstance(copied, types.FunctionType):
            return self.of(copied)
        if isinstance(copied, functools.partial):
            given = {key: self.within(one) for key, one in copied.keywords.items()}
            return type(copied)(self.within(copied.func), *map(self.within, copied.args), **given)
        return copied

    def _copy(self, function: types.FunctionType) -> None:
        new = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            closure=tuple(map(self._cell, function.__closure__ or ())),
        )
        new.__qualname__, new.__doc__ = function.__qualname__, function.__doc__
        vars(new).update(vars(function))
        self.made[id(function)] = new
        new.__defaults__ = function.__defaults__ and tuple(map(self.of, function.__defaults__))
        new.__kwdefaults__ = function.__kwdefaults__ and {
            k: self.of(v) for k, v in function.__kwdefaults__.items()
        }
        for cell in function.__closure__ or ():
            if not _is_empty(cell) and _is_empty(self.cells[id(cell)]):
                self.cells[id(cell)].cell_contents = self.of(cell.cell_contents)

    def _cell(self, cell: types.CellType) -> types.CellType:
        return self.cells.setdefault(id(cell), types.CellType())
