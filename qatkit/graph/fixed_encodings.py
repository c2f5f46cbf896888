"""Fixes the quantizers of a prepared graph to the scales and zero points (encodings) in an external file.

`matched` assigns encodings to quantizers, and rejects them if quantizers need other settings; `fix` sets
them. An encoding that no setting could make usable is reported as not used. Quantizers without an encoding
get their scales from calibration or from the weight, as usual.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from qatkit.graph.nodes import site
from qatkit.graph.quantizers import fake_quantizers, quantized_weights
from qatkit.graph.tensor_names import TensorNames
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.granularity import PerBlock, PerTensor
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit.records.encodings import Encoding
from qatkit_verify.errors import ConfigError, did_you_mean

KEY = "calibration.encodings"
_TYPO = 0.8  # similarity from which an unknown name is taken for a misspelt name of the model
_NAMED = 5
_STANDS = "their scales are already fixed"
_BIAS, _SCALES = "int32", "scale_type"
_TYPABLE = re.compile(r"[\w./-]+")  # keys that Hydra accepts unquoted


@dataclass(frozen=True)
class Matched:
    """Encodings assigned to the quantizers of a graph.

    Attributes:
        activations: for each site, the name of the tensor and its encoding in the type of the quantizer.
        weights: for each path of a weight, the name of the weight and its encoding in the type of the quantizer.
        biases: the number of encodings of biases, which follow from those of inputs and weights.
        unused: the names of the other encodings, each with the reason why it is not used.
    """

    activations: dict[str, tuple[str, Encoding]] = field(default_factory=dict)
    weights: dict[str, tuple[str, Encoding]] = field(default_factory=dict)
    biases: int = 0
    unused: dict[str, str] = field(default_factory=dict)

    def notes(self, file: object) -> list[str]:
        """Returns the lines of the report about these encodings.

        Args:
            file: the file that the encodings come from.
        """
        fixed = f"{_number(self.activations, 'activation')} and {_number(self.weights, 'weight')}"
        bias = "; the scales of biases follow from these" if self.biases else ""
        lines = [f"encodings: {file} sets the scales of {fixed}{bias}"]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.unused.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            lines.append(f"encodings not used, because {reason}: {', '.join(names[:_NAMED])}{more}")
        return lines


def _number(found: Sized, what: str) -> str:
    return f"1 {what}" if len(found) == 1 else f"{len(found)} {what}s"


def matched(
    graph_module: fx.GraphModule, names: TensorNames, encodings: Mapping[str, Encoding], file: object
) -> Matched:
    """Assigns encodings to quantizers.

    Args:
        graph_module: a prepared graph.
        names: the tensor names of its quantizers.
        encodings: the encodings by tensor name.
        file: the file that the encodings come from, for messages.

    Raises:
        ConfigError: the model has none of the named tensors, an unknown name is similar to that of a tensor without
            an encoding, or an encoding has another type, symmetry, granularity or type of scales than its quantizer
            (the message says which settings would fit).
    """
    given = _by_known_name(names, encodings)
    _check_names(names, given, file)
    found = _Matching(names, given)
    for place, quantizer in fake_quantizers(graph_module).items():
        found.activation(place, quantizer)
    for path, _, fake in quantized_weights(graph_module):
        found.weight(path, fake)
    found.check({site(node) for node in graph_module.graph.nodes if node.op == "placeholder"}, file)
    return found.outcome()


def fix(graph_module: fx.GraphModule, found: Matched) -> None:
    """Sets the scales and zero points of the matched quantizers, and fixes them."""
    quantizers = fake_quantizers(graph_module)
    for place, (_, one) in found.activations.items():
        scale, zero = torch.from_numpy(one.scale), torch.from_numpy(one.zero_point)
        quantizers[place].fix(scale.reshape(()), zero.reshape(()))
    for path, _, fake in quantized_weights(graph_module):
        if path in found.weights:
            one = found.weights[path][1]
            device, shape = fake.clip.device, fake.clip.shape
            scale, zero = (
                torch.from_numpy(_by_output(values, one)) for values in (one.scale, one.zero_point)
            )
            known = zero.reshape(shape).to(device) if fake.spec.has_zero_point else None
            fake.fix(scale.reshape(shape).to(device), zero_point=known)


def _by_output(values: Any, one: Encoding) -> Any:
    """Returns values ordered by output channel: blocks of a matrix [inputs, outputs] are transposed."""
    turned = one.block_size is not None and one.axis == 0 and values.ndim > 1
    return np.ascontiguousarray(values.T if turned else values)


def _by_known_name(names: TensorNames, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """Returns the encodings by the names of the model's tensors; unknown names are kept.

    Tensors of a file that qatkit exported are recognized by the names of their quantize nodes.
    """
    sites = {node: place for place, node in names.nodes.items()}
    found: dict[str, Encoding] = {}
    for name, one in encodings.items():
        place = sites.get(one.node.rpartition("/")[0])
        known = name if name in names.tensors or place is None else place
        if known not in found or known == name:
            found[known] = one
    return found


def _check_names(names: TensorNames, given: Mapping[str, Encoding], file: object) -> None:
    unknown = [name for name in given if name not in names.tensors]
    if len(unknown) == len(given):
        first = next(iter(given), "")
        such = f", such as '{first}'{did_you_mean(first, names.tensors)}" if first else ""
        reason = f"the model has none of the tensors that the file names{such}"
        raise ConfigError(KEY, file, reason=reason)
    free = [name for name in names.tensors if name not in given]
    for name in unknown:
        near = difflib.get_close_matches(name, free, n=3, cutoff=_TYPO)
        if near:
            reason = f"the model has no tensor '{name}' (did you mean {', '.join(near)}?)"
            raise ConfigError(KEY, file, reason=reason)


class _Matching:
    """The state while encodings and quantizers are matched.

    Attributes:
        found: the matches so far.
        wanted: for each site or path whose encoding does not fit, the settings with which it would fit.
    """

    def __init__(self, names: TensorNames, given: Mapping[str, Encoding]) -> None:
        self.names, self.given, self.found = names, given, Matched()
        self.wanted: dict[str, dict[str, str]] = {}

    def activation(self, place: str, quantizer: FakeQuantize) -> None:
        """Matches the quantizer of an activation with the first usable encoding under its names."""
        chosen: Encoding | None = None
        for name in (one for one in self.names.activations.get(place, ()) if one in self.given):
            own = self.given[name]
            if quantizer.frozen:
                self.found.unused[name] = _STANDS
            elif chosen is not None:
                if not own.equals(chosen):
                    self.found.unused[name] = (
                        f"the tensor has the range of '{self.found.activations[place][0]}'"
                    )
            elif own.scale.size != 1:
                self.found.unused[name] = "an activation can have only one scale"
            elif quantizer.bounds[0] == 0.0 and not _starts_at_zero(own):
                self.found.unused[name] = "the range has to start at zero like that of the ReLU after it"
            else:
                chosen = own
                self._take(self.found.activations, place, name, quantizer.spec)

    def weight(self, path: str, fake: WeightFakeQuantize) -> None:
        """Matches the quantizer of a weight with the encoding of the weight's tensor."""
        name = next((one for one in self.names.weights.get(path, ()) if one in self.given), None)
        if name is None:
            return
        own, granularity = self.given[name], fake.spec.granularity
        if fake.frozen:
            self.found.unused[name] = _STANDS
        elif own.block_size is not None and not isinstance(granularity, PerBlock):
            self.found.unused[name] = (
                "the backend does not support scales in blocks (backend=weight_only does)"
            )
        elif own.scale.size == 1 < fake.clip.numel():
            self._take(self.found.weights, path, name, fake.spec, granularity="per_tensor")
        elif isinstance(granularity, PerTensor) and own.scale.size > 1:
            self._take(self.found.weights, path, name, fake.spec, granularity="per_channel")
        elif own.scale.size != fake.clip.numel():
            self.found.unused[name] = "the weight needs another number of scales"
        else:
            self._take(self.found.weights, path, name, fake.spec)

    def _take(
        self,
        found: dict[str, tuple[str, Encoding]],
        place: str,
        name: str,
        spec: QuantSpec,
        **wanted: str,
    ) -> None:
        kind = "activation" if found is self.found.activations else "weight"
        own, further = _in_type(self.given[name], spec)
        found[place] = name, own
        if settings := {f"{kind}_{key}": value for key, value in (further | wanted).items()}:
            self.wanted[place] = settings

    def check(self, inputs: Set[str], file: object) -> None:
        """Rejects encodings that do not fit their quantizers.

        Args:
            inputs: sites of the model's inputs, which no override can change.
            file: the file that the encodings come from, for the message.

        Raises:
            ConfigError: an encoding does not fit; the message says which settings would fit.
        """
        if not self.wanted:
            return
        place, settings = next(iter(self.wanted.items()))
        group = self.found.activations if place in self.found.activations else self.found.weights
        kind = "1 encoding does" if len(self.wanted) == 1 else f"{len(self.wanted)} encodings do"
        example = f"'{group[place][0]}' needs {_typed(settings)}"
        reason = f"{kind} not fit the backend ({example}); set {self._advice(inputs)}"
        raise ConfigError(KEY, file, reason=reason)

    def _advice(self, inputs: Set[str]) -> str:
        """Returns the settings that would make the encodings fit.

        If scales do not fit the type of scales, the advice changes only this type. Otherwise it is given separately
        for activations and weights: backend keys if all encodings that do not fit need the same settings, and
        either no encoding fits or one of those that do not fit is that of a model input, which no override can
        change. Else it is one override for each encoding that does not fit.
        """
        if any(key.endswith(_SCALES) for one in self.wanted.values() for key in one):
            return f"backend.{_SCALES}=float"
        told, single = list[str](), dict[str, dict[str, str]]()
        for group in (self.found.activations, self.found.weights):
            wanted = {place: one for place, one in self.wanted.items() if place in group}
            alike = {_typed(one) for one in wanted.values()}
            if len(alike) == 1 and (len(wanted) == len(group) or not inputs.isdisjoint(wanted)):
                told += [f"backend.{key}={value}" for key, value in next(iter(wanted.values())).items()]
            else:
                single |= wanted
        if single and all(map(_TYPABLE.fullmatch, single)):
            listed = ",".join(f"{place}:{{{_typed(one)}}}" for place, one in single.items())
            told.append(f"'+backend.overrides={{{listed}}}'")
        elif single:
            listed = "; ".join(f"{place}: {_typed(one)}" for place, one in single.items())
            told.append(f"backend.overrides in a YAML file ({listed})")
        return " ".join(told)

    def outcome(self) -> Matched:
        """Returns the matches, with the reasons why the other encodings are not used."""
        used = {name for name, _ in (*self.found.activations.values(), *self.found.weights.values())}
        unused, same = dict(self.found.unused), set[str]()
        for place in self.found.activations:
            same |= {name for name in self.names.activations[place] if name in self.given} - unused.keys()
        biases = sum(one.dtype == _BIAS for one in self.given.values())
        for name, one in self.given.items():
            if one.dtype != _BIAS and name not in used | same | unused.keys():
                known = name in self.names.tensors
                unused[name] = "the tensor has no quantizer" if known else "the model has no such tensor"
        return Matched(self.found.activations, self.found.weights, biases, unused)


def _typed(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key}:{value}" for key, value in settings.items())


def _starts_at_zero(own: Encoding) -> bool:
    """Returns whether the range contains no negative value."""
    return bool((own.ends()[0] >= 0).all())


def _in_type(own: Encoding, spec: QuantSpec) -> tuple[Encoding, dict[str, str]]:
    """Returns an encoding in the type of a quantizer, and the settings that the quantizer would need.

    There are no settings if the encoding fits. Between a signed and an unsigned type with the same number of bits, only
    the zero point differs.
    """
    if spec.form is not None or own.bits != spec.bits:
        return own, {"dtype": own.dtype}
    signed = spec.number_type.signed
    shift = 0 if own.signed == signed else 2 ** (spec.bits - 1)
    zeros = np.asarray(own.zero_point + (-shift if signed else shift))  # a sum of rank 0 is not an array
    moved = replace(own, dtype=spec.dtype, zero_point=zeros)
    middle = (spec.quant_max + spec.quant_min + 1) // 2
    if spec.symmetric and (moved.zero_point != middle).any():
        return moved, {"symmetric": "false"}
    if spec.powers_of_two and (np.frexp(own.scale)[0] != 0.5).any():
        return moved, {_SCALES: "float"}
    return moved, {}
