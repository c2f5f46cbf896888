"""Prints the operators of any ONNX file (mode=summary): counts, types, bytes, and int8 kernels on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.config.schema import Config
from qatkit.encryption.vault import protected, readable
from qatkit.importing.read import read
from qatkit.jobs.clean_file import use_libraries
from qatkit.run.lock import locked
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import write_text
from qatkit_verify.table import drawn

if TYPE_CHECKING:
    from qatkit.records.results import Audit

RECORD = "summary.json"


def summarize_file(config: Config, folder: Path) -> int:
    """Prints the table, and writes it as summary.json into the run's folder. Returns 0.

    Raises:
        ConfigError: the file cannot be read.
    """
    assert config.onnx is not None
    source = Path(config.onnx)
    use_libraries(config.clean)
    with protected(config.export.encrypt), locked(folder), tempfile.TemporaryDirectory() as made:
        model = read(source, as_is=True)
        from qatkit.export.clean.store import store
        from qatkit.report.next_steps import after_summary, lines
        from qatkit.verify.file_summary import name_nodes, summarize, table
        from qatkit.verify.graph_view import with_initializers

        model = with_initializers(model)
        name_nodes(model)
        named = Path(made) / "model.onnx"
        store(model, named)
        audit, note = _audited(config, named, model)
        with readable(source) as plain:
            found = summarize(model, plain, audit, note)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RECORD, json.dumps({"file": str(source), **found.as_dict()}, indent=2) + "\n")
    print(f"{source.name}: {found.file_bytes / 1e6:.2f} MB")
    for line in drawn(table(found)):
        print(line)
    for one in (note, str(folder / RECORD)):
        if one:
            print(one)
    for line in lines(after_summary(source, quantized=any(row.quantized for row in found.rows))):
        print(line)
    return 0


def _audited(config: Config, path: Path, model: Any) -> tuple[Audit | None, str]:
    """Returns the file's audit and ""; or None and the reason why there is none."""
    from qatkit.verify.audit import audit

    try:
        return audit(path, threads=config.verify.threads, input_shape=_inputs(config, path, model)), ""
    except ConfigError as error:
        return (
            None,
            f"the file does not run here, so the table only shows what the file contains ({error.problem})",
        )


def _inputs(config: Config, path: Path, model: Any) -> Any:
    """Returns example inputs for the file."""
    from qatkit.export.clean.drawn import drawn as drawn_inputs
    from qatkit.export.clean.drawn import given, ports
    from qatkit_verify.session import open_session

    wanted = ports(model, path)
    if config.clean.inputs is not None:
        return given(Path(config.clean.inputs), wanted)
    return drawn_inputs(open_session(path, threads=config.verify.threads), wanted)[0]
