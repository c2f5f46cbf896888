"""The tournament of placements: times files with different float operators on this machine, and chooses one.

    float, table, all SiLUs int8, every 2nd operator float ── profile, clock ──> time of operators and borders
    ── cut ──> the cheapest placement by that ── export, profile, clock ──> corrected times ── cut ... until nothing new
    all files in alternation ──> the file that is fastest in every session of a quiet machine; if none is, the table

"Table" is the placement by the backend's table; borders are conversions between int8 and float. The ranges
are placeholders, since the latency of a file does not depend on its scales.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx, nn

from qatkit.choose.placement.choices import Choices, refined
from qatkit.choose.precision import costs as precision_costs
from qatkit.choose.precision.layout import Layouts
from qatkit.config.float_overrides import float_overrides
from qatkit.config.schema import Config, OverrideConfig
from qatkit.data.inputs import Inputs
from qatkit.graph.captured import Captured
from qatkit.graph.node_arguments import shape_of
from qatkit.graph.nodes import op_class, site
from qatkit.graph.overrides import Overrides
from qatkit.progress import shown
from qatkit.run.backend import backend_of
from qatkit.run.build import qat_module
from qatkit.run.export import paths_of, write_file, write_float_file
from qatkit.run.sound import overrides_of
from qatkit.train.module import QATModule
from qatkit.verify.site_kernels import SiteKernel, site_kernels
from qatkit_verify.latency import Session, every_session
from qatkit_verify.placement.decide import chosen, measured, noise
from qatkit_verify.placement.machine import this_machine
from qatkit_verify.placement.quiet import Timed, most_sessions, summed_up, until_quiet
from qatkit_verify.placement.record import FLOAT, TABLE, Placed
from qatkit_verify.placement.sites import Sites

_FILES = 8  # maximum number of files, not counting those with weights for AMX
# A file is made only if its predicted time is below this share of the time of the fastest file that may be chosen.
_GAIN = 0.995
_BORDERS = (1.0, 1.5, 0.67)  # factors for the time of borders, which lead to different placements
# Number of sessions at the end, and runs of each file in a session. Each session has the weights at other
# addresses.
_SESSIONS, _RUNS = 3, 40
_LOOK = 25  # runs of each file during the search
# Time limits for all files in turns, in seconds: during the search, and for a session at the end. A slow
# machine makes fewer runs of each file, and the fastest one counts.
_LOOK_SECONDS, _SESSION_SECONDS, _LEAST_RUNS = 8.0, 20.0, 5
_SEARCH_SECONDS = 120.0  # time limit after which no further file is made


def with_sites(config: Config, sites: Sites) -> Config:
    """Returns the configuration of a placement, with its weight format and its overrides before the existing ones."""
    placed = float_overrides(sites.float_sites)
    placed |= {one: OverrideConfig(int8=True) for one in sorted(sites.opened)}
    backend = replace(config.backend, overrides={**placed, **config.backend.overrides})
    for_amx = config.export.weights_for_amx or sites.for_amx
    return replace(config, backend=backend, export=replace(config.export, weights_for_amx=for_amx))


def digest(graph: fx.Graph) -> str:
    """Returns a hash of the operators, their shapes and their inputs."""
    lines = [
        f"{site(n)} {op_class(n)} {shape_of(n)} {','.join(site(b) for b in n.all_input_nodes)}"
        for n in graph.nodes
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _File:
    """A file that is timed.

    Attributes:
        name: the name of the file.
        sites: the placement.
        path: the path of the file.
        predicted: the time that was predicted before the file was made, as a share of the table's time; None
            for the first files and those for AMX. A ratio is not affected by drift of the machine's speed.
    """

    name: str
    sites: Sites
    path: Path
    predicted: float | None


class _Counted:
    """An iterator with a maximum length for the progress bar."""

    def __init__(self, made: Iterator[tuple[Any, Sequence[None]]], most: int) -> None:
        self._made, self._most = made, most

    def __len__(self) -> int:
        return self._most

    def __iter__(self) -> Iterator[tuple[Any, Sequence[None]]]:
        return self._made


class Tournament:
    """Finds the fastest placement of one model.

    Args:
        config: the configuration of the run, without a placement.
        model: the float model.
        inputs: the inputs of the model.
        module: the module with the placement of the backend's table.
        folder: a folder for temporary files.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module | Captured,
        inputs: Inputs,
        module: QATModule,
        folder: Path,
    ) -> None:
        self.config, self.model, self.inputs, self.folder = config, model, inputs, folder
        self.module_type, self.options = type(module), module.backend.session_options
        opened = module.opened(model).graph
        forced = [site(node) for node in Overrides(opened, overrides_of(config)).forced_float]
        self.layouts = Layouts(opened, module.backend, forced)
        self.choices = Choices(opened, module.backend, self.layouts, forced)
        self.digest = digest(opened)
        self.machine = this_machine(config.verify.threads, config.verify.latency_batch)
        self.has_amx = module.backend.has_amx and not config.export.weights_for_amx
        self.files: dict[str, _File] = {}
        self._profiles: dict[str, precision_costs.Measured] = {}

    def run(self) -> Placed:
        """Writes and times the files, and returns the decision."""
        progress = self.config.trainer.progress
        for _ in shown(_Counted(self._made(), _FILES), "placement", progress, "files"):
            pass
        if "amx_int8" in self.machine.isa and self.has_amx:
            self._write_for_amx()
        costs = self._costs()
        sessions = ((one, [None]) for one in self._sessions(_SESSIONS, _RUNS, _SESSION_SECONDS))
        counted = _Counted(sessions, most_sessions(_SESSIONS))
        found = [one for one, _ in shown(counted, "placement: timing", progress, "sessions")]
        return self._decided(summed_up(found, _SESSIONS), costs)

    def _made(self) -> Iterator[tuple[None, Sequence[None]]]:
        """Writes and profiles files until the cheapest placement is among them, or a limit is reached.

        The limits are `_FILES` and `_SEARCH_SECONDS`. Yields after each file, for a progress bar.
        """
        start, operators = time.monotonic(), self.layouts.operators
        self._write(TABLE, Sites())
        yield None, [None]
        self._write(FLOAT, Sites(frozenset(operators)))
        yield None, [None]
        if self.choices.islands:
            self._write("opened", Sites(opened=self.choices.islands))
            yield None, [None]
        if len(operators) > 1:
            self._write("even", Sites(frozenset(operators[0::2])))
            yield None, [None]
        self._profile()
        while len(self.files) < _FILES and time.monotonic() - start < _SEARCH_SECONDS:
            found = self._proposed()
            if found is None:
                return
            self._write(str(len(self.files)), *found)
            self._profile()
            yield None, [None]

    def _write_for_amx(self) -> None:
        """Writes the table's file and the fastest one again with weights for AMX, which the costs do not model."""
        mixed = [name for name in self.files if name != FLOAT]
        best = min(mixed, key=lambda name: self._profiles[name].ms)
        for name in dict.fromkeys((TABLE, best)):
            self._write(f"{name}, for AMX", replace(self.files[name].sites, for_amx=True))

    def _is_mixed(self, floats: Collection[str]) -> bool:
        """Returns whether some operator stays int8."""
        return len(self.layouts(floats).floats) < len(self.layouts.operators)

    def _proposed(self) -> tuple[Sites, float] | None:
        """Returns the cheapest new placement, if its predicted time clearly beats all files that may be chosen.

        The float file may not be chosen. If it is the fastest, a similar placement may still be faster than
        the table.

        Returns:
            The placement and its predicted time as a share of the table's time; None if there is none.
        """
        costs = self._costs()

        def predicted(sites: Sites) -> float:
            if not self._is_mixed(sites.floats):
                return math.inf
            return costs(self.layouts(sites.floats, sites.opened))

        known = {self._layout(file.sites) for file in self.files.values()}
        cuts = [self.choices(costs, borders=borders) for borders in _BORDERS]
        mixed = [name for name in self._profiles if name != FLOAT]
        leader = min(mixed, key=lambda name: self._profiles[name].ms)
        starts = [min(cuts, key=predicted), self.files[leader].sites]
        refinements = [refined(start, self.choices.computing, predicted) for start in starts]
        found = [
            one
            for one in (*cuts, *refinements)
            if self._layout(one) not in known and self._is_mixed(one.floats)
        ]
        if not found:
            return None
        sites = min(found, key=predicted)
        if predicted(sites) >= _GAIN * self._profiles[leader].ms:
            return None
        return sites, predicted(sites) / self._profiles[TABLE].ms

    def _layout(self, sites: Sites) -> tuple[object, ...]:
        layout = self.layouts(sites.floats, sites.opened)
        return layout.floats, layout.int8, layout.quantized, layout.dequantized

    def _write(self, name: str, sites: Sites, predicted: float | None = None) -> None:
        path = self.folder / f"{name}.onnx"
        if name == FLOAT:
            write_float_file(self.model, self.config, self.inputs, path)
        else:
            config = with_sites(self.config, sites)
            module = qat_module(config, self.model, self.inputs, self.module_type, algorithms=())
            write_file(module.convert().graph, config, self.inputs, path)
        self.files[name] = _File(name, sites, path, predicted)

    def _profile(self) -> None:
        """Times all files in alternation, and profiles the new ones."""
        looks = [*self._sessions(1, _LOOK, _LOOK_SECONDS)]
        times = {name: min(seen) for name, seen in summed_up(looks, 1).ms.items()}
        for name, file in self.files.items():
            layout = self.layouts(file.sites.floats, file.sites.opened)
            kernels = self._profiles[name].kernels if name in self._profiles else self._kernels(file.path)
            self._profiles[name] = precision_costs.Measured(layout, kernels, times[name])

    def _kernels(self, path: Path) -> Sequence[SiteKernel]:
        asked = self.config.verify
        shape = self.inputs.timed(asked.latency_batch)
        return site_kernels(
            path,
            self.layouts.sites,
            paths=paths_of(self.model),
            options=self.options,
            threads=asked.threads,
            input_shape=shape,
        )

    def _costs(self) -> precision_costs.Costs:
        ends = [self._profiles[TABLE], self._profiles[FLOAT]]
        others = [profile for name, profile in self._profiles.items() if name not in (TABLE, FLOAT)]
        return precision_costs.Costs([*ends, *others], self.layouts.operators, self.layouts.sites)

    def _sessions(self, sessions: int, runs: int, seconds: float) -> Iterator[Session]:
        """Yields sessions in which all files are timed in turns, each `runs` times.

        If earlier times are known, `runs` is reduced, at most to `_LEAST_RUNS`, so that a session takes no more
        than about `seconds`.
        """
        asked, paths = self.config.verify, {name: file.path for name, file in self.files.items()}
        known = [profile.ms for profile in self._profiles.values()]
        if known:  # each run follows an untimed one
            turn = 2 * len(paths) * max(known) / 1000
            runs = max(_LEAST_RUNS, min(runs, int(seconds / turn)))
        given = self.inputs.timed_by(asked.latency_batch)
        every = every_session(paths, given, batch=asked.latency_batch, threads=asked.threads, runs=runs,
                              most=most_sessions(sessions), options=self.options)  # fmt: skip
        return until_quiet(every, sessions)

    def _decided(self, timed: Timed, costs: precision_costs.Costs) -> Placed:
        best = chosen(timed, self.config.verify.threads)
        sites, table = self.files[best].sites, min(timed.ms[TABLE])
        return Placed(
            self.config.model.name,
            backend_of(self.config).name,
            self.inputs.shape,
            self.digest,
            self.machine,
            sites,
            tuple(
                measured(
                    file.name,
                    len(file.sites.floats),
                    len(file.sites.opened),
                    None if file.predicted is None else file.predicted * table,
                    timed.ms,
                )
                for file in self.files.values()
            ),
            best,
            noise(timed.ms),
            self._gains(sites, costs),
            timed.quiet,
            timed.waited,
        )

    def _gains(self, sites: Sites, costs: precision_costs.Costs) -> dict[str, float]:
        """Returns the predicted milliseconds that each site adds if only this site is set back to the table."""
        here = costs(self.layouts(sites.floats, sites.opened))
        found = {one: costs(self.layouts(sites.floats - {one}, sites.opened)) for one in sites.floats}
        found |= {one: costs(self.layouts(sites.floats, sites.opened - {one})) for one in sites.opened}
        return {one: round(found[one] - here, 6) for one in sorted(found)}
