"""Opens ONNX Runtime sessions with explicit settings: threads, optimization level and config entries.

A session opened here prints nothing, runs on the CPU, and fails with one line that names the file. Its config
entries are those of `SESSION_OPTIONS` and the backend's, whatever the version's own defaults are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array, feeds
from qatkit_verify.files import no_room
from qatkit_verify.integer_ends import IntegerIO
from qatkit_verify.runtimes.base import Execute

FloatArray = NDArray[np.float32]
RUNTIME_VERSION: str = ort.__version__

# ONNX Runtime turns a product with dequantized weights into MatMulNBits, whose default level, 4, quantizes
# the activations to 8 bits; from 1.32 on also where the file gives them 16 bits (docs/onnxruntime-qdq.md).
# Level 0 computes in float. Graphs without such a product do not read the entry.
ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"
SESSION_OPTIONS: Mapping[str, str] = MappingProxyType({ACCURACY_LEVEL: "0"})
# ONNX Runtime's defaults, as in a session that was opened without `SESSION_OPTIONS`.
UNSET_OPTIONS: Mapping[str, str] = MappingProxyType({ACCURACY_LEVEL: "4"})


def session_options(options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the config entries of a session: `SESSION_OPTIONS`, updated with a backend's `options`.

    Figures are valid only with these entries, so reports, bundles and the code on report pages state them.
    """
    return {**SESSION_OPTIONS, **(options or {})}


_LOADING = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : Load model from .*? failed:")
_DEFAULTS = {"arena": True}
_LIBRARIES: dict[str, None] = {}  # libraries of custom operators, in the order of `use_library` calls
_BESIDE = "session.optimized_model_external_initializers_file_name"


def open_session(
    path: str | Path,
    *,
    threads: int,
    optimize: bool | ort.GraphOptimizationLevel = True,
    options: Mapping[str, str] | None = None,
    optimized_path: str | Path | None = None,
    profile_prefix: str | Path | None = None,
    arena: bool | None = None,
    without: Collection[str] = (),
) -> ort.InferenceSession:
    """Opens `path` on the CPU.

    Args:
        path: an ONNX file.
        threads: the number of intra-op threads, at least 1.
        optimize: True for ORT_ENABLE_ALL, False for ORT_DISABLE_ALL, or a level.
        options: the backend's config entries ("session.qdqisint8allowed": "1"), which override `SESSION_OPTIONS`.
        optimized_path: the path to which ONNX Runtime writes the graph that it really runs. Large weights are
            written next to it; otherwise the graph would refer to those next to `path`.
        profile_prefix: the prefix of the file of a profile, PREFIX_<time>.json; None: no profiling.
        arena: whether the session keeps the memory of a run, and more than the run needed, for the next one.
            This is ONNX Runtime's default, and files are timed with it. None: as set by
            `keep_memory_of_runs`.
        without: names of ONNX Runtime's optimizers to disable; unknown names have no effect.

    Raises:
        ConfigError: the file is missing, `threads` is below 1, or ONNX Runtime cannot load the file; its complete
            message is included.
        OSError: the disk is too full for `optimized_path`.
    """
    if not Path(path).is_file():
        raise ConfigError("onnx file", path, reason="the file does not exist")
    if threads < 1:
        raise ConfigError("verify.threads", threads, "at least 1 thread")
    settings = ort.SessionOptions()
    settings.log_severity_level = 4  # logs nothing: errors are raised anyway, and the rest are warnings
    settings.intra_op_num_threads = threads
    settings.graph_optimization_level = _level(optimize)
    settings.enable_cpu_mem_arena = settings.enable_mem_pattern = (
        _DEFAULTS["arena"] if arena is None else arena
    )
    if optimized_path is not None:
        settings.optimized_model_filepath = str(optimized_path)
        settings.add_session_config_entry(_BESIDE, f"{Path(optimized_path).name}.data")
    if profile_prefix is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(profile_prefix)
    add_libraries(settings)
    try:
        for key, value in session_options(options).items():
            settings.add_session_config_entry(key, value)
        left_out = {"disabled_optimizers": list(without)} if without else {}
        return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"], **left_out)
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        full = None if optimized_path is None else no_room(Path(optimized_path))
        if full is not None:  # the optimized graph could not be written
            raise full from error
        reason = f"ONNX Runtime {ort.__version__} can't load the file ({refusal(error)})"
        raise ConfigError("onnx file", path, reason=reason) from error


def keep_memory_of_runs(kept: bool) -> None:
    """Sets `arena` for the sessions that `open_session` opens from now on without this argument.

    False suits large inputs, since memory that is kept between runs would grow with them.
    """
    _DEFAULTS["arena"] = kept


