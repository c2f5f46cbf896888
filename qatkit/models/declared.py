"""The inputs that a model itself declares: an ONNX file declares all of them, a text model its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from qatkit.data.arrays import Port
from qatkit.data.preprocessing import Preprocessing

if TYPE_CHECKING:
    from qatkit.importing.inputs import ImageInput


class Declared(NamedTuple):
    """The inputs that a model itself declares.

    Attributes:
        ports: the inputs of the model; empty if they are unknown.
        image: the axes of the model's images; None if they are unknown, or if the inputs are not images.
        preprocessing: the preprocessing of images in the model's bundle; None if there is none.
        about: further facts: an ONNX file's metadata and the inputs that are fixed to one number; for a text
            model, the folder or id of its tokenizer, the size of its vocabulary, its maximum number of
            positions, the token for padding, and a classifier's class names.
        recordings: the preprocessing of recordings in the model's bundle; None if there is none.
    """

    ports: tuple[Port, ...] = ()
    image: ImageInput | None = None
    preprocessing: Preprocessing | None = None
    about: Mapping[str, str] = MappingProxyType({})
    recordings: Mapping[str, Any] | None = None
