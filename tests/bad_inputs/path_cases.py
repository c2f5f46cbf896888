"""Bad paths for every setting that takes a path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import forked
from cases import TINY, Case

_FILES = ("model.checkpoint", "resume", "checkpoint", "onnx", "placement", "export.encrypt")
_FOLDERS = ("data.root", "precision.front", "hf")
# Paths that are neither a readable file nor a suitable folder, by kind.
_NEITHER = {
    "missing": "{files}/nothing/here",
    "null device": "/dev/null",
    "zeros": "/dev/zero",
    "random": "/dev/urandom",
    "process": "/proc/self/mem",
    "pipe": "{files}/pipe",
    "socket": "{files}/socket",
    "loop": "{files}/loop",
    "dangling": "{files}/dangling",
    "long": "{files}/" + "n" * 300,
    "deep": "{files}/" + "d/" * 3000,
    "empty": "",
    "dot": ".",
    "home": "~/nothing",
    "inside a file": "{files}/text/more",
    "newline": "{files}/a\nb",
    "bytes": "{files}/\udcff",
    "url": "https://localhost/model",
    "glob": "{files}/*",
    "root": "/boot/nothing",
}
_UNWRITABLE = (
    "/dev/null", "/dev/zero", "/dev/full", "{files}", "{files}/pipe", "{files}/loop", "{files}/text/x",
    "{files}/socket", "/proc/x", "/proc/self/x", "/sys/x", "{files}/" + "n" * 300, "", "~/x/\udcff",
)  # fmt: skip


def make_files(folder: Path) -> None:
    """Creates the files that the bad paths name."""
    import socket

    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "text").write_text("text\n")
    (folder / "locked").mkdir(mode=0)
    server = socket.socket(socket.AF_UNIX)
    os.chdir(folder)
    server.bind("socket")


def _quoted(path: str) -> str:
    return "'" + path + "'"


def typed(key: str, path: str) -> Case:
    value = _quoted(path)
    shown = ascii(" ".join(path.split()))[1:-1][:40].replace("~", os.path.expanduser("~"))
    if key == "data.root":
        return Case((*TINY, "data=pictures", "data.image_size=8", f"data.root={value}"), f"data.root={shown}")
    if key == "precision.front":
        return Case((*TINY, f"precision.front={value}", "precision.point=1"), f"precision.front={shown}")
    if key == "export.publish":
        return Case((*TINY, "export.bundle=true", f"{key}={value}"), f"{key}={shown}")
    if key == "hf":
        return Case((*TINY, f"model.name='hf/{path}'"), "model.name=hf/")
    if key == "checkpoint":
        return Case((f"checkpoint={value}",), f"checkpoint={shown}", "export.py")
    if key == "onnx":
        shown = shown.replace("://", ":/")
        return Case((f"onnx={value}", "mode=dynamic"), f"onnx={shown}", "export.py")
    return Case((*TINY, f"{key}={value}"), f"{key}={shown}")


def _cases() -> Iterator[Case]:
    for kind, path in _NEITHER.items():
        for key in (*_FILES, *_FOLDERS):
            if (key, kind) not in (("data.root", "."),):
                yield typed(key, path)
    for key in _FILES:
        yield typed(key, "{files}")
        yield typed(key, "/proc/self/maps")
        yield typed(key, "/proc/version")
    for key in _FOLDERS:
        yield typed(key, "{files}/text")
    # Outputs are never written through anything that is not a plain file.
    for path in _UNWRITABLE:
        yield typed("calibration.cache", path)
        if path != "{files}":
            yield typed("output_dir", path)
            yield typed("export.publish", path)


CASES = list(_cases())


def run(case: Case, files: Path, folder: Path) -> forked.Outcome:
    """Runs the case with "{files}" replaced by the folder of bad files."""
    line = [one.replace("{files}", str(files)) for one in case.typed]
    return forked.outcome(case.script, line, folder)