def use_library(path: str | Path) -> None:
    """Adds the custom operators of a library to every session that this process opens from now on.

    They have no effect on files that do not use them.

    Raises:
        ConfigError: the library is missing, or ONNX Runtime cannot load it.
    """
    library = Path(os.path.expanduser(path)).resolve()
    if not library.is_file():
        raise ConfigError("custom_ops", path, "an existing library of custom operators")
    try:
        ort.SessionOptions().register_custom_ops_library(str(library))
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        reason = f"ONNX Runtime {ort.__version__} can't load the library ({refusal(error)})"
        raise ConfigError("custom_ops", path, reason=reason) from error
    _LIBRARIES[str(library)] = None


def add_libraries(settings: ort.SessionOptions) -> None:
    """Registers the libraries of `use_library` in the options of a session that other code opens."""
    for library in _LIBRARIES:
        settings.register_custom_ops_library(library)


def refusal(error: Exception) -> str:
    """Returns ONNX Runtime's message about a file that it cannot load, on one line and without the path."""
    return " ".join(_LOADING.sub("", str(error), count=1).split()) or type(error).__name__


def _level(optimize: bool | ort.GraphOptimizationLevel) -> ort.GraphOptimizationLevel:
    levels = ort.GraphOptimizationLevel
    if isinstance(optimize, bool):
        return levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    return optimize


def session_file(session: ort.InferenceSession) -> str:
    """Returns the name of a session's file, for messages; "model" if it is unknown."""
    path = getattr(session, "_model_path", None)  # ONNX Runtime has no public way from a session to its file
    return Path(path).name if path else "model"


def fixed_batch(session: ort.InferenceSession) -> int | None:
    """Returns the batch size that the file was exported for; None if it is dynamic, or if no input has an axis."""
    shapes = [one.shape for one in session.get_inputs() if one.shape]
    if not shapes or any(not isinstance(shape[0], int) for shape in shapes):
        return None
    return int(shapes[0][0])


def integer_io(session: ort.InferenceSession) -> IntegerIO | None:
    """Returns the meaning of the file's integer inputs and outputs; None if they are float."""
    return IntegerIO.from_metadata(session.get_modelmeta().custom_metadata_map)


def run_images(session: ort.InferenceSession, images: Any) -> FloatArray:
    """Returns the first output of `run_outputs`, [N, ...], as float."""
    return np.asarray(run_outputs(session, images)[0], np.float32)


def run_outputs(session: ort.InferenceSession, batch: Any) -> tuple[Array, ...]:
    """Returns all outputs for a batch (`qatkit_verify.feeds`) of images or the file's other inputs."""
    return outputs_by(lambda given: session.run(None, given), session, batch)


def outputs_by(execute: Execute, session: ort.InferenceSession, batch: Any) -> tuple[Array, ...]:
    """Returns all outputs for a batch; `execute` runs the file, and `session` is a session of the same file.

    A fixed-batch file gets full batches: the last one is padded with zeros, and the outputs of its padding
    are dropped. A file with integer inputs and outputs gets the pixels of the images, and its outputs
    are converted to float.
    """
    ends = integer_io(session)
    given, fixed = feeds(session, batch, ends), fixed_batch(session)
    found = in_its_batches(execute, given, fixed)
    return found if ends is None else tuple(map(ends.floats, found))


def in_its_batches(run: Execute, given: Mapping[str, Array], size: int | None) -> tuple[Array, ...]:
    """Returns the outputs of `run` for `given`, `size` rows at a time if all inputs have equally many rows.

    If `size` is None, or the inputs differ in length (a state [2, 1, 128] and a frame [1, 512]), they are run as
    a single batch.
    """
    lengths = {len(one) if one.ndim else 0 for one in given.values()}
    if size is None or (len(given) > 1 and (len(lengths) > 1 or lengths <= {0, size})):
        return tuple(map(np.asarray, run(given)))
    return in_full_batches(run, given, size)


def in_full_batches(run: Execute, given: Mapping[str, Array], size: int) -> tuple[Array, ...]:
    """Returns the outputs of `run` for `given`, `size` rows at a time; the last batch is padded with zeros.

    An output without one row per image (a list of boxes, a number) is not cut. The outputs of all runs are
    concatenated.
    """
    rows = len(next(iter(given.values())))
    chunks = []
    for start in range(0, rows, size):
        count = min(size, rows - start)
        padded = {
            name: np.pad(values[start : start + size], [(0, size - count)] + [(0, 0)] * (values.ndim - 1))
            for name, values in given.items()
        }
        made = [np.atleast_1d(one) for one in run(padded)]
        chunks.append([one[:count] if len(one) == size else one for one in made])
    return tuple(np.concatenate(parts) for parts in zip(*chunks, strict=True))
