"""Runs a file step by step: some outputs of a step, its states, are inputs of the next one.

start ── step 0 ── state ── step 1 ── state ── ...
           └ outputs          └ outputs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.feeds import Array

if TYPE_CHECKING:
    import onnxruntime as ort

KEY = "model.kwargs.states"


@dataclass(frozen=True)
class StepSequence:
    """The inputs of a file from the first step to the last.

    Attributes:
        start: the states of the first step, by input name.
        steps: the other inputs of each step, by name, in order.
    """

    start: Mapping[str, Array]
    steps: Iterable[Mapping[str, Any]]


class FreeRun:
    """A file whose states, outputs of one step, become inputs of the next step.

    Args:
        session: a session of the file.
        states: the output that feeds each state input in the next step, by input name.
        fixed: the inputs that are the same in every step, by name.
        outputs: the names to use for the outputs, in the file's order; None: the file's own names.

    Attributes:
        states, fixed, outputs: as in Args; `outputs` are the file's own names by default.
        state: the state of the next step, by input name.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        states: Mapping[str, str],
        fixed: Mapping[str, Any] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> None:
        from qatkit_verify.session import run_outputs, session_file  # needs ONNX Runtime

        self._file = session_file(session)
        self._run = partial(run_outputs, session)
        self.states, self.fixed = states, fixed or {}
        self.outputs = tuple(outputs or (one.name for one in session.get_outputs()))
        self.state: dict[str, Array] = {}
        self._count = 0

    def begin(self, start: Mapping[str, Array]) -> None:
        """Begins a sequence with the given states."""
        self.state, self._count = dict(start), 0

    def step(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Runs one step and returns all outputs by name.

        Raises:
            ConfigError: the file does not run on these inputs, or a state changes its shape or is NaN or
                infinite.
        """
        given = {**self.fixed, **inputs, **self.state}
        try:
            made = self._run(given)
        except ConfigError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            shapes = ", ".join(f"{name} {list(np.shape(one))}" for name, one in given.items())
            reason = f"ONNX Runtime failed on a step with {shapes} ({one_line(error)})"
            raise ConfigError("onnx file", self._file, reason=reason) from error
        found = dict(zip(self.outputs, made, strict=True))
        for name, output in self.states.items():
            before, after = self.state[name], found[output]
            if before.shape != after.shape:
                told = f"'{name}' has shape {list(before.shape)}, and '{output}' {list(after.shape)}"
                raise ConfigError(KEY, f"{name}: {output}", reason=f"{told}; a state must keep its shape")
            if not np.isfinite(after).all():
                told = f"its state '{output}' is NaN or infinite after step {self._count}"
                raise ConfigError("onnx file", self._file, reason=told)
            self.state[name] = after
        self._count += 1
        return found
