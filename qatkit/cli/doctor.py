"""The command `qatkit doctor`: lists what works on this machine, and what to install for the rest.

    qatkit doctor

Each line has a name, the finding and, if something is missing, the command or key that helps. An exit status
of 1 means that nothing can be quantized on this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from qatkit_verify.errors import counted
from qatkit_verify.hardware import installed_versions, this_hardware
from qatkit_verify.installed import in_checkout, install_extra

_NEEDED = ("torch", "torchvision", "onnx", "onnxruntime", "lightning", "hydra")
# The extras of the package, each with a module whose presence shows that it is installed.
_EXTRAS = {
    "timm": "timm",
    "transformers": "transformers",
    "lite": "efficientnet_lite_pytorch",
    "audio": "soundfile",
    "pictures": "matplotlib",
    "openvino": "openvino",
    "search": "optuna",
    "slurm": "hydra_plugins.hydra_submitit_launcher",
    "mlflow": "mlflow",
    "publish": "s3fs",
    "sign": "cryptography",
}
_VNNI = ("avx512_vnni", "avx_vnni", "asimddp")
_QUICKSTART = "uv run train.py" if in_checkout() else "qatkit train recipe=quickstart"
_REINSTALL = "uv sync" if in_checkout() else "install the wheel of qatkit with its dependencies"
_ROOM = 2e9  # bytes that the checkpoints and files of a typical run may need


@dataclass(frozen=True)
class Finding:
    """A line of the table.

    Attributes:
        name: the name of what was checked.
        found: the finding.
        advice: the command or key that helps; "" if none is needed.
        works: False if a run would fail.
    """

    name: str
    found: str
    advice: str = ""
    works: bool = True


def main() -> int:
    """Prints the table; returns 1 if something is missing that every run needs."""
    findings = [*_packages(), *_machine(), _disk(), *_extras()]
    width = max(len(one.name) for one in findings)
    for one in findings:
        advice = f"  -> {one.advice}" if one.advice else ""
        print(f"{'  ' if one.works else '! '}{one.name:{width}}  {one.found}{advice}")
    broken = [one.name for one in findings if not one.works]
    print(
        f"missing or broken: {', '.join(broken)}" if broken else f"ready: {_QUICKSTART} runs the quickstart"
    )
    return 1 if broken else 0


def _packages() -> Iterator[Finding]:
    versions = installed_versions()
    yield Finding("python", versions["python"])
    for name in _NEEDED:
        if not _is_installed(name):
            yield Finding(name, "missing", _REINSTALL, works=False)
        elif name in versions:
            yield Finding(name, versions[name])


def _machine() -> Iterator[Finding]:
    hardware = this_hardware(0)
    yield Finding("cpu", f"{hardware.cpu}, {counted(hardware.cores, 'core')}")
    fast = [flag for flag in hardware.isa if flag in _VNNI]
    if fast:
        yield Finding("int8 products", f"fast ({', '.join(fast)})")
    else:
        advice = "keep backend.reduce_range=auto, which is exact on every CPU"
        yield Finding(
            "int8 products",
            "no VNNI: slower than on other CPUs, and unrestricted 8-bit weights may saturate",
            advice,
        )
    yield Finding("threads", os.environ.get("OMP_NUM_THREADS") or counted(len(_cores()), "usable core"))
    yield _gpu()


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _gpu() -> Finding:
    if not _is_installed("torch"):
        return Finding("gpu", "unknown without torch")
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "none: recipes run on the CPU")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding("gpu", names, "trainer=gpu or trainer=gpu_bf16")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 1e9:.1f} GB free in {Path.cwd()}"
    if free < _ROOM:
        return Finding("disk", text, "set output_dir=FOLDER on a larger disk")
    return Finding("disk", text)


def _extras() -> Iterator[Finding]:
    for extra, module in _EXTRAS.items():
        found = _is_installed(module)
        yield Finding(
            f"extra {extra}",
            "installed" if found else "not installed",
            "" if found else install_extra(extra),
        )


def version() -> str:
    """Returns the version of the installed package, or a text that says that it is a checkout."""
    try:
        return metadata.version("qatkit")
    except metadata.PackageNotFoundError:
        return "a checkout that is not installed"


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
