"""Checks a bundle, or compares two ONNX files, on this machine, with only onnxruntime and numpy.

    qatkit-verify BUNDLE
    qatkit-verify A.onnx B.onnx

Exit status: 0 if no check falls short, 1 if one does, and 2 if the files cannot be judged (a file is damaged
or has another format, an argument is wrong, or a package is missing).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from qatkit_verify.bundle.archive import unpacked_bundle
from qatkit_verify.bundle.manifest import check_files, read_manifest
from qatkit_verify.bundle.signature import check_signature
from qatkit_verify.checks.base import OK, OPEN, SHORT, CheckInputs, Found
from qatkit_verify.checks.bounds import ACCEPT, bounds
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import write_text
from qatkit_verify.installed import check_onnxruntime
from qatkit_verify.table import drawn
from qatkit_verify.typed import count

Check = Callable[[CheckInputs], Found | list[Found]]


def main(typed: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    given = _parser().parse_args(typed)
    try:
        check_onnxruntime()
        if len(given.paths) == 2:
            return _parity(given)
        if len(given.paths) > 2:
            raise ConfigError("paths", " ".join(map(str, given.paths)), "a bundle, or two ONNX files")
        if given.paths[0].suffix == ".onnx":
            raise ConfigError("paths", given.paths[0], "a bundle, or two ONNX files; found one ONNX file")
        return _bundle(given)
    except (ValueError, OSError) as error:  # rejected values, and files that are not what their names say
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2


def _bundle(given: argparse.Namespace) -> int:
    start = time.monotonic()
    with unpacked_bundle(given.paths[0]) as folder:
        found = []
        for one in verified(folder, given):
            found.append(one)
            if sys.stderr.isatty():
                print(f"\r\033[K{one.check}: {one.verdict}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    short = [one for one in found if one.verdict == SHORT]
    told = {
        "bundle": str(given.paths[0]), "passed": not short, "seconds": round(seconds, 2),
        "peak_mb": _peak_mb(), "checks": [one.as_dict() for one in found],
    }  # fmt: skip
    if given.json is not None:
        text = json.dumps(told, indent=1, default=str) + "\n"
        if str(given.json) == "-":
            print(text, end="")
            return 1 if short else 0
        write_text(given.json, text)
    print(
        "\n".join(drawn([("check", "verdict", "seen here"), *((f.check, f.verdict, f.seen) for f in found)]))
    )
    for one in short:
        print(f"{one.check} falls short; to fix it: {one.fix}")
    passed, unjudged = (sum(one.verdict == verdict for one in found) for verdict in (OK, OPEN))
    verdict = f"all {len(found)} checks passed"
    if short:
        verdict = f"{len(short)} of {len(found)} checks fell short"
    elif unjudged:
        verdict = f"{passed} of {len(found)} checks passed, {unjudged} not judged"
    peak = f", {told['peak_mb']} MB" if told["peak_mb"] else ""
    print(f"{given.paths[0]}: {verdict} ({seconds:.1f} s{peak})")
    return 1 if short else 0


def verified(folder: Path, given: argparse.Namespace) -> Iterator[Found]:
    """Yields the result of each check of the bundle in `folder` as soon as the check has run.

    Args:
        folder: the folder of the bundle.
        given: the parsed arguments.

    Raises:
        ConfigError: the bundle is damaged, or this machine cannot judge it.
    """
    manifest = read_manifest(folder)
    size = check_files(folder, manifest)
    signed = check_signature(folder, manifest.signer, given.key)
    seen = f"{len(manifest.files)} files, {size / 1e6:.1f} MB, each as in manifest.json; {signed}"
    if manifest.drawn_data:
        seen += "; made with random data, so its answers say nothing about real data"
    yield Found("files", OK, seen, figures={"files": len(manifest.files), "bytes": size})
    asked = CheckInputs(folder, manifest, given.threads, given.runs, given.runtime, given.pictures,
                  given.min_speedup, given.max_drop, given.recordings,
                  given.accept_missed_bounds)  # fmt: skip
    for check in _checks(asked):
        answer = check(asked)
        yield from answer if isinstance(answer, list) else [answer]


def _checks(asked: CheckInputs) -> list[Check]:
    """Returns the checks in the order of the printed table, which begins with those that others need."""
    from qatkit_verify.checks.answers import answers, answers_elsewhere, preprocessing
    from qatkit_verify.checks.chunks import answers_in_chunks
    from qatkit_verify.checks.loading import loading
    from qatkit_verify.checks.runtime import runtime
    from qatkit_verify.checks.speed import kernels, saturation, speed

    wanted: list[Check] = [
        loading, preprocessing, partial(answers, optimize=False), partial(answers, optimize=True), answers_in_chunks,
        runtime, answers_elsewhere, saturation, kernels, speed, bounds,
    ]  # fmt: skip
    if asked.pictures is not None:
        from qatkit_verify.checks.pictures import pictures

        wanted.append(pictures)
    if asked.recordings is not None:
        from qatkit_verify.checks.pictures import recordings

        wanted.append(recordings)
    return wanted


def _parity(given: argparse.Namespace) -> int:
    from qatkit_verify.parity import PARITY_FILE, file_parity, parity_json

    a, b = given.paths
    found = file_parity(a, b, inputs=given.inputs, abs_tol=given.abs_tol, mean_tol=given.mean_tol,
                        threads=given.threads)  # fmt: skip
    if str(given.json) == "-":
        print(parity_json(found), end="")
        return 0 if found.passed else 1
    path = given.json or Path(PARITY_FILE)
    write_text(path, parity_json(found))
    print("\n".join(drawn([
        ("", "found", "at most"),
        ("largest difference", f"{found.max_abs_diff:.6g}", _bound(found.abs_tol)),
        ("mean difference", f"{found.mean_abs_diff:.6g}", _bound(found.mean_tol)),
        ("cosine", f"{found.cosine:.8f}", ""),
        ("same top-1", f"{100 * found.same_top1:.2f} % of {found.images}", ""),
    ])))  # fmt: skip
    print(f"{path}: {'passed' if found.passed else 'falls short'}")
    return 0 if found.passed else 1


def _bound(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _peak_mb() -> int | None:
    """Returns the peak memory in MB; None if the platform does not report it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, elsewhere kibibytes
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "qatkit-verify", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("paths", nargs="+", type=Path, help="a bundle (folder or zip), or two ONNX files")
    parser.add_argument("--key", type=Path, help="PEM file of the public key that the signature must match")
    parser.add_argument("--threads", type=count, default=2, help="threads of ONNX Runtime (default: 2)")
    parser.add_argument("--runs", type=count, default=50, help="timed runs per file (default: 50)")
    parser.add_argument(
        "--runtime",
        action="append",
        default=[],
        help="another runtime to check: openvino, or a dotted path (repeatable)",
    )
    parser.add_argument("--pictures", type=Path, help="a folder of pictures, one folder per class")
    parser.add_argument("--recordings", type=Path, help="a folder of WAV or FLAC files, one folder per class")
    parser.add_argument(
        "--min-speedup",
        type=float,
        help="minimum speed-up over float (default: the run's bound, or 1 for INT8)",
    )
    parser.add_argument(
        "--max-drop",
        type=float,
        default=1.0,
        help="maximum loss of accuracy on --pictures or --recordings against the report, in points (default: 1.0)",
    )
    parser.add_argument(
        ACCEPT,
        action="store_true",
        help="let a bundle pass although the run that made it missed bounds",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="write all results to this JSON file; - writes only JSON, to standard output",
    )
    parser.add_argument(
        "--inputs", type=Path, help="for two files: an npz file with one array per input (default: noise)"
    )
    parser.add_argument(
        "--abs-tol", type=float, help="for two files: bound on the largest absolute difference"
    )
    parser.add_argument("--mean-tol", type=float, help="for two files: bound on the mean absolute difference")
    return parser


if __name__ == "__main__":
    sys.exit(main())
