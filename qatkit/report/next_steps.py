"""The most useful commands after a run, composed from the command line that was typed for it.

Each rule of `_RULES` inspects the results and suggests one command or none; the first `_MOST` commands are
printed. Most rules only replace a few keys of the typed command line, so that each command works as it is
printed. The lines of shortfalls name all ways to meet a bound. The first of them that is a setting is
suggested here as a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from qatkit.config.argv import EXPORT, TRAIN, again, command, override, proposes, typed_like, typed_value
from qatkit.records.plan import NextStep
from qatkit.records.results import Results
from qatkit.records.run_files import CHECKPOINT_FILE, FLOAT_CHECKPOINT, REPORT_FILE
from qatkit.verify.checks.accuracy import PAIRED
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.errors import counted

_MOST = 3
_NEAR = ("verify.max_drop", "verify.min_float_", "verify.max_float_")  # bounds for the distance from float
_PACKAGE = Path(__file__).parents[1]


def next_steps(results: Results) -> tuple[NextStep, ...]:
    """Returns at most three commands, the most useful first; () in a library call and in a sweep."""
    if not proposes():
        return ()
    found = dict[str, NextStep]()
    for rule in _RULES:
        one = rule(results)
        if one is not None and one.command:
            found.setdefault(one.command, one)
    return tuple(found.values())[:_MOST]


def after_cleaning(path: Path) -> tuple[NextStep, ...]:
    """Returns the commands that may follow mode=clean; () in a library call and in a sweep."""
    file = override("onnx", path)
    steps = (
        NextStep(
            command(EXPORT, file, "mode=summary"), "lists its operators and which of them run in int8 here"
        ),
        *after_summary(path, quantized=False),
    )
    return steps if proposes() else ()


def after_summary(path: Path, *, quantized: bool) -> tuple[NextStep, ...]:
    """Returns the commands that may follow mode=summary; () in a library call and in a sweep."""
    file = override("onnx", path)
    if not proposes():
        return ()
    if quantized:
        return (NextStep(command(EXPORT, file, "mode=encodings"), "writes its scales and zero points"),)
    typed = command(EXPORT, file, "mode=static", "data=drawn")
    return (NextStep(typed, "shows size and speed in int8 on random samples; set data=... for accuracy"),)


def lines(steps: tuple[NextStep, ...]) -> list[str]:
    """Returns the commands as lines, each with its reason as a comment of the shell."""
    width = max((len(one.command) for one in steps), default=0)
    aligned = width if width <= _ALIGNED else 0
    return ["next:", *(f"  {one.command:<{aligned}}  # {one.why}" for one in steps)] if steps else []


_ALIGNED = 100  # length of the longest command whose reason is aligned with the others


def _fixed(results: Results) -> NextStep | None:
    """Suggests the first setting among the fixes for missed bounds.

    After a rescue it suggests none, since the ladder's advice is already a command.
    """
    if results.ladder is not None:  # the advice of this result is already a command
        return None
    for line, fixes in zip(results.shortfalls, results.fixes, strict=False):
        bound = line.partition("=")[0]
        for fix in fixes:
            if not fix.settings or fix.settings[0].partition("=")[0] == bound:  # it gives up the bound
                continue
            alone = fix.script and command(TRAIN, *fix.settings, *typed_like("data"))
            if typed := alone or again(*fix.settings):
                return NextStep(typed, f"to meet {bound}")
    return None


def _climbs(results: Results) -> NextStep | None:
    """Suggests a rescue if the accuracy of the file is too far from float's."""
    return NextStep(results.climb, "tries one remedy after the other") if results.climb else None


def _analyses(results: Results) -> NextStep | None:
    """Suggests a search for the layers that cause the loss if the file is too far from float.

    It starts from the run's checkpoint, if there is one.
    """
    asked = RequestedSettings(results)
    far = any(line.startswith(_NEAR) for line in results.shortfalls)
    if not far or not asked.has_module or results.analysis is not None or results.ladder is not None:
        return None
    of_file = asked.get("mode") is not None
    resumed = [] if of_file else [override("resume", Path(results.output_dir) / CHECKPOINT_FILE)]
    return NextStep(
        again(*resumed, "analysis=full", without=("analysis",)), "finds the layers that lose most"
    )


def _checks_bundle(results: Results) -> NextStep | None:
    """Suggests a check of the bundle if a run has one and meets its bounds."""
    asked = RequestedSettings(results)
    if results.shortfalls or not asked.get("export.bundle"):
        return None
    if asked.get("export.encrypt") is not None and asked.get("export.encrypt_bundle") is not False:
        return None
    name = "bundle.zip" if asked.get("export.bundle_as") == "zip" else "bundle"
    path = str(Path(results.output_dir) / name)
    int8 = results.latency.get("int8")
    if int8 is not None and int8.ratio < 1 and asked.get("verify.min_speedup") is None:
        typed = command("qatkit-verify", path, "--min-speedup", "0")
        return NextStep(typed, "checks the bundle except its speed, which is below float's here")
    return NextStep(command("qatkit-verify", path), "checks the bundle, here or where it is deployed")


