"""The heads of Hugging Face models, one record for each task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qatkit.data.token_rows import MASK, TOKENS, TYPES
from qatkit_verify.errors import ConfigError


@dataclass(frozen=True)
class Head:
    """A kind of head of transformers models, as a task requires it.

    Attributes:
        title: the name of a model with the head, in messages.
        loader: name of the class in transformers that loads models with the head.
        mapping: name of the mapping in transformers' modeling_auto that lists the architectures with the
            head.
        takes: names of the arguments of forward that are inputs of the model.
        text: whether the inputs are tokens.
        replaceable: whether its weights may be missing; they are then initialised.
        rows: number of input rows of a sample.
        pairs: whether two texts may be read together; token types distinguish them if the model has several.
    """

    title: str
    loader: str
    mapping: str
    takes: tuple[str, ...]
    text: bool = True
    replaceable: bool = False
    rows: int = 1
    pairs: bool = False


IMAGE_CLASSIFIER = Head(
    "an image classifier",
    "AutoModelForImageClassification",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ("pixel_values",),
    text=False,
    replaceable=True,
)
TEXT_CLASSIFIER = Head(
    "a text classifier",
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    (TOKENS, MASK),
    replaceable=True,
    pairs=True,
)
ENCODER = Head("an encoder of text", "AutoModel", "MODEL_MAPPING_NAMES", (TOKENS, MASK), rows=2)
CAUSAL_LM = Head(
    "a causal language model", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", (TOKENS,)
)
HEADS = {"causal_lm": CAUSAL_LM, "text_classification": TEXT_CLASSIFIER, "text_pairs": ENCODER}


def class_names(settings: Any, changes: Mapping[str, Any], name: str) -> list[str]:
    """Returns the class names of a configuration.

    The result is empty unless the configuration is that of a text classifier or `changes` sets the names: other
    configurations have two default classes without meaning.

    Raises:
        ConfigError: the model does not choose one of several classes, or does not name all of them.
    """
    made_for = getattr(settings, "architectures", None) or ()
    if "id2label" not in changes and not any(one.endswith("ForSequenceClassification") for one in made_for):
        return []
    names = settings.id2label
    if sorted(names) != list(range(len(names))):
        allowed = f"a name for each number from 0 to {len(names) - 1}"
        raise ConfigError("model.kwargs.id2label", dict(names), allowed)
    kind = getattr(settings, "problem_type", None)
    if len(names) < 2 or kind not in (None, "single_label_classification"):
        does = "returns a score" if len(names) < 2 else f"is for {kind}"
        raise ConfigError(
            "model.name", name, f"a model that chooses one of several classes; the given one {does}"
        )
    return [str(names[number]) for number in range(len(names))]


def class_of(loader: Any, head: Head, settings: Any, name: str) -> type:
    """Returns the transformers class that has the head and builds a model from the configuration `settings`.

    Raises:
        ConfigError: the model type has no such head, or is not a text model.
    """
    known = loader._model_mapping
    if type(settings) not in known or getattr(settings, "vocab_size", None) is None:
        kind = settings.model_type
        raise ConfigError("model.name", name, f"{head.title}; transformers has none for the type {kind}")
    found = known[type(settings)]
    made: type = found[0] if isinstance(found, tuple) else found
    return made


def takes_of(head: Head, settings: Any, model: type) -> tuple[str, ...]:
    """Returns the names of a model's inputs: those of the head, and token types if the model has several."""
    several = head.pairs and (getattr(settings, "type_vocab_size", None) or 0) > 1
    known = inspect.signature(model.forward).parameters  # type: ignore[attr-defined]
    return (*head.takes, TYPES) if several and TYPES in known else head.takes
