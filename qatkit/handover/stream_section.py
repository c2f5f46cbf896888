"""The model card's section on the file that reads recordings in chunks: inputs, outputs, chunk lengths, an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qatkit_verify.bundle.manifest import GOLDEN_FILE, INT8_FILE
from qatkit_verify.session import open_session
from qatkit_verify.stream import Stream, stream_file, stream_of

_EXAMPLE = """\
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("{file}", providers=["CPUExecutionProvider"])
features = np.load("{golden}")["{key}"][:{rows}]
state = {{{zeros}}}
for chunk in np.split(features, features.shape[{axis}], axis={axis}):
    {output}, *following = session.run([{outputs}], {{"{input}": chunk, **state}})
    state = dict(zip(state, following))
"""


def stream_section(bundle: Path, told: Mapping[str, Any]) -> str:
    """Returns Markdown on the file of a bundle that reads recordings in chunks; "" if there is none.

    Args:
        bundle: the folder of the bundle with the ONNX files.
        told: the content of preprocess.json, or of model.json for a model of arrays.
    """
    path = stream_file(bundle / INT8_FILE)
    if not path.is_file():
        return ""
    session = open_session(path, threads=1)
    how = stream_of(session)
    rows = {one.name: one.shape for one in (*session.get_inputs(), *session.get_outputs())}
    (name,) = (one.name for one in session.get_inputs() if one.name not in how.states)
    outputs = [one.name for one in session.get_outputs() if one.name not in how.states.values()]
    ends = [
        _row(f"`{name}` {_shape(rows[name], how.axis)}", ", ".join(f"`{one}`" for one in outputs), "a chunk")
    ]
    ends += [
        _row(f"`{given}` {_shape(rows[given])}", f"`{after}`", "a state")
        for given, after in how.states.items()
    ]
    return "\n".join(
        [
            f"## In chunks\n\n`{path.name}` reads a recording in chunks. Its output after the last chunk is"
            f" that of `{INT8_FILE}` for the whole recording.\n",
            _row("input", "output", ""),
            _row(*3 * ["---"]),
            *ends,
            f"\nA chunk has n ≥ 1 steps along axis {how.axis}, and chunks may differ in length{_time(told)}. All"
            " states are zero before the first chunk of a recording; each further chunk needs the states that the"
            " previous chunk returned. Session options are those of the program at the end.\n",
            f"```python\n{_example(name, outputs, how, rows, path.name, runs='inputs' in told)}```",
        ]
    )


def _example(
    name: str,
    outputs: Sequence[str],
    how: Stream,
    rows: Mapping[str, Sequence[Any]],
    file: str,
    *,
    runs: bool,
) -> str:
    batch = rows[name][0] if isinstance(rows[name][0], int) else 1
    zeros = (f'"{one}": np.zeros(({batch}, {rows[one][1]}), np.float32)' for one in how.states)
    return _EXAMPLE.format(
        file=file, golden=GOLDEN_FILE, key=f"input:0/{name}" if runs else f"input:{name}", rows=batch,
        zeros=", ".join(zeros), axis=how.axis, output="output", input=name,
        outputs=", ".join(f'"{one}"' for one in (outputs[0], *how.states.values())),
    )  # fmt: skip


def _time(told: Mapping[str, Any]) -> str:
    """Returns the duration of a step of a recording as text; "" if the preprocessing does not define it."""
    if "hop" not in told:
        return ""
    step = 1000 * told["hop"] / told["rate"]
    return f"; a step is a frame of features, one every {step:g} ms, prepared as described in preprocess.json"


def _shape(sizes: Sequence[Any], cut: int | None = None) -> str:
    """Returns the axes as text: N for a variable batch size, n for the axis along which chunks are cut."""
    axes = ("n" if axis == cut else size if isinstance(size, int) else "N" for axis, size in enumerate(sizes))
    return f"[{', '.join(map(str, axes))}]"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
