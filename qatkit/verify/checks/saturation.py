"""Checks whether the file computes the same on every x86: without VNNI, uint8 x int8 kernels may saturate.

Where the integers in the file rule out saturation, that is proven for all inputs. Elsewhere its cost is
emulated on real images, if `verify.target_isa` asks for it or if this processor saturates.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit.records.scores import with_key
from qatkit.verify.checks.base import Check, Shortfall, Subject, capped
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import ConfigError, as_typed, counted
from qatkit_verify.proofs import never_on_arm, never_on_x86
from qatkit_verify.records import Metric, TaskNames

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig
    from qatkit.verify.emulation import Emulation
    from qatkit.verify.saturation import Saturation

GUARDS = "guarded_weights"  # the key of the figures about guarded weights among the measured ones
_ELSEWHERE = "saturation: not checked, since another runtime executes the file"
# Saturation causes the error against float if its noise has at least half of the error's power.
_MOSTLY_DB = 3.0


class SaturationCheck(Check):
    """The effect of saturation without VNNI; `verify.min_agreement` bounds the share of unchanged decisions."""

    name = "saturation"

    def measure(self, subject: Subject, results: Results) -> Results:
        if subject.other_runtime:
            asked = subject.settings.target_isa is not None
            return results.with_measured(self.name, {"elsewhere": True}) if asked else results
        try:
            return results.with_measured(self.name, _measured(subject))
        except Exception as error:  # some graphs cannot be cut, and the other figures are worth more
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            reason = f"{kind}{' '.join(str(error).split())[:200]}"
            return replace(results, notes=(*results.notes, f"saturation: not measured ({reason})"))

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        found = results.measured.get(self.name)
        if found is None:
            unmeasured = f"verify.target_isa={bounds.target_isa}: saturation was not measured"
            return [] if bounds.target_isa is None else [Shortfall(unmeasured)]
        if found.get("elsewhere") or bounds.min_agreement is None:
            return []
        short = []
        if found["others"] and (bounds.target_isa is not None or found["here"]):
            line = (
                f"verify.target_isa={as_typed(bounds.target_isa)}: {counted(len(found['others']), 'operator')}"
                f" that can saturate cannot be emulated (first: '{found['others'][0]}')"
            )
            short.append(Shortfall(line, [_fix(results)]))
        if found["emulated"] is not None and found["emulated"]["agreement"] < bounds.min_agreement:
            line = (
                f"verify.min_agreement={bounds.min_agreement}: without VNNI the file gives the same answer on"
                f" {100 * found['emulated']['agreement']:.2f} % of {found['images']} {results.task.samples}"
            )
            short.append(Shortfall(line, [_fix(results)]))
        return short

    def explains(self, shortfall: Shortfall, results: Results) -> list[Fix] | None:
        found = results.measured.get(self.name)
        emulated = None if found is None else found.get("emulated")
        if found is None or emulated is None or not found["here"]:
            return None
        key = shortfall.line.partition("=")[0].removeprefix("verify.")
        return [_fix(results)] if _causes(key, found, results) else None

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(self.name)
        if found is None:
            return []
        if found.get("elsewhere"):
            return [_ELSEWHERE]
        guards = results.measured.get(GUARDS)
        asked = RequestedSettings(results)
        no_bytes = asked.weights_alone or asked.simulated
        said = "" if guards is None or no_bytes else guard_line(guards)
        return saturation_lines(found, results.task) + ([said] if said else [])


def _measured(subject: Subject) -> dict[str, Any]:
    """Returns the figures: what the weights of all operators prove, and the cost of saturation on images.

    The cost is measured only with `verify.target_isa` or if this processor saturates.
    """
    from qatkit.verify.emulation import Emulation
    from qatkit.verify.saturation import Saturation, measure_saturation
    from qatkit_verify.int8_operators import int8_operators
    from qatkit_verify.saturation import saturates_here

    wanted, here = subject.settings, saturates_here()
    emulation = Emulation(subject.files["int8"], options=subject.options, threads=wanted.threads)
    found = Saturation()
    if wanted.target_isa is not None or here:
        found = measure_saturation(
            emulation,
            subject.some(wanted.saturation_images),
            labelled=subject.labelled,
            progress=subject.progress,
            task=subject.task,
        )
    signed = int8_operators(subject.files["int8"], options=subject.options, signed=True)
    return {
        **_figures(emulation, found, subject.task.names.main),
        "signed": {one.name: one.saturating for one in signed},
        "here": here,
    }


def _figures(emulation: Emulation, found: Saturation, metric: Metric) -> dict[str, Any]:
    """Returns plain figures for report.json about every int8 operator, including the proven ones."""
    layers: dict[str, dict[str, float]] = {}
    for kernel in emulation.kernels:
        layers[kernel.name] = {"channels": kernel.channels, "can_saturate": kernel.overflowing}
        if (one := found.layers.get(kernel.name)) is not None:
            layers[kernel.name] |= {
                "clipped": one.clipped / one.outputs,
                "mean_steps": one.total / one.outputs / one.step,
                "max_steps": one.largest / one.step,
                "relative_error": one.relative,
            }
    answers = {name: getattr(found, name) for name in ("exact", "emulated")}
    return {
        "images": found.images,
        "layers": layers,
        "others": emulation.others,
        **{name: None if one is None else with_key(asdict(one), metric) for name, one in answers.items()},
    }


def _causes(key: str, found: Mapping[str, Any], results: Results) -> bool:
    """Returns whether saturation on this processor explains an unmet bound of `verify`."""
    exact, emulated = found["exact"], found["emulated"]
    if key == "min_agreement":
        return bool(emulated["agreement"] < 1)
    metric = results.task.main
    if key == "max_drop" and exact[metric.key] is not None:
        reference, int8 = (results.accuracy.get(name) for name in ("float", "int8"))
        drop = 0.0 if reference is None or int8 is None else metric.lost(reference.score, int8.score)
        return bool(metric.lost(exact[metric.key], emulated[metric.key]) >= drop / 2 > 0)
    if key.startswith("min_float_") or key == "max_float_kl":
        total = results.fidelity.get("int8")
        noise, own = emulated["sqnr_db"], None if total is None else total.sqnr_db
        return noise is not None and own is not None and noise <= own + _MOSTLY_DB
    return False


def saturation_lines(found: Mapping[str, Any], task: TaskNames = NAMES) -> list[str]:
    """Describes which operators saturate, the error of their outputs, and the effect on the answers."""
    layers = found["layers"]
    open_ones = [name for name, one in layers.items() if one["can_saturate"]]
    proven, others = len(layers) - len(open_ones), found["others"]
    if not layers and not others:
        return _signed_lines(found.get("signed", {}))
    operators = counted(len(layers), "uint8 x int8 operator")
    said = "without VNNI (AVX2): "
    said += f"{proven} of {operators} cannot saturate, proven from their weights; " if proven else ""
    if not open_ones and not others:
        return [never_on_x86(counted(proven, "operator"))]
    if not open_ones or not found["images"]:
        named = ", ".join([*open_ones, *others][:3])
        more = len(open_ones) + len(others) - 3
        listed = f"{named} and {more} more" if more > 0 else named
        how = " (verify.target_isa=avx2 emulates it)" if open_ones else ", since they cannot be emulated"
        which = "the others" if proven else "operators that can saturate"
        return [f"{said}the effect of {which} ({listed}) is not measured{how}"]
    clipped = sorted(
        (name for name in open_ones if layers[name]["clipped"]), key=lambda n: -layers[n]["relative_error"]
    )
    head = (
        f"{said}{counted(len(clipped), 'operator')} saturated on"
        f" {found['images']} {task.samples}: same answer as with VNNI on {100 * found['emulated']['agreement']:.2f} %"
    )
    exact, emulated = (task.main.of(found[name][task.main.key]) for name in ("exact", "emulated"))
    if exact.value is not None:
        head += f", {exact.name} {emulated.text} (with VNNI {exact.text})"
    return [head, *capped("", [_layer(name, layers[name]) for name in clipped])]


def _signed_lines(signed: Mapping[str, int | None]) -> list[str]:
    """Describes a file with int8 activations: on ARM, the sum of two products -128 * -128 exceeds 16 bits."""
    open_ones = [name for name, channels in signed.items() if channels != 0]
    if not signed:
        return []
    if not open_ones:
        return [never_on_arm(len(signed))]
    named = ", ".join(open_ones[:3]) + (f" and {len(open_ones) - 3} more" if len(open_ones) > 3 else "")
    return [
        f"int8 x int8: {len(open_ones)} of {len(signed)} operators can exceed 16 bits on ARM without the dot product,"
        f" through weights of -128 or computed weights ({named})"
    ]


def guard_line(guards: Mapping[str, Any]) -> str:
    """Describes how many operators are guarded, and at what cost, from figures of `qatkit.graph.guarded`."""
    operators = guards["operators"]
    if guards["choice"] == "auto" and not guards["hazard"]:
        return (
            f"backend.reduce_range=auto: nothing to guard, since no products of {guards['backend']} saturate under its"
            " session options"
        )
    if not operators:
        return ""
    raised = statistics.mean(one["raised"] for one in operators.values())
    factor = statistics.median(one["factor"] for one in operators.values())
    lost = [one["lost_db"] for one in operators.values()]
    return (
        f"guarded (backend.reduce_range=auto): {counted(len(operators), 'operator')} with 8-bit weights whose pairs of"
        f" products fit into 16 bits; scales are larger in {100 * raised:.0f} % of channels (median"
        f" {100 * (factor - 1):.1f} %); the weights' SQNR is lower by {statistics.median(lost):.1f} dB in the median,"
        f" {max(lost):.1f} dB at most"
    )


def _layer(name: str, one: Mapping[str, Any]) -> str:
    return (
        f"{name}: {100 * one['clipped']:.3g} % of sums clipped ({one['can_saturate']} of {one['channels']} channels"
        f" can saturate), error {one['mean_steps']:.3g} steps on average, {one['max_steps']:.3g} at most"
    )


def _fix(results: Results) -> Fix:
    """Returns the setting that prevents saturation and that this run does not use yet."""
    asked, guarded = RequestedSettings(results), not results.measured.get(GUARDS, {}).get("asymmetric")
    if asked.get("export.weights_for_amx"):
        return Fix(("export.weights_for_amx=false",), "weights that are stored for AMX saturate without VNNI")
    if guarded and asked.get("backend.reduce_range", "auto") != "auto":
        return Fix(("backend.reduce_range=auto",), "8-bit weights whose products cannot saturate")
    overrides = asked.get("backend.overrides") or {}
    patterns = [pattern for pattern, one in overrides.items() if one.get("reduce_range") is False]
    if patterns:
        return Fix(note=f"backend.overrides without reduce_range=false ({', '.join(patterns)})")
    return Fix(("backend.reduce_range=true",), "7-bit weights")
