"""Writes ONNX Runtime's dynamic int8 version of a run's float file, for comparison (`verify.dynamic`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from qatkit.config.schema import Config
from qatkit.export import ort_modes
from qatkit.records.results import DYNAMIC
from qatkit.records.run_files import file_name
from qatkit.verify.checks.base import Subject
from qatkit_verify.errors import disk_error, one_line
from qatkit_verify.session import open_session, run_images


def with_dynamic(subject: Subject, config: Config) -> tuple[Subject, tuple[str, ...]]:
    """Returns the subject, with a dynamic file among its files if requested, and notes for the report.

    The file is written next to the float file. None is written if the run's own file is dynamic, or if ONNX
    Runtime cannot quantize the model, which a note then says.
    """
    if not config.verify.dynamic or (config.mode or config.export.mode) == DYNAMIC:
        return subject, ()
    source = subject.files["float"]
    target = source.with_name(file_name(DYNAMIC))
    try:
        left = ort_modes.dynamic(source, target, reduce_range=config.backend.reduce_range)
        given = subject.file_shape or subject.timed(config.verify.latency_batch)
        session = open_session(target, threads=config.verify.threads, options=subject.options)
        run_images(session, given if isinstance(given, Mapping) else np.zeros(given, np.float32))
    except Exception as error:  # any exception of the tool must not prevent the run's report
        if disk_error(error) is not None:
            raise
        return subject, (
            (
                "verify.dynamic: there is no dynamic file, since ONNX Runtime cannot "
                f"quantize this model ({one_line(error)})"
            ),
        )
    return replace(subject, files={**subject.files, DYNAMIC: target}), tuple(left.notes)
