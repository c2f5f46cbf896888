"""Measures parity with the module and latency at sizes other than the example's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit.verify.checks.exact import exact

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig

_ROUNDS = 10  # number of rounds of latency at each size


class SizesCheck(Check):
    """Parity with the module and speed-up at other sizes of dynamic axes (`export.dynamic_axes`).

    The bound on the agreement is `verify.min_agreement`. The check is skipped for a file without a module.
    """

    name = "sizes"

    def measure(self, subject: Subject, results: Results) -> Results:
        if subject.reference is None or not subject.sizes:
            return results
        files = [_inputs_of(file, subject) for file in subject.files.values()]
        takes = [sizes for sizes in subject.sizes if all(_are_free(inputs, sizes) for inputs in files)]
        with exact(subject, results) as at_level_0:
            found = {shown(sizes): _measured(at_level_0, sizes) for sizes in takes}
        return results.with_measured(self.name, found)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        found, least = results.measured.get(self.name, {}), bounds.min_agreement
        return [
            Shortfall(
                f"verify.min_agreement={least}: at {size} ONNX Runtime agrees with the converted module on"
                f" {100 * one['agreement']:.2f} % of {one['images']} samples",
                [Fix(("export.dynamic_axes=none",), "the file then takes only the size of the example")],
            )
            for size, one in found.items()
            if least is not None and one["agreement"] < least
        ]

    def lines(self, results: Results) -> list[str]:
        return [
            f"at {size}: agreement {100 * one['agreement']:.2f} % on {one['images']} samples, difference max"
            f" {one['max_abs']:.3g} ({one['max_steps']:.2f} steps), {one['ratio']:.2f} times as fast as float"
            for size, one in results.measured.get(self.name, {}).items()
        ]


def shown(sizes: Mapping[str, Mapping[int, int]]) -> str:
    """Returns sizes as text: "input 65 (axis 2), 97 (axis 3)"."""
    return "; ".join(
        f"{name} " + ", ".join(f"{size} (axis {axis})" for axis, size in axes.items())
        for name, axes in sizes.items()
    )


def _inputs_of(file: Path, subject: Subject) -> dict[str, Sequence[int | str]]:
    """Returns the shapes of a file's inputs by name; a dynamic axis is given by its name."""
    from qatkit_verify.session import open_session

    session = open_session(file, threads=subject.settings.threads, options=subject.options)
    return {one.name: one.shape for one in session.get_inputs()}


def _are_free(inputs: Mapping[str, Sequence[int | str]], sizes: Mapping[str, Mapping[int, int]]) -> bool:
    """Returns whether the axes that get other sizes are dynamic in a file."""
    return not any(isinstance(inputs[name][axis], int) for name, axes in sizes.items() for axis in axes)


def _measured(subject: Subject, sizes: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    from qatkit.verify.parity import parity
    from qatkit_verify.feeds import input_names
    from qatkit_verify.latency import latency
    from qatkit_verify.session import open_session

    assert subject.reference is not None
    wanted, file = subject.settings, subject.files["int8"]
    names = input_names(open_session(file, threads=wanted.threads, options=subject.options))
    images = [_resized(names, next(subject.first_images(1)), sizes)]
    found = parity(subject.reference, file, images, options=subject.options, threads=wanted.threads,
                   task=subject.task)  # fmt: skip
    given = subject.timed(wanted.latency_batch)
    if isinstance(given, Mapping):
        each: Any = {name: _of_size(one, sizes.get(name, {})) for name, one in given.items()}
    else:
        axes = sizes.get(names[0], {})
        each = tuple(axes.get(axis, size) for axis, size in enumerate(given))[1:]
    timed = latency(subject.files, each, batch=wanted.latency_batch, threads=wanted.threads, runs=_ROUNDS,
                    options=subject.options)  # fmt: skip
    return {
        "images": found.images,
        "agreement": found.held,
        **{key: asdict(found.optimized)[key] for key in ("max_abs", "max_steps")},
        "ratio": timed["int8"].ratio,
    }


def _resized(names: Sequence[str], batch: Any, sizes: Mapping[str, Mapping[int, int]]) -> Any:
    """Repeats or cuts the values of a batch to other sizes."""
    if isinstance(batch, Mapping):
        return {name: _of_size(one, sizes.get(name, {})) for name, one in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_of_size(one, sizes.get(name, {})) for name, one in zip(names, batch, strict=True))
    return _of_size(batch, sizes.get(names[0], {}))


def _of_size(values: Any, axes: Mapping[int, int]) -> Any:
    found = np.asarray(values)
    for axis, size in axes.items():
        found = np.take(found, np.arange(size) % found.shape[axis], axis)
    return found if axes else values
