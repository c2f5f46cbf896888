"""Reads a run's settings from the configuration in its results: a fix must not propose what the run already used."""

from __future__ import annotations

import re
from typing import Any

from qatkit.config.argv import override
from qatkit.config.schema.model import DRAWN
from qatkit.quant.spec import NARROW_BIASES, WHOLE, WIDE
from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError

_REAL_DATA = Fix(note="real data (data=arrays, data=audio or data=pictures, data.root=DIR)")
_TRANSFORMER = "schedule=qat_adamw for a transformer"
_FILES = "onnx/"  # the prefix of the names of models that are files
_UNQUOTED = re.compile(r"[\w./-]+")  # keys that Hydra reads unquoted
# For each mode of conversion without training, the modes that lose less accuracy.
_MORE_ACCURATE = {
    "dynamic": ("weight_only", "float16"),
    "static": ("weight_only", "float16"),
    "weight_only": ("float16",),
    "float16": ("weight_only",),
}


class RequestedSettings:
    """The settings of the run that produced `results`; none are known without a configuration."""

    def __init__(self, results: Results) -> None:
        self._config, self._labelled = results.config, results.labelled

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value at a dotted key, or `default` if the run has no such group or key."""
        value: Any = self._config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @property
    def has_module(self) -> bool:
        """Returns whether the file was made from a module that this run calibrated and perhaps trained."""
        return "schedule" in self._config and self.get("export.mode") == "static"

    @property
    def weights_alone(self) -> bool:
        """Returns whether the backend quantizes weights and computes in float (`Backend.weights_alone`)."""
        return self._backend_is("weights_alone")

    @property
    def simulated(self) -> bool:
        """Returns whether the file simulates number formats in float (`Backend.simulated`)."""
        return self._backend_is("simulated")

    def _backend_is(self, name: str) -> bool:
        return bool(getattr(self._backend, name, False))

    @property
    def _backend(self) -> Any:
        """The backend; None without a module, or if it comes from a package that is not installed."""
        if not self.has_module:
            return None
        try:
            return resolve(str(self.get("backend.target")), "backend.target")
        except ConfigError:
            return None

    @property
    def without_kernels(self) -> str:
        """The setting for which ONNX Runtime has no int8 kernels and so computes in float, as it is typed.

        It is "" if there is no such setting, or if an override sets it only for some operators.
        """
        if self.simulated:
            return f"backend={self._backend.name}"
        if self.get("export.pack_int4"):
            return "export.pack_int4=true"
        overrides = (self.get("backend.overrides") or {}).get("*") or {}
        asked = {"backend.overrides.*": overrides, "backend": self.get("backend") or {}}
        found = {f"{place}.activation_dtype": one.get("activation_dtype") for place, one in asked.items()}
        without = [f"{key}={kind}" for key, kind in found.items() if kind not in (None, *WHOLE)]
        biases = {f"{place}.bias_dtype": one.get("bias_dtype") for place, one in asked.items()}
        without += [f"{key}={kind}" for key, kind in biases.items() if kind in NARROW_BIASES]
        return next(iter(without), "")

    @property
    def mode_key(self) -> str:
        """The key that sets the mode of a file without a module, as it is typed."""
        return "export.mode" if "schedule" in self._config else "mode"

    @property
    def mode(self) -> str | None:
        """The mode of a file without a module; None for a file with one."""
        return None if self.has_module else self.get(self.mode_key)

    def other_modes(self) -> list[Fix]:
        """Returns the modes that may lose less accuracy; [] if there are none, or with a module."""
        return [Fix((f"{self.mode_key}={name}",)) for name in _MORE_ACCURATE.get(self.mode or "", ())]

    def closer(self) -> list[Fix]:
        """Returns the settings that bring the file closer to float and were not used yet."""
        if not self.has_module:
            return self.other_modes()
        if self.weights_alone:
            return self._closer_weights()
        if self.simulated:
            wider = Fix(note="more bits in backend.weight_dtype or backend.activation_dtype")
            return [wider, self._longer()]
        ways = []
        if self.get("data.source") == DRAWN:
            ways.append(_REAL_DATA)
        if self.get("calibration.random"):
            ways.append(Fix(("calibration.random=false",), "ranges of real data"))
        elif self.get("calibration.search") == "none":
            ways.append(Fix(("calibration=auto",)))
        if (
            self.get("export.tensorrt_table") is None
        ):  # with a table, the ranges are those of the float weights
            if self.get("algorithm_choice") != "auto" and not self.get("calibration.random"):
                ways.append(Fix(("algorithm=auto",), "uses the algorithms that help"))
            if self._could_mix:
                ways.append(Fix(("precision=auto",), "keeps the operators that lose most in float"))
            ways.append(self._longer())
        return ways

    def _closer_weights(self) -> list[Fix]:
        """Returns the settings that bring weights of few bits closer to float and were not used yet."""
        drawn, of_file = self.get("data.source") == DRAWN, self.get("weights.bits") is not None
        ways = [_REAL_DATA] if drawn else []
        if not drawn and "gptq" not in (self.get("algorithm") or {}):
            ways.append(Fix(("algorithm=gptq",)))
        more = {"int2": "int3", "int3": "int4", "int4": "int8"}.get(
            self.get("backend.weight_dtype") or "int4"
        )
        if more is not None:
            ways.append(Fix((f"weights.bits={more[3:]}" if of_file else f"backend.weight_dtype={more}",)))
        if self.get("backend.weight_granularity") != {"block": 16}:
            block = "weights.block=16" if of_file else "backend.weight_granularity={block: 16}"
            ways.append(Fix((block,), "smaller blocks"))
        return [*ways, self._longer()]

    @property
    def _could_mix(self) -> bool:
        """Returns whether this run could have used precision=auto and did not."""
        searched = self.get("precision.search") != "none" or self.get("precision.front") is not None
        refused = self.get("calibration.random") or self.get("rescue.climb")
        refused = refused or self.get("backend.activation_dtype") in WIDE
        refused = refused or self.get("backend.bias_dtype") in NARROW_BIASES
        return not searched and not refused

    def _longer(self) -> Fix:
        """Returns the settings, or the command after export.py, for more fine-tuning than there was."""
        if self.get("mode") is not None:  # export.py, which trains nothing
            file = override("onnx", str(self.get("model.name")).removeprefix(_FILES))
            backend = ["backend=weight_only"] if self.weights_alone else []
            return Fix(("recipe=onnx_qat", file, *backend), "fine-tunes", "train.py")
        epochs, steps = self.get("schedule.epochs"), self.get("schedule.max_steps")
        if not epochs and not self._labelled:
            learns = f"learns from the float model; {_TRANSFORMER}"
            return Fix(("schedule=qat_sgd", "schedule.distill=1"), learns)
        if not epochs:
            return Fix(("schedule=qat_sgd",), f"fine-tunes; {_TRANSFORMER}")
        return Fix((f"schedule.max_steps={2 * steps}" if steps else f"schedule.epochs={2 * epochs}",))

    def override(self, operator: str | None, note: str = "") -> list[Fix]:
        """Returns the override that keeps a node of the file in float; [] if Hydra cannot parse its name.

        A node is named after its site ("layer1.0.conv1/Conv"); the site of an imported file's node is its name.
        """
        note = note or f"keeps '{operator}' in float"
        if str(self.get("model.name")).startswith(_FILES):
            return float_fix(operator or "", note)
        return float_fix((operator or "").rpartition("/")[0].removesuffix("_quant"), note)

    def gentler(self, lost: float) -> list[Fix]:
        """Returns settings for less fine-tuning if fine-tuning cost the float model itself `lost` points.

        Quantization settings cannot fix such a loss.
        """
        slower = f"schedule.lr={self.get('schedule.lr') / 10:g}"
        why = f"the float control also lost {lost:.2f} points by this fine-tuning"
        return [Fix((slower,), why), Fix(("schedule=calibrate_only",), "trains nothing")]

    def left_float(self) -> list[str]:
        """Returns the selectors that leave operators in float."""
        return [one for listed in self._floats().values() for one in listed]

    def without_float(self) -> Fix:
        """Proposes in words to remove selectors of `left_float`, since it is unknown how the user typed them."""
        keys = " or ".join(key for key, listed in self._floats().items() if listed)
        return Fix(note=f"fewer operators in float than {keys} asks for ({', '.join(self.left_float())})")

    def _floats(self) -> dict[str, list[str]]:
        """Returns the selectors that leave operators in float, by their configuration key."""
        overrides = self.get("backend.overrides", {})
        return {
            "backend.overrides": [name for name, one in overrides.items() if one.get("float")],
            "backend.exclude": list(map(str, self.get("backend.exclude", ()))),
            "backend.only": ["others"] if self.get("backend.only", ()) else [],
        }


def float_fix(site: str, note: str) -> list[Fix]:
    """Returns the override that keeps a site in float; [] for a name that Hydra cannot parse."""
    typed = f"+backend.overrides={{{site}:{{float:true}}}}"
    return [Fix((typed,), note)] if _UNQUOTED.fullmatch(site) else []
