"""The inputs that a model declares by itself: an ONNX file all of them, a model of text its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from qatkit.data.arrays import Port
from qatkit.data.preprocessing import Preprocessing

if TYPE_CHECKING:
    from qatkit.importing.inputs import ImageInput


class Declared(NamedTuple):
    """The inputs that a model declares by itself.

    Attributes:
        ports: its inputs; none where it does not say.
        image: the axes of its images; None where it does not say, or takes something else.
        preprocessing: of the images that its bundle was made with.
        about: what else it says: an ONNX file's metadata and the inputs that are fixed to one number; of a model of
            text where its tokenizer is, and how many tokens and positions it has.
        recordings: what its bundle says of the preparation of recordings.
    """

    ports: tuple[Port, ...] = ()
    image: ImageInput | None = None
    preprocessing: Preprocessing | None = None
    about: Mapping[str, str] = MappingProxyType({})
    recordings: Mapping[str, Any] | None = None
