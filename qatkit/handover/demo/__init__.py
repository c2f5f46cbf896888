"""The page demo.html of a bundle: it runs the INT8 file on a picture, offline, from a folder or a static server.

A page that is opened from a folder may load scripts next to it, but must not fetch other files. The model,
the golden vectors and ONNX Runtime's WebAssembly are therefore stored as scripts in demo/, gzipped and in
base64. The code for preprocessing and comparison is `qatkit_verify`'s JavaScript, copied into the page. The
page uses one thread, since several threads require HTTP headers that a folder cannot send.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from qatkit.handover.demo.runtime import WebRuntime
from qatkit.handover.javascript import modules
from qatkit_verify.bundle.manifest import (
    FLOAT_FILE,
    GOLDEN_FILE,
    INT8_FILE,
    LABELS_FILE,
    PREPROCESS_FILE,
    REPORT_FILE,
)
from qatkit_verify.files import write_text

PAGE_FILE, ASSETS = "demo.html", "demo"
_PROGRAM = ("archive.mjs", "preprocess.mjs", "sound.mjs", "golden.mjs", "boxes.mjs")
_OWN = ("exif.mjs", "views.mjs", "page.mjs")
_IMPORT = re.compile(r"^import .*\n", re.MULTILINE)


def write_demo(bundle: Path, runtime: WebRuntime, name: str, options: Mapping[str, str]) -> None:
    """Writes the page into a bundle that already contains its other files.

    Args:
        bundle: the folder of the bundle; model.onnx, preprocess.json, golden.npz, report.json and, if they
            exist, labels.txt and float.onnx are read.
        runtime: the npm package whose WebAssembly is used.
        name: the name of the model for the page's title.
        options: the config entries of ONNX Runtime with which the figures were measured.
    """
    assets = bundle / ASSETS
    assets.mkdir(exist_ok=True)
    parts = {"int8": {"int8": bundle / INT8_FILE}, "golden": {"golden": bundle / GOLDEN_FILE}}
    parts["wasm"] = {"wasm": runtime.wasm, "glue": runtime.glue}
    if (bundle / FLOAT_FILE).is_file():
        parts["float"] = {"float": bundle / FLOAT_FILE}
    for script, files in parts.items():
        write_text(assets / f"{script}.js", "".join(_part(part, path) for part, path in files.items()))
    write_text(assets / "onnxruntime.js", runtime.script.read_text(encoding="utf-8"))
    write_text(bundle / PAGE_FILE, _page(bundle, runtime, name, options))


def _part(name: str, path: Path) -> str:
    """Returns a script that contains a file; the same file gives the same script."""
    packed = base64.b64encode(gzip.compress(path.read_bytes(), 9, mtime=0)).decode()
    return f'demoParts["{name}"] = "{packed}";\n'


def _page(bundle: Path, runtime: WebRuntime, name: str, options: Mapping[str, str]) -> str:
    here = resources.files(__name__)
    filled = {
        "title": escape(name),
        "style": (here / "page.css").read_text(encoding="utf-8").rstrip(),
        "about": escape(
            f"INT8 file made by qatkit; ONNX Runtime Web {runtime.version}, WebAssembly, one thread."
        ),
        "facts": json.dumps(_facts(bundle, options)).replace("<", "\\u003c"),
        "program": _program(),
    }
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(filled)


def _facts(bundle: Path, options: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the task, preprocessing, labels and file sizes of the model, and its session options."""
    labels = bundle / LABELS_FILE
    report = json.loads((bundle / REPORT_FILE).read_text(encoding="utf-8"))
    return {
        "task": report["task"]["name"],
        "preprocess": json.loads((bundle / PREPROCESS_FILE).read_text(encoding="utf-8")),
        "session_options": dict(options),
        "labels": labels.read_text(encoding="utf-8").splitlines() if labels.is_file() else [],
    } | {
        way: {"bytes": path.stat().st_size}
        for way, path in (("int8", bundle / INT8_FILE), ("float", bundle / FLOAT_FILE))
        if path.is_file()
    }


def _program() -> str:
    """Returns the page's modules joined into one, since a page from a folder cannot import files."""
    shared = modules()
    own = [(resources.files(__name__) / name).read_text(encoding="utf-8") for name in _OWN]
    return "\n".join(_IMPORT.sub("", one) for one in [*(shared[name] for name in _PROGRAM), *own]).rstrip()
