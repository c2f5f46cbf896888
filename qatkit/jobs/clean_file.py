"""Cleans a given ONNX file, as a separate job (mode=clean) or before another mode."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.config.schema import CleanConfig, Config
from qatkit.config.schema.files import CLEAN
from qatkit.encryption.vault import protected, readable, secret
from qatkit.importing.read import read
from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit.records.run_files import file_name
from qatkit.run.lock import locked
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import whole, write_text
from qatkit_verify.table import drawn

if TYPE_CHECKING:
    from qatkit.export.clean.proof import Proof
    from qatkit.export.clean.run import Cleaned

RECORD = "clean.json"


def clean_file(config: Config, folder: Path) -> int:
    """Writes the cleaned file and clean.json into the run's folder, and prints the changes. Returns 0.

    Raises:
        ConfigError: a setting does not fit the file, or the cleaned file computes other results; nothing is
            written.
    """
    from qatkit.report.next_steps import after_cleaning, lines  # imported late, since it imports rich

    with protected(config.export.encrypt), locked(folder):
        for line in (*_written(config, folder, "all"), *lines(after_cleaning(folder / file_name(CLEAN)))):
            print(line, flush=True)
    return 0


def cleaned_before(config: Config, folder: Path) -> Config:
    """Returns the configuration with the cleaned file as its ONNX file; unchanged if no change is requested.

    The cleaned file is in the run's folder. A restarted run uses the existing one if file and settings are the
    same.
    """
    if config.clean == CleanConfig():
        return config
    assert config.onnx is not None
    path = folder / file_name(CLEAN)
    layout = config.data.layout
    if layout is None and not config.clean.layout:
        layout = (preprocessing_beside(Path(config.onnx)) or {}).get("layout")
    with protected(config.export.encrypt), locked(folder):
        use_libraries(config.clean)
        if not (path.is_file() and _told(folder) == _settings(config)):
            folded = "exact" if config.clean.fix_shapes else "none"  # fixed sizes become constants
            for line in _written(config, folder, folded):
                print(line, flush=True)
    data = replace(config.data, layout=None if layout is None else str(layout).lower())
    return replace(config, onnx=str(path), clean=CleanConfig(), data=data)


def _settings(config: Config) -> dict[str, Any]:
    """Returns the settings that decide the content of the cleaned file, in the form of its record."""
    assert config.onnx is not None
    source = Path(config.onnx)
    stamp = source.stat().st_mtime_ns if source.is_file() else 0
    return {"file": str(source), "changed": stamp, "clean": asdict(config.clean)}


def _told(folder: Path) -> dict[str, Any]:
    """Returns the recorded settings of the cleaned file in a folder; {} if there is none."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(found)


def use_libraries(asked: CleanConfig) -> None:
    """Registers libraries of custom operators, before any long work."""
    if asked.custom_ops:
        from qatkit_verify.session import use_library

        for number, library in enumerate(asked.custom_ops):
            try:
                use_library(library)
            except ConfigError as error:
                raise ConfigError(f"clean.custom_ops[{number}]", library, reason=error.problem) from error


def _written(config: Config, folder: Path, folded: str) -> list[str]:
    """Writes the cleaned file of a configuration into a folder.

    Args:
        config: the configuration that names the file.
        folder: the folder for the cleaned file.
        folded: the value of `clean.fold` if it is null in the configuration.

    Returns:
        The changes as lines of text.
    """
    assert config.onnx is not None
    source, asked = Path(config.onnx), config.clean
    use_libraries(asked)
    with (
        tempfile.TemporaryDirectory() as made,
        readable(source) if source.is_file() else _missing(source) as plain,
    ):
        target = Path(made) / file_name(CLEAN)
        model = read(source, as_is=True)
        from qatkit.export.clean.run import Asked, clean

        services = Asked(asked.fix_shapes or {}, asked.fold or folded, asked.float32, asked.layout or {}, asked.opset,
                         asked.unshare, asked.names, asked.inputs, asked.rewrite, asked.approximate,
                         asked.drop_pairs)  # fmt: skip
        try:
            found = clean(plain, model, services, target, config.verify.threads)
        except ConfigError as error:
            if error.key != "onnx file":
                raise
            raise ConfigError("onnx", source, reason=error.problem) from error
        _hand_over(found, folder, config.export.encrypt)
    write_text(folder / RECORD, json.dumps(_record(config, found), indent=2) + "\n")
    return _table(source, folder / file_name(CLEAN), found)


def _missing(source: Path) -> Any:
    raise ConfigError("onnx", source, "an ONNX file that exists")


def _hand_over(found: Cleaned, folder: Path, key: str | None) -> None:
    """Copies the files into the run's folder: first the weights, then the model that refers to them."""
    if key is not None and len(found.files) > 1:
        raise ConfigError("export.encrypt", key, "null with a file that has external data")
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(found.files):
        with secret(folder / path.name) if key is not None else whole(folder / path.name) as temporary:
            shutil.copyfile(path, temporary)


def _record(config: Config, found: Cleaned) -> dict[str, Any]:
    proof = found.proof
    return {
        "settings": _settings(config),
        "changed": [{"service": service, "what": what} for service, what in found.rows],
        "nodes": dict(zip(("before", "after"), found.nodes, strict=True)),
        "bytes": dict(zip(("before", "after"), found.bytes, strict=True)),
        "proof": {
            "outputs_db": _decibels(proof),
            "bound_db": None if proof.bound == float("inf") else proof.bound,
            "inputs": proof.inputs,
            "drawn": proof.drawn,
        },
        "approximation_db": None if found.error is None else _decibels(found.error),
    }


def _decibels(proof: Proof) -> dict[str, float | None]:
    """Returns the signal-to-noise ratio of each output in dB; None for an output without any deviation."""
    return {name: None if ratio == float("inf") else ratio for name, ratio in proof.outputs.items()}


def _table(source: Path, path: Path, found: Cleaned) -> list[str]:
    """Returns the record as readable lines of text."""
    rows, last = [("clean", "what was changed")], ""
    for service, what in found.rows:
        rows.append((service if service != last else "", what))
        last = service
    rows += [("proof", line) for line in found.proof.lines()]
    before, after = (count / 1e6 for count in found.bytes)
    return [
        f"{source.name}: {found.nodes[0]} nodes, {before:.2f} MB",
        *drawn(rows),
        f"{path}  {found.nodes[1]} nodes, {after:.2f} MB",
    ]
