"""Describes this machine and the packages installed on it, for reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from qatkit_verify.records import Hardware

_PACKAGES = ("qatkit", "torch", "torchvision", "lightning", "onnx", "onnxruntime", "numpy")
# The instruction sets that decide how fast (and how exact) 8-bit kernels are.
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect the figures."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # not installed: the code runs from a checkout, or an extra is missing
    return versions


def this_hardware(threads: int) -> Hardware:
    """Returns a description of this machine; `threads` is the number of threads of the measurements."""
    fields = _cpuinfo()
    flags = fields.get("flags", fields.get("Features", "")).split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    isa = tuple(flag for flag in _ISA if flag in flags)
    return Hardware(name, os.cpu_count() or 1, isa, threads, f"{platform.system()} {platform.machine()}")


def _cpuinfo() -> dict[str, str]:
    """Returns the first processor's entries of /proc/cpuinfo; empty if the file does not exist."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
