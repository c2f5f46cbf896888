"""Samples as mappings from input names to arrays, from NumPy files or a user's dataset.

    DIR/**/*.npz, *.npy ── sorted by path ──> samples ── every other one calibrates and trains, the others verify
    DIR/train, DIR/test                       if both exist, they are the two splits

The arrays of an item have the shapes of the model's inputs, including the batch axis, as for
`InferenceSession.run`. If all arrays of a file have the same size N > 1 along their first axis, the file has
N samples.

For a model with states (`qatkit.data.rollout`), a file of N samples is a sequence of N steps. Files with one
sample each in the same folder are the steps of one sequence, such as frames that a program has written one by
one. They are sorted by the numbers in their names, so step_10 comes after step_9. A state is one array per
sequence, without an axis of steps. Without train/ and test/, whole sequences instead of samples are divided
between the splits (`qatkit.data.sequences`).
"""

from __future__ import annotations

import os
import random
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.data.inputs import ArrayInputs, Batch
from qatkit.data.request import Request
from qatkit.data.sequences import Part, shared_out
from qatkit.data.sources import Splits
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.pictures import files_below, open_regular_file

Arrays = Mapping[str, NDArray[Any]]
LABEL = "label"  # name of the array with the labels of a file's samples, which is not an input
LONE = "input"  # name given to the array of a .npy file, which suits a model with one input of any name
_SUFFIXES = (".npz", ".npy")
_SOURCE = "qatkit.data.arrays.arrays"
_KINDS = {"f": "floating-point numbers", "i": "integers", "u": "integers", "b": "booleans"}


