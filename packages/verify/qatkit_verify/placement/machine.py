"""Describes this machine for placements."""

from __future__ import annotations

from qatkit_verify.hardware import installed_versions, this_hardware
from qatkit_verify.placement.record import Machine


def this_machine(threads: int, batch: int) -> Machine:
    """Returns the machine, ONNX Runtime's version, and the settings of the measurement."""
    here = this_hardware(threads)
    return Machine(here.cpu, here.isa, installed_versions().get("onnxruntime", "unknown"), threads, batch)
