"""Whether the file computes the same on processors without VNNI, whose uint8 x int8 kernels saturate.

Asked for by `verify.target_isa`, and by itself on a processor that saturates; silent elsewhere.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.config.typed import command_with
from qatkit.verify.checks.asked import Asked, either, site_of_node
from qatkit.verify.checks.base import Check, Shortfall, Subject, capped
from qatkit.verify.results import Results
from qatkit_verify.files import write_text

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig
    from qatkit.verify.emulation import Emulation
    from qatkit.verify.saturation import Saturation

_TYPED = 8  # operators in a line that is typed; more are in a file
_OPTION = "reduce_range"
_ELSEWHERE = "saturation: not looked at, since another runtime executes the file"


class SaturationCheck(Check):
    """The file as a processor without VNNI computes it, and `verify.min_agreement` there."""

    name = "saturation"

    def measure(self, subject: Subject, results: Results) -> Results:
        from qatkit_verify.saturation import saturates_here

        if subject.settings.target_isa is None and not saturates_here():
            return results
        if subject.other_runtime:
            return results.with_measured(self.name, {"elsewhere": True})
        try:
            return results.with_measured(self.name, _measured(subject, results))
        except Exception as error:  # whatever graph can't be cut: the other figures are worth more
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return replace(results, notes=(*results.notes, f"saturation: not measured ({reason})"))

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        found = results.measured.get(self.name)
        if found is None:
            unmeasured = f"verify.target_isa={bounds.target_isa}: saturation was not measured"
            return [] if bounds.target_isa is None else [Shortfall(unmeasured)]
        if found.get("elsewhere") or bounds.min_agreement is None:
            return []
        short = []
        if found["others"]:
            line = (
                f"verify.target_isa=avx2: {len(found['others'])} operators can saturate and are not emulated"
            )
            short.append(Shortfall(f"{line} ('{found['others'][0]}' first)", _seven_bits(Asked(results))))
        if found["proposed"]:
            line = (
                f"verify.min_agreement={bounds.min_agreement}: without VNNI the file keeps its answer on"
                f" {_percent(found['emulated'])} of {found['images']} images;"
                f" with 7-bit weights in {_count(found['proposed'])} on {_percent(found['left'])}"
            )
            short.append(Shortfall(line, _mend(found, Asked(results))))
        return short

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(self.name)
        if found is None:
            return []
        return [_ELSEWHERE] if found.get("elsewhere") else saturation_lines(found)


def _measured(subject: Subject, results: Results) -> dict[str, Any]:
    """The figures; a mend that is too long to be typed is written too."""
    from qatkit.verify.emulation import Emulation
    from qatkit.verify.saturation import measure_saturation

    wanted = subject.settings
    emulation = Emulation(subject.files["int8"], options=subject.options, threads=wanted.threads)
    found = measure_saturation(
        emulation,
        subject.some(wanted.saturation_images),
        least=wanted.min_agreement,
        labelled=subject.labelled,
        progress=subject.progress,
    )
    figures = _figures(emulation, found)
    if _in_a_file(found, Asked(results)):
        folder = _write_mend(subject.folder / "mend", found.proposed, results.config["backend"])
        figures["mend"] = str(folder)
    return figures


def _in_a_file(found: Saturation, asked: Asked) -> bool:
    """Whether the overrides are too many to be typed, or have others to go with."""
    many = len(found.proposed) > _TYPED or bool(asked.get("backend.overrides"))
    return asked.has_module and bool(found.proposed) and many


def _figures(emulation: Emulation, found: Saturation) -> dict[str, Any]:
    """Plain figures for report.json: every int8 operator, those with a proof too."""
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
    answers = {name: getattr(found, name) for name in ("exact", "emulated", "left")}
    return {
        "images": found.images,
        "layers": layers,
        "others": emulation.others,
        "proposed": found.proposed,
        **{name: None if one is None else asdict(one) for name, one in answers.items()},
    }


def saturation_lines(found: Mapping[str, Any]) -> list[str]:
    """Which operators saturate, how much that moves them, and what becomes of the answers."""
    layers = found["layers"]
    open_ones = [name for name, one in layers.items() if one["can_saturate"]]
    proven = len(layers) - len(open_ones)
    said = f"without VNNI (AVX2): {proven} of {len(layers)} uint8 x int8 operators cannot saturate"
    if not open_ones:
        return [f"{said}, by their weights"]
    clipped = sorted(
        (name for name in open_ones if layers[name]["clipped"]), key=lambda n: -layers[n]["relative_error"]
    )
    head = (
        f"{said}, by their weights; {len(clipped)} do on {found['images']} images:"
        f" same answer as with VNNI on {_percent(found['emulated'])}"
    )
    if found["exact"]["top1"] is not None:
        head += f", top-1 {found['emulated']['top1']:.2f} % (with VNNI {found['exact']['top1']:.2f} %)"
    return [head, *capped("", [_layer(name, layers[name]) for name in clipped])]


def _layer(name: str, one: Mapping[str, Any]) -> str:
    return (
        f"{name}: {100 * one['clipped']:.3g} % of sums clipped ({one['can_saturate']} of {one['channels']} channels"
        f" can be), off by {one['mean_steps']:.3g} steps on average, {one['max_steps']:.3g} at most"
    )


def _percent(answers: Mapping[str, Any]) -> str:
    return f"{100 * answers['agreement']:.2f} %"


def _count(names: list[str]) -> str:
    return f"'{names[0]}'" if len(names) == 1 else f"{len(names)} operators"


def _mend(found: Mapping[str, Any], asked: Asked) -> str:
    """7-bit weights for these operators; for all where they have no module to be named by."""
    everywhere = _seven_bits(asked)
    if not asked.has_module:
        return everywhere
    sites = ",".join(f"{site_of_node(name)}:{{reduce_range:true}}" for name in found["proposed"])
    typed = f"'+backend.overrides={{{sites}}}'"
    if "mend" in found:
        flags, option = ("--config-dir", found["mend"]), f"backend={_OPTION}"
        typed = command_with(option, flags=flags) or " ".join((*map(shlex.quote, flags), option))
    return either([f"{typed} (7-bit weights there)", everywhere])


def _write_mend(folder: Path, proposed: Sequence[str], backend: Mapping[str, Any]) -> Path:
    """An option of the group `backend`, for --config-dir: what was asked for, and 7-bit weights. JSON is YAML."""
    asked = {pattern: _set(override) for pattern, override in backend["overrides"].items()}
    overrides = dict(asked)
    for site in map(site_of_node, proposed):
        # The last pattern that matches wins: what it asked for is asked for still.
        before = [override for pattern, override in asked.items() if fnmatchcase(site, pattern)]
        kept = {key: value for key, value in (before[-1] if before else {}).items() if key != "int8"}
        overrides[site] = {**kept, "reduce_range": True}  # which says int8 by itself
    path = folder / "backend" / f"{_OPTION}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**backend, "overrides": overrides}, indent=2) + "\n")
    return folder


def _set(override: Mapping[str, Any]) -> dict[str, Any]:
    """What an override changes."""
    from qatkit.config.schema import OverrideConfig

    unset = vars(OverrideConfig())
    return {key: value for key, value in override.items() if value != unset[key]}


def _seven_bits(asked: Asked) -> str:
    return "" if asked.get("backend.reduce_range") else "backend.reduce_range=true (7-bit weights everywhere)"
