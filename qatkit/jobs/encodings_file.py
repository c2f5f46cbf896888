"""Writes the scales and zero points of a quantized ONNX file as JSON (mode=encodings)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from qatkit.config.schema import Config
from qatkit.encryption.vault import protected
from qatkit.importing.encodings import encodings_of
from qatkit.records import aimet
from qatkit.records.encodings import Encoding, Encodings
from qatkit.run.lock import locked
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import write_text
from qatkit_verify.table import drawn

RECORD = "encodings.json"
_OURS, _AIMET = "qatkit", "aimet_"


def write_encodings(config: Config, folder: Path) -> int:
    """Writes encodings.json into the run's folder, and prints a summary. Returns 0.

    Raises:
        ConfigError: the file cannot be read, or has no encoding that the format supports.
    """
    assert config.onnx is not None
    source, wanted = Path(config.onnx), config.encodings.format
    with protected(config.export.encrypt), locked(folder):
        found = encodings_of(source)
        without: list[str] = []
        content = found.as_dict(source.name)
        if wanted != _OURS:
            version = wanted.removeprefix(_AIMET)
            content, without = aimet.as_dict(found, version), aimet.left_out(found, version)
            if len(without) == len(found.all) + len(found.formats):
                raise ConfigError(
                    "encodings.format", wanted, f"{_OURS} for {source.name}, which has no integer encodings"
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RECORD, json.dumps(content, indent=2, allow_nan=False) + "\n")
    for line in _table(found):
        print(line)
    if without:
        print(f"left out, since {wanted} cannot express them: {', '.join(without)}")
    for note in found.notes:
        print(note)
    print(folder / RECORD)
    return 0


def _table(found: Encodings) -> list[str]:
    """Returns a table with the number of tensors of each type."""
    rows = [("encodings of", "type", "scales", "tensors")]
    for title, group in (("activations", found.activations), ("parameters", found.parameters)):
        rows += [(title, *kind, f"{number}") for kind, number in _kinds(group)]
    formats = Counter(found.formats.values())
    rows += [("number formats", name, "-", f"{number}") for name, number in sorted(formats.items())]
    return drawn(rows)


def _kinds(group: dict[str, Encoding]) -> list[tuple[tuple[str, str], int]]:
    return sorted(Counter((one.dtype, one.granularity) for one in group.values()).items())
