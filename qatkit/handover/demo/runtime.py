"""Finds the npm package onnxruntime-web, which a demo page includes, on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from qatkit_verify.errors import ConfigError

PACKAGE = "onnxruntime-web"
_SCRIPT, _GLUE, _WASM = "ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"
_ALLOWED = (
    f"the dist folder of npm's {PACKAGE}; run npm install --ignore-scripts {PACKAGE} here, or in another folder and set"
    f" export.demo_runtime=THAT_FOLDER/node_modules/{PACKAGE}/dist"
)


@dataclass(frozen=True)
class WebRuntime:
    """The three files of the package onnxruntime-web that a page needs, and its version.

    Attributes:
        script: the API as a plain script.
        glue: the module that starts the WebAssembly.
        wasm: the WebAssembly, for CPUs with SIMD.
        version: the version of the package; "unknown" without a package.json in the folder above.
    """

    script: Path
    glue: Path
    wasm: Path
    version: str


def find_runtime(typed: str | None) -> WebRuntime:
    """Returns the package in the folder `typed`, or without it the package of the nearest node_modules.

    The search for node_modules begins in the working directory and continues in its parents.

    Args:
        typed: `export.demo_runtime`: the folder of the package, or its dist folder; None to search.

    Raises:
        ConfigError: the package is missing or incomplete; the message says how to install it.
    """
    folder = Path(typed) if typed else _nearest(Path.cwd())
    if folder is None:
        raise ConfigError("export.demo_runtime", None, _ALLOWED)
    if (folder / "dist").is_dir():
        folder = folder / "dist"
    files = [folder / name for name in (_SCRIPT, _GLUE, _WASM)]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError("export.demo_runtime", typed, f"{_ALLOWED} ({folder} lacks {', '.join(missing)})")
    return WebRuntime(files[0], files[1], files[2], _version(folder.parent / "package.json"))


def _nearest(start: Path) -> Path | None:
    """Returns the package's dist folder in the nearest node_modules of `start` and its parents, or None."""
    ways = (above / "node_modules" / PACKAGE / "dist" for above in (start, *start.parents))
    return next((way for way in ways if way.is_dir()), None)


def _version(package: Path) -> str:
    try:
        return str(json.loads(package.read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
