"""Decisions: the rules that decide whether the outputs of two models agree (values of `verify.decision`).

base.py       `Request` and `Decision`, and the parser of requests
plain.py      argmax, threshold, equal, cosine, a user's function
strings.py    texts of CTC recognizers
masks.py      masks and class maps
boxes.py      boxes of detectors; box_layouts.py and find_boxes.py read them, matched_boxes.py compares them
"""

from __future__ import annotations

from qatkit.tasks.decisions.base import KEY, Decision, MisfitError, Request, Seen, parsed, undecided
from qatkit.tasks.decisions.boxes import BoxRequest
from qatkit.tasks.decisions.masks import Mask, class_maps, one_mask
from qatkit.tasks.decisions.plain import ALIKE, Argmax, Cosine, Equal, Function, Threshold, cosines
from qatkit.tasks.decisions.strings import Strings
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError

AUTO = "auto"
_ONE = 1e-3  # tolerance of the sum of a row's probabilities
DECISIONS: dict[str, type[Request]] = {
    kind.name: kind for kind in (Argmax, Threshold, Equal, Cosine, BoxRequest, Strings, Mask)
}

__all__ = [
    "ALIKE",
    "AUTO",
    "DECISIONS",
    "Cosine",
    "Decision",
    "Request",
    "Seen",
    "cosines",
    "fit",
    "request_of",
    "undecided",
]


def request_of(asked: str) -> Request:
    """Returns the request that a value of `verify.decision` describes; the cosine for `auto`.

    Raises:
        ConfigError: the name is unknown, arguments are not allowed, or a path cannot be imported.
    """
    if asked == AUTO:
        return Cosine()
    found = parsed(asked, DECISIONS)
    return Function(asked, resolve(asked, KEY)) if found is None else found


def fit(asked: str, seen: Seen) -> Decision:
    """Returns the decision for a model, from its first outputs.

    Raises:
        ConfigError: `asked` is not a value of `verify.decision`, or does not fit the outputs; the error then names
            the outputs and the decisions that fit.
    """
    request = request_of(guessed(seen) if asked == AUTO else asked)
    try:
        return request.fitted(seen)
    except MisfitError as error:
        fitting = ", ".join(kind.call for kind in DECISIONS.values() if kind.takes(seen))
        given = f"the model returns {seen} for a batch of {seen.samples}, which suits {fitting}"
        raise ConfigError(KEY, asked, f"{error}; {given}") from error


def guessed(seen: Seen) -> str:
    """Returns the name of the decision that the outputs clearly imply, else that of the cosine.

    boxes             outputs for which `qatkit.tasks.decisions.find_boxes.sure` returns true
    equal             other outputs of an integer or boolean type
    argmax(1)         rows of probabilities that add up to 1
    threshold(0.5)    one probability per sample
    mask              probabilities of classes at each pixel, or one channel with nearly all values near 0 or 1
    """
    from qatkit.tasks.decisions.find_boxes import sure

    first, samples = seen.first, seen.samples
    if first.dtype.kind in "iub":
        return BoxRequest.name if sure(seen) else Equal.name
    if not len(first) or (first.shape[0] != samples and first.ndim > 2):
        return Cosine.name
    if first.ndim == 2:
        return _of_rows(seen)
    if class_maps(seen.outputs) or one_mask(seen.outputs):
        return Mask.name
    return BoxRequest.name if sure(seen) else Cosine.name


def _of_rows(seen: Seen) -> str:
    first = seen.first
    if first.min() < 0 or first.max() > 1 + _ONE:
        return Cosine.name
    if first.shape[1] == 1:
        return "threshold(0.5)"
    return "argmax(1)" if (abs(first.sum(1) - 1) < _ONE).all() else Cosine.name