def _bundles(results: Results) -> NextStep | None:
    """Suggests a bundle for a run that meets its bounds and has none."""
    asked = RequestedSettings(results)
    if (
        results.shortfalls
        or not asked.has_module
        or asked.get("export.bundle")
        or asked.get("export.decoder")
    ):
        return None
    words = [override("checkpoint", Path(results.output_dir) / CHECKPOINT_FILE), "export.bundle=true"]
    return NextStep(command(EXPORT, *words), "makes a bundle for deployment")


def _fine_tunes(results: Results) -> NextStep | None:
    """Suggests fine-tuning for a float model that was trained in this run, or if calibration loses accuracy.

    The loss of calibration must exceed two standard errors.
    """
    asked = RequestedSettings(results)
    if not asked.has_module or asked.weights_alone or asked.simulated or asked.get("schedule.epochs"):
        return None
    found, trained = results.measured.get(PAIRED), bool(asked.get("schedule.float_epochs"))
    lost = found is not None and found["lost"] > found["interval"]
    if not (lost or trained) or results.ladder is not None:
        return None
    words = _recipe(asked, results)
    if words is None:
        return None
    if trained:
        words.append(override("model.checkpoint", Path(results.output_dir) / FLOAT_CHECKPOINT))
    why = "fine-tunes the float model that was trained" if trained else "fine-tunes with quantization"
    return NextStep(again(*words, without=_OF_TRAINING), why)


_OF_TRAINING = (
    "schedule",
    "schedule.epochs",
    "schedule.float_epochs",
    "schedule.float_lr",
    "model.checkpoint",
)


def _recipe(asked: RequestedSettings, results: Results) -> list[str] | None:
    """Returns the override that selects fine-tuning: the recipe that corresponds to the typed one, else a schedule."""
    if asked.get("mode") is not None:
        return None
    typed = typed_value("recipe") or ""
    twin = re.sub(r"_(ptq|float)$", "_qat", typed)
    if twin != typed and any((_PACKAGE / place / f"{twin}.yaml").is_file() for place in _RECIPES):
        kept = typed_like("model.checkpoint") if not asked.get("schedule.float_epochs") else ()
        return [f"recipe={twin}", *kept]
    ops = {} if results.audit is None else results.audit.ops
    return ["schedule=qat_adamw" if any("LayerNorm" in op for op in ops) else "schedule=qat_sgd"]


_RECIPES = ("conf/recipe", "../conf/recipe")


def _controls(results: Results) -> NextStep | None:
    """Suggests a float control, which shows the effect of fine-tuning without quantization."""
    asked = RequestedSettings(results)
    trains = asked.has_module and asked.get("schedule.epochs") and results.labelled
    if not trains or asked.get("verify.control"):
        return None
    return NextStep(
        again("verify.control=true"),
        "fine-tunes the float model in the same way, to show what training alone changes",
    )


def _compares(results: Results) -> NextStep | None:
    """Suggests a comparison if there are several runs with this name."""
    above = Path(results.output_dir).parent
    others = [one for one in above.glob(f"*/{REPORT_FILE}") if one.parent != Path(results.output_dir)]
    if not others or not results.output_dir:
        return None
    return NextStep(
        command("qatkit compare", str(above)),
        f"compares this run with {counted(len(others), 'other')} of this name",
    )


def _places(results: Results) -> NextStep | None:
    """Suggests a measured placement for a file that is slower than float."""
    asked, int8 = RequestedSettings(results), results.latency.get("int8")
    if int8 is None or int8.ratio >= 1 or int8.noise or results.shortfalls or not asked.has_module:
        return None
    if asked.without_kernels or asked.weights_alone or asked.get("placement") != "fixed":
        return None
    if (results.audit is not None and not results.audit.for_onnxruntime) or asked.get(
        "backend.every_operator"
    ):
        return None
    return NextStep(again("placement=measured"), "keeps operators in float that are slower in int8 here")


def _calibrates(results: Results) -> NextStep | None:
    """Suggests static quantization for a file that was quantized dynamically although data were given."""
    asked = RequestedSettings(results)
    if (
        results.shortfalls
        or asked.has_module
        or asked.get("mode") != "dynamic"
        or typed_value("data") is None
    ):
        return None
    return NextStep(again("mode=static"), "calibrates static ranges, which are faster than dynamic ones")


_RULES: tuple[Callable[[Results], NextStep | None], ...] = (
    _fixed,
    _climbs,
    _analyses,
    _checks_bundle,
    _bundles,
    _fine_tunes,
    _places,
    _calibrates,
    _compares,
    _controls,
)
