"""Checks whether the file gives the same answers here as where it was made.

There are two steps: from pixels or samples to the input tensor, and from the tensor to the answer. A model of
arrays has no preprocessing, so its inputs are compared with model.json instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qatkit_verify.bundle.golden import Away, Golden, away
from qatkit_verify.bundle.manifest import ARRAYS_FILE, PREPROCESS_FILE
from qatkit_verify.bundle.ports import Port
from qatkit_verify.checks.base import OK, OPEN, SHORT, CheckInputs, Found
from qatkit_verify.classification import names_of
from qatkit_verify.errors import counted
from qatkit_verify.feeds import Array
from qatkit_verify.runtimes.base import REFERENCE, load_runtimes
from qatkit_verify.session import open_session
from qatkit_verify.untrusted import read_json


def preprocessing(asked: CheckInputs) -> Found:
    """Preprocesses the golden pixels or samples, and compares the result bit for bit with the golden inputs.

    For a model of arrays, the golden arrays and the file's inputs are compared with model.json instead. The
    result for any other model without preprocessing is OPEN.
    """
    golden, path = asked.golden, asked.folder / PREPROCESS_FILE
    if golden.runs:
        return _inputs(asked)
    if not golden.raw or not path.is_file():
        return Found("preprocessing", OPEN, "the inputs are neither images nor recordings")
    made, raw = _prepared(golden, path)
    wanted = next(iter(golden.inputs.values()))
    if made.shape == wanted.shape and made.dtype == wanted.dtype and made.tobytes() == wanted.tobytes():
        verb = "is" if len(made) == 1 else "are"
        return Found("preprocessing", OK, f"{raw} {verb} bit-identical")
    fix = "install the versions of numpy and of qatkit (for qatkit-verify) that manifest.json names"
    if made.shape != wanted.shape:
        seen = f"inputs have the shape {list(made.shape)} instead of {list(wanted.shape)}"
        return Found("preprocessing", SHORT, seen, fix, {"max_abs_diff": float("inf")})
    apart = float(np.abs(made.astype(np.float64) - wanted).max())
    return Found("preprocessing", SHORT, f"inputs differ by up to {apart:.3g}", fix, {"max_abs_diff": apart})


def _prepared(golden: Golden, path: Path) -> tuple[Array, str]:
    """Returns the golden pixels or samples, preprocessed as preprocess.json says, and a description of them."""
    how = read_json(path)
    if golden.sounds:
        from qatkit_verify.sound import SoundPreprocess

        lengths = sorted({len(one) for one in golden.sounds})
        told = f"{counted(len(golden.sounds), 'recording')} ({', '.join(map(str, lengths[:3]))} samples)"
        return SoundPreprocess.from_dict(how).batch(golden.sounds), told
    from qatkit_verify.preprocess import Preprocess

    sizes = {f"{one.shape[1]}x{one.shape[0]}" for one in golden.pixels}
    told = f"{counted(len(golden.pixels), 'image')} ({', '.join(sorted(sizes)[:3])})"
    return Preprocess.from_dict(how).batch(golden.pixels), told


def _inputs(asked: CheckInputs) -> Found:
    """Compares the golden arrays and the inputs that the file declares with model.json."""
    told = [Port.from_dict(one) for one in read_json(asked.folder / ARRAYS_FILE)["inputs"]]
    session = open_session(asked.int8, threads=1, optimize=False, options=asked.options)
    listed = f"({', '.join(map(str, told))})"
    declared = [Port.of(one) for one in session.get_inputs()]
    wrong = [str(port) for port, own in zip(told, declared, strict=False) if not port.declares(own)]
    wrong += [counted(len(declared), "input")] if len(told) != len(declared) else []
    for run in asked.golden.runs:
        wrong += [str(port) for port in told if port.name not in run or not port.takes(run[port.name])]
    if not wrong:
        seen = f"{counted(len(told), 'input')} as in model.json {listed}"
        return Found("inputs", OK, seen, figures={"inputs": len(told)})
    fix = "export the bundle again: its model.json belongs to another file"
    differ = ", ".join(dict.fromkeys(wrong))
    seen = f"model.json lists {counted(len(told), 'input')} {listed}; the file differs: {differ}"
    return Found("inputs", SHORT, seen, fix)


def answers(asked: CheckInputs, *, optimize: bool) -> Found:
    """Compares ONNX Runtime's answers, without optimizations or with all of them, with the golden answers."""
    golden = asked.golden
    found = asked.answers[optimize]
    name = "answers, optimized" if optimize else "answers, as written"
    return _judged(
        asked, name, away(golden.on if optimize else golden.off, golden.steps, found), golden.tolerance
    )


def answers_elsewhere(asked: CheckInputs) -> list[Found]:
    """Compares the answers of all `asked.runtimes` with the golden ones of ONNX Runtime with optimizations."""
    golden, all_found = asked.golden, list[Found]()
    for runtime in load_runtimes(asked.runtimes).values():
        if runtime.name == REFERENCE:  # run with the session's options, which other runtimes do not have
            outputs = asked.answers[True]
        else:
            outputs = asked.outputs(runtime.open(asked.int8, asked.threads))
        found = away(golden.on, golden.steps, outputs)
        version = " ".join(f"{key} {value}" for key, value in runtime.versions().items())
        all_found.append(_judged(asked, f"answers, {version}", found, golden.tolerance_other))
    return all_found


def _judged(asked: CheckInputs, name: str, found: Away, tolerance: float) -> Found:
    names = names_of(asked.report)
    if asked.golden.runs:
        same = counted(len(asked.golden.runs), "run")
    elif names.name == "outputs":  # the decisions of such a task cannot be computed with this package only
        same = counted(found.images, "sample")
    else:
        same = f"same {names.decision} for {found.same} of {found.images}"
    seen = f"{same}, difference at most {found.steps:.3g} steps (tolerance {tolerance:.3g})"
    figures = {"steps": found.steps, "tolerance": tolerance, "same": found.same, "images": found.images}
    if found.steps <= tolerance:
        return Found(name, OK, seen, figures=figures)
    fix = (
        "if sums saturate here (see saturation below), train with verify.target_isa=avx2, which names the "
        "operators that need reduce_range; otherwise use another version of the runtime"
    )
    return Found(name, SHORT, seen, fix, figures)
