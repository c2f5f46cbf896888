"""Checks a language model's decoder, token by token, against its file for complete windows."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.records.decoder_files import DECODER_FILE, DECODER_FOLDER
from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit_verify.errors import counted

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig

_WINDOWS, _STEPS, _GENERATED = 4, 16, 32
_PERPLEXITY = 1e-3  # maximum allowed relative difference between two files of the same weights


class DecoderCheck(Check):
    """Perplexity with and without cached keys and values, equal tokens in greedy decoding, and tokens per second."""

    name = "decoder"

    def measure(self, subject: Subject, results: Results) -> Results:
        path = subject.folder / DECODER_FOLDER / DECODER_FILE
        if not path.is_file():
            return results
        import numpy as np

        from qatkit.export.accuracy_level import FLOAT, at_level, level_of
        from qatkit.verify.decoding import OnnxDecoder, decoding, levels
        from qatkit_verify.session import open_session, run_outputs

        threads, options = subject.settings.threads, subject.options
        whole = open_session(subject.files["int8"], threads=threads, options=options)
        rows = (
            np.asarray(row, np.int64)[None]
            for batch in subject.first_images(_WINDOWS)
            for row in (next(iter(batch.values())) if isinstance(batch, dict) else batch)
        )
        windows, level = list(islice(rows, _WINDOWS)), level_of(path)
        with tempfile.TemporaryDirectory() as folder:
            exact = path
            if level != FLOAT:
                at_level(path, exact := Path(folder, DECODER_FILE), FLOAT)
            decoder = OnnxDecoder(exact, threads, options)
            found = decoding(
                decoder, lambda tokens: run_outputs(whole, tokens)[0], windows, _STEPS, _GENERATED
            )
            figures = asdict(found) | {"bytes": path.stat().st_size, "threads": threads, "level": level}
            if level != FLOAT:
                at = levels(decoder, OnnxDecoder(path, threads, options), windows)
                figures |= {"levels": asdict(at), "tokens_per_second": at.ratio * found.tokens_per_second}
        return results.with_measured(self.name, figures)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        found = results.measured.get(self.name)
        if found is None:
            return []
        from qatkit.verify.decoding import RISE

        wrong, least = [], bounds.min_agreement
        if abs(found["perplexity"] / found["whole"] - 1) > _PERPLEXITY:
            wrong.append(
                f"perplexity {found['perplexity']:.3f} ({found['whole']:.3f} without keys and values)"
            )
        if least is not None and found["agreement"] < least:
            wrong.append(
                f"the same next token for {100 * found['agreement']:.2f} % of {found['tokens']:,} tokens"
            )
        # Only steps of one token read the cached keys and values.
        single = {"one by one": found["steps"], "in a greedy text": found["greedy"]}
        wrong += [
            f"{min(counts)} of {max(counts)} tokens right {how}"
            for how, counts in single.items()
            if least is not None and min(counts) < least * max(counts)
        ]
        bound = "export.decoder=true" if least is None else f"verify.min_agreement={least}"
        short = [Shortfall(f"{bound}: the decoder has {'; '.join(wrong)}")] if wrong else []
        at = found.get("levels")
        if at is not None and at["perplexity"][1] > (1 + RISE) * at["perplexity"][0]:
            before, now = at["perplexity"]
            line = f"export.accuracy_level={found['level']}: perplexity is {now:.3f}, and {before:.3f} at level 0"
            short.append(Shortfall(line, [Fix(("export.accuracy_level=0",), "activations in float")]))
        return short

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(self.name)
        if found is None:
            return []
        return [_line(found)]


def _line(found: dict[str, Any]) -> str:
    steps, same = found["steps"]
    generated, equal = found["greedy"]
    return (
        f"decoder ({DECODER_FOLDER}/{DECODER_FILE}, {found['bytes'] / 1e6:.2f} MB): perplexity"
        f" {found['perplexity']:.3f} on {counted(found['windows'], 'window')} ({found['whole']:.3f} without keys and"
        f" values), same next token {100 * found['agreement']:.2f} %; tokens right one by one: {same} of {steps}, in a"
        f" greedy text: {equal} of {generated}; {found['tokens_per_second']:.1f} tokens/s,"
        f" {counted(found['threads'], 'thread')}{_level_text(found)}"
    )


def _level_text(found: dict[str, Any]) -> str:
    """Returns the cost of the accuracy level; "" at level 0, at which the other figures were measured."""
    at = found.get("levels")
    if at is None:
        return ""
    before, now = at["perplexity"]
    return (
        f"; measured at accuracy level 0 except the speed; at the file's level {found['level']}: perplexity {now:.3f}"
        f" instead of {before:.3f}, same next token {100 * at['agreement']:.2f} %, {at['ratio']:.2f} times as fast"
    )