@dataclass(frozen=True)
class Port:
    """An input of a model, as its file declares it.

    Attributes:
        name: name of the input.
        dtype: name of the input's type in NumPy.
        shape: sizes of the axes; None for a dynamic axis.
        axis: the batch axis; None if the input has none.
        names: names of the axes in the file; "" for an axis without a name.
        below: for an input of ids, the number of rows of the smallest embedding table that they index; None
            if no such table is known.
        rows: number of rows of a sample along the batch axis.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    axis: int | None
    names: tuple[str, ...] = ()
    below: int | None = None
    rows: int = 1


class ArrayFiles:
    """A dataset of the samples in NumPy files.

    Args:
        paths: paths of the files, in order.
        root: folder of the data, for messages.
        states: names of the model's state inputs. Arrays with these names are the start states of a sequence
            and belong to its first step.

    Attributes:
        lengths: number of consecutive samples of each sequence.
        targets: label of each sample; `NO_TARGET` if its file has no labels.

    Raises:
        ConfigError: a file cannot be read, has no arrays besides its labels, has an array of neither real numbers nor
            booleans, or does not have one integer label per sample.
    """

    def __init__(self, paths: Sequence[str], root: str, states: Collection[str] = ()) -> None:
        self.root, self.states = root, frozenset(states)
        self.lengths: list[int] = []
        open_folder = None  # folder of the single-sample files that form the last sequence
        self.places: list[tuple[str, int | None]] = []
        self.targets: list[int] = []
        for path in paths:
            shapes, labels = self._header(path)
            lengths = {shape[0] if shape else 0 for name, shape in shapes.items() if name not in self.states}
            count = max(1, lengths.pop()) if len(lengths) == 1 else 1
            folder = os.path.dirname(path) if count == 1 else None
            if folder is not None and folder == open_folder:
                self.lengths[-1] += 1
            else:
                self.lengths.append(count)
            open_folder = folder
            self.places += [(path, None)] if count == 1 else [(path, place) for place in range(count)]
            self.targets += self._labels(path, labels, count)
        self._open: tuple[str, dict[str, NDArray[Any]]] = ("", {})

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], int]:
        path, place = self.places[index]
        if self._open[0] != path:
            self._open = (path, {name: one for name, one in self._read(path).items() if name != LABEL})
        arrays = self._open[1]
        if place is not None:
            steps = {name: one[place : place + 1] for name, one in arrays.items() if name not in self.states}
            arrays = steps if place else {**arrays, **steps}
        return arrays, self.targets[index]

    def _header(self, path: str) -> tuple[dict[str, tuple[int, ...]], NDArray[Any] | None]:
        """Returns the shapes of a file's arrays, and its labels or None; no other values are read."""
        with self._reading(path):
            with open_regular_file(path) as stream:
                found = dict(_headers(stream))
            labels = self._read(path, [LABEL])[LABEL] if LABEL in found else None
        found.pop(LABEL, None)
        if not found:
            raise self._wrong(path, "has no arrays" if labels is None else f"has no array besides '{LABEL}'")
        for name, (_, dtype) in found.items():
            if dtype.kind not in _KINDS:
                raise self._wrong(
                    path, f"has the array '{name}' of type {dtype}; expected real numbers or booleans"
                )
        return {name: shape for name, (shape, _) in found.items()}, labels

    def _read(self, path: str, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        with self._reading(path):
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {LONE: loaded}
            with loaded:
                return {name: loaded[name] for name in names or loaded.files}

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise self._wrong(path, f"can't be read ({first_line(error)[:160]})") from error

    def _labels(self, path: str, labels: NDArray[Any] | None, count: int) -> list[int]:
        if labels is None:
            return [NO_TARGET] * count
        if labels.dtype.kind not in "iu" or labels.size != count:
            has = f"has the array '{LABEL}' of {labels.dtype} {list(labels.shape)}"
            raise self._wrong(path, f"{has}; expected one integer per sample ({count})")
        return [int(one) for one in labels.reshape(-1)]

    def _wrong(self, path: str, told: str) -> ConfigError:
        return ConfigError("data.root", self.root, reason=f"{os.path.relpath(path, self.root)} {told}")


def _headers(stream: IO[bytes]) -> Iterator[tuple[str, tuple[tuple[int, ...], np.dtype[Any]]]]:
    """Yields the name, shape and type of each array in a .npz or .npy file, without reading their values."""
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.namelist():
                with archive.open(entry) as member:
                    yield entry.removesuffix(".npy"), _header(member)
        return
    stream.seek(0)
    yield LONE, _header(stream)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return shape, dtype


def arrays(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the samples in the .npz and .npy files of a folder and its subfolders.

    For a model with states, the samples are the steps of sequences.

    Raises:
        ConfigError: the folder does not exist; it has fewer than two samples, or no files for a split; a file
            cannot be read or used (`ArrayFiles`); or only some samples have labels.
    """
    top = data_folder(_SOURCE, root)
    states = request.states if request is not None else {}
    parts = [top / name for name in ("train", "test")]
    folders = parts if all(part.is_dir() for part in parts) else [top]
    found: list[ArrayFiles | Part] = [_files(folder, str(root), states) for folder in folders]
    if isinstance(whole := found[0], ArrayFiles) and len(found) == 1:
        if len(whole) < 2:
            raise ConfigError(
                "data.root",
                root,
                f"{FOLDERS[_SOURCE]}, with at least two samples; the folder has {len(whole)}",
            )
        every_other = [Part(whole, range(start, len(whole), 2)) for start in (0, 1)]
        found = [*shared_out(whole, whole.lengths)] if states else [*every_other]
    train, test = found
    targets: set[int] = {*train.targets, *test.targets}
    if NO_TARGET in targets and len(targets) > 1:
        told = f"only some samples have a label (array '{LABEL}'); give labels to all samples or to none"
        raise ConfigError("data.root", root, reason=told)
    classes = () if targets == {NO_TARGET} else tuple(f"class_{i}" for i in range(max(targets) + 1))
    return Splits(train, test, classes, arrays=True)


def _files(folder: Path, root: str, states: Collection[str]) -> ArrayFiles:
    paths, _ = files_below(folder, lambda name: name.lower().endswith(_SUFFIXES), "data.root")
    if not paths:
        raise ConfigError("data.root", root, f"{FOLDERS[_SOURCE]}; {folder.name or root} has none")
    order = _by_number if states else lambda path: path.split(os.sep)
    return ArrayFiles(sorted(paths, key=order), root, states)


def _by_number(path: str) -> list[list[tuple[int, str]]]:
    """Returns the sort key of a step: numbers in the names of folders and files count as numbers."""
    parts = [re.split(r"(\d+)", part) for part in path.split(os.sep)]
    return [[(int(one), "") if one.isdecimal() else (-1, one) for one in part] for part in parts]


@dataclass(frozen=True)
class ArrayBatches:
    """The preparation of batches from samples that are arrays; `Preprocessing` does the same for images.

    Attributes:
        source: dotted path of the source, for messages.
        ports: the model's inputs. If it is empty, they are unknown: each array of a sample is then an input,
            batched along axis 0.
        states: for a model with states, the output that feeds each state input in the next step, by input
            name.
    """

    source: str
    ports: tuple[Port, ...] = field(default_factory=tuple)
    states: Mapping[str, str] = field(default_factory=dict)

    def checked(self, item: Any, name: str) -> dict[str, Tensor]:
        """Returns a sample as a mapping from the names of the model's inputs to tensors.

        Args:
            item: a mapping of arrays, or the array of the only input.
            name: name of the sample, for messages.

        Raises:
            ConfigError: an input is missing, is not an array, or does not fit the model's input (`fitted`).
        """
        given = item if isinstance(item, Mapping) else {LONE: item}
        if not self.ports:
            return {key: self._tensor(one, f"{name}['{key}']") for key, one in given.items()}
        if len(self.ports) == 1 and len(given) == 1:
            given = {self.ports[0].name: next(iter(given.values()))}
        missing = [port.name for port in self.ports if port.name not in given]
        if missing:
            has = f"only {', '.join(given)}" if given else "no arrays"
            told = f"{missing[0]} is missing in {name}, which has {has}"
            names = ", ".join(port.name for port in self.ports)
            raise ConfigError("data.source", self.source, reason=f"{told}; the model's inputs are {names}")
        return {port.name: self.fitted(given[port.name], port, name) for port in self.ports}

    def eval_batch(self, samples: Iterable[Mapping[str, Tensor]]) -> Batch:
        """Concatenates samples along their batch axes, into a mapping of tensors or the tensor of the only input.

        Raises:
            ConfigError: the samples differ in an input that has no batch axis.
        """
        found = list(samples)
        axes = self.axes(found[0])
        for name in [name for name, axis in axes.items() if axis is None]:
            if any(not torch.equal(found[0][name], one[name]) for one in found[1:]):
                told = f"the input '{name}' has no batch axis; expected the same values in all samples"
                raise ConfigError("data.source", self.source, reason=told)
        joined = {
            name: found[0][name] if axis is None else torch.cat([one[name] for one in found], axis)
            for name, axis in axes.items()
        }
        return joined if len(joined) > 1 else next(iter(joined.values()))

    def train_batch(
        self,
        samples: Iterable[Mapping[str, Tensor]],
        augment: str,
        draws: Sequence[random.Random],
        policy: str,
    ) -> Batch:
        """Concatenates samples as for evaluation, since arrays of unknown meaning are not augmented."""
        return self.eval_batch(samples)

    def axes(self, sample: Mapping[str, Tensor]) -> dict[str, int | None]:
        """Returns the batch axis of each input; None for an input without one."""
        return {port.name: port.axis for port in self.ports} or {
            name: 0 if one.ndim else None for name, one in sample.items()
        }

    @property
    def batched(self) -> bool:
        """Returns whether the model accepts several samples at a time."""
        return not self.ports or any(port.axis is not None for port in self.ports)

    def inputs(self, samples: Sequence[Mapping[str, Tensor]]) -> ArrayInputs:
        """Returns the inputs of the model, built from `samples`."""
        made = self.eval_batch(samples)
        named = made if isinstance(made, dict) else {next(iter(samples[0])): made}
        return ArrayInputs(named, self.axes(samples[0]))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for model.json: a description of the inputs and of the states."""
        described = [
            {"name": p.name, "type": p.dtype, "shape": list(p.shape), "batch_axis": p.axis}
            for p in self.ports
        ]
        return {"arrays": described} | ({"states": dict(self.states)} if self.states else {})

    def content(self, sample: Mapping[str, Any]) -> bytes:
        """Returns bytes that identify a sample; states are left out, since they are computed."""
        about = repr(dict(self.states)).encode() if self.states else b""
        parts = (
            (name.encode(), np.asarray(one).tobytes())
            for name, one in sample.items()
            if name not in self.states
        )
        return b"".join(part for pair in parts for part in pair) + about

    def fitted(self, value: Any, port: Port, name: str) -> Tensor:
        """Returns `value` as a tensor of the type of the input `port`, or of float32 for any floating-point type.

        Raises:
            ConfigError: `value` is not an array, has another kind of values or another shape than the input, or has
                numbers that the input's type cannot represent.
        """
        given = self._tensor(value, f"{name}['{port.name}']")
        wanted = np.dtype(port.dtype)
        kind = np.dtype(str(given.dtype).removeprefix("torch.").replace("bfloat16", "float32")).kind
        if _KINDS.get(kind) != _KINDS.get(wanted.kind):
            has = _KINDS.get(kind, f"values of type {str(given.dtype).removeprefix('torch.')}")
            told = f"{name}['{port.name}'] has {has}, but the type of this input is {port.dtype}"
            raise ConfigError("data.source", self.source, reason=told)
        fits = len(given.shape) == len(port.shape) and all(
            size is None or size == has or i == port.axis
            for i, (size, has) in enumerate(zip(port.shape, given.shape, strict=True))
        )
        one = port.axis is None or (fits and given.shape[port.axis] == port.rows)
        if not fits or not one:
            sizes = (
                port.rows if i == port.axis else "any" if size is None else size
                for i, size in enumerate(port.shape)
            )
            told = f"{name}['{port.name}'] has the shape {list(given.shape)}, but one sample"
            told += f" of this input has [{', '.join(map(str, sizes))}]"
            raise ConfigError("data.source", self.source, reason=told)
        if wanted.kind == "f":
            return given.float()
        made = given.to(getattr(torch, "bool" if wanted.kind == "b" else port.dtype))
        if not torch.equal(made.to(given.dtype), given):
            told = f"{name}['{port.name}'] has numbers that {port.dtype} cannot represent"
            raise ConfigError("data.source", self.source, reason=told)
        return made

    def _tensor(self, value: Any, name: str) -> Tensor:
        try:
            found = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            told = f"{name} is {type(value).__name__}; expected an array of numbers"
            raise ConfigError("data.source", self.source, reason=told) from error
        return found.float() if found.is_floating_point() else found
