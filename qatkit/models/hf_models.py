"""Hugging Face's models (the extra `transformers`): `model.name=hf/NAME`, with the head that `task` requires.

    hf/vit, hf/llama                    an architecture with random weights; model.kwargs are its configuration
    hf/google/vit-base-patch16-224      an id of the hub: its configuration, and its weights if
                                        model.weights is DEFAULT or a revision (branch, tag, commit)
    hf//data/my_model, hf/./my_model    the same from a folder written by `save_pretrained`

The transformers model keeps its module paths and its state_dict, but returns only its logits: [N, classes]
for a classifier of images or texts (task=text_classification), [N, T, V] for a language model
(task=causal_lm). An encoder returns embeddings (task=text_pairs). Images are prepared as by the model's image
processor, except that pictures always keep their proportions. Text is prepared by the tokenizer next to the
weights.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qatkit.config.schema import ModelConfig
from qatkit.data.arrays import Port
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.token_rows import TOKENS, TYPES
from qatkit.data.tokenizer import LABELS, PADDING, PLACE, POSITIONS, VOCABULARY
from qatkit.former_names import present_task
from qatkit.models.declared import Declared
from qatkit.models.hf_heads import (
    CAUSAL_LM,
    ENCODER,
    HEADS,
    IMAGE_CLASSIFIER,
    TEXT_CLASSIFIER,
    Head,
    class_names,
    class_of,
    takes_of,
)
from qatkit.models.hub import how_to_fetch
from qatkit.models.image_processor import preprocessing_of
from qatkit.models.pooling import pooling_of
from qatkit_verify.errors import ConfigError, did_you_mean, first_line
from qatkit_verify.installed import install_extra

PREFIX = "hf/"
DEFAULT = "DEFAULT"
# Settings that every configuration accepts but leaves out of its dictionary.
_GENERAL = {"attn_implementation"}
_UNREAD = "pooler."  # parameters of an encoder that are not used, since its embedding is pooled differently
_LONGEST_HEADER = 100_000_000  # maximum number of bytes of a safetensors header


def of_task(task: str) -> HuggingFace:
    """Returns the source of models with the head that a task requires, by default an image classifier."""
    return HuggingFace(HEADS.get(present_task(task), IMAGE_CLASSIFIER))


class HuggingFace:
    """The source of transformers models with one kind of head; it has the methods that `qatkit.models.build` calls.

    Args:
        head: the kind of head.
    """

    def __init__(self, head: Head) -> None:
        self.head = head

    def builder(self, name: str) -> Callable[..., Any]:
        """Returns the function that builds the model `name` with random weights.

        The function's arguments change the configuration.

        Raises:
            ConfigError: transformers is not installed, or there is no such architecture or folder.
        """
        _transformers(name)
        plain = name.removeprefix(PREFIX)
        known = self._architectures()
        if "/" not in plain and plain not in known:
            near = did_you_mean(plain, known)
            allowed = f"an architecture with {self.head.title}{near}, an id of the hub or a folder"
            raise ConfigError("model.name", name, allowed)
        if _is_path(plain) and not Path(plain, "config.json").is_file():
            raise ConfigError("model.name", name, "a folder with a config.json, as save_pretrained writes it")
        return functools.partial(self._random, name)

    def pretrained(self, config: ModelConfig, classes: int | None) -> nn.Module:
        """Returns the model with the weights of the hub or of the folder.

        A classifier's head is initialised if `classes` differs from the number of classes of the weights.

        Raises:
            ConfigError: the name is unknown, or the weights cannot be fetched (the message says where to put
                them) or do not fit.
        """
        self.builder(config.name)
        revision = self._revision(config)
        kwargs = {key: value for key, value in config.kwargs.items() if key != "num_classes"}
        settings = self._settings(config.name, kwargs, revision)
        if classes is not None:
            settings.num_labels = classes
        try:
            model, report = self._loader(config.name).from_pretrained(
                config.name.removeprefix(PREFIX),
                config=settings,
                revision=revision,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except OSError as error:
            reason = _not_there(config.name, error)
            raise ConfigError("model.weights", config.weights, reason=reason) from error
        except (TypeError, ValueError, RuntimeError) as error:
            reason = f"the weights cannot be loaded into {config.name} ({first_line(error)})"
            raise ConfigError("model.weights", config.weights, reason=reason) from error
        self._check_loaded(model, report, config)
        model.fresh_head = _unloaded(report)
        return _adapted(model, self.head, config.name)

    def preprocessing(self, config: ModelConfig) -> Preprocessing | None:
        """Returns the preprocessing of the image processor of `model.weights`; None for text.

        Raises:
            ConfigError: the name is unknown, or the image processor cannot be fetched or is not supported
                here.
        """
        self.builder(config.name)
        revision = self._revision(config)
        if self.head.text:
            return None
        try:
            processor = _transformers(config.name).AutoImageProcessor.from_pretrained(
                config.name.removeprefix(PREFIX), revision=revision
            )
        except OSError as error:
            reason = _not_there(config.name, error)
            raise ConfigError("model.weights", config.weights, reason=reason) from error
        return preprocessing_of(processor, config)

    def declared(self, config: ModelConfig) -> Declared:
        """Returns the inputs, tokenizer and class names of a text model; an empty `Declared` for an image model.

        Raises:
            ConfigError: as for `builder`; or the configuration cannot be fetched, is not that of a model with this
                head, or does not fit `model.kwargs`.
        """
        if not self.head.text:
            return Declared()
        self.builder(config.name)
        plain = config.name.removeprefix(PREFIX)
        settings = self._settings(config.name, config.kwargs)
        model = class_of(self._loader(config.name), self.head, settings, config.name)
        words, positions = settings.vocab_size, getattr(settings, "max_position_embeddings", None)
        below = {TOKENS: words, TYPES: getattr(settings, "type_vocab_size", None)}
        ports = tuple(
            Port(name, "int64", (None, None), 0, ("batch", "sequence"), below.get(name), self.head.rows)
            for name in takes_of(self.head, settings, model)
        )
        padding = getattr(settings, "pad_token_id", None)
        about = {VOCABULARY: str(words)}
        about |= {} if positions is None else {POSITIONS: str(positions)}
        about |= {} if padding is None else {PADDING: str(padding)}
        about |= {} if plain in self._architectures() else {PLACE: plain}
        if self.head is TEXT_CLASSIFIER:
            about[LABELS] = json.dumps(class_names(settings, config.kwargs, config.name))
        return Declared(ports, about=about)

    def _random(self, name: str, num_classes: int | None = None, **changes: Any) -> nn.Module:
        config = self._settings(name, changes)
        if num_classes is not None:
            config.num_labels = num_classes
        config.architectures = (
            config.architectures or []
        )  # null raises a TypeError if a type has two classifiers
        try:
            model: nn.Module = self._loader(name).from_config(config, dtype=torch.float32)
        except (ImportError, RuntimeError, ArithmeticError, AttributeError) as error:
            # A configuration whose values do not fit together raises one of these somewhere in the model.
            allowed = f"arguments that {name} accepts ({first_line(error)})"
            raise ConfigError("model.kwargs", changes, allowed) from error
        return _adapted(model, self.head, name)

    def _settings(self, name: str, changes: Mapping[str, Any], revision: str | None = None) -> Any:
        """Returns the configuration of an architecture, an id or a folder, with `changes`.

        Raises:
            ConfigError: the configuration cannot be fetched, has no setting of a name in `changes`, or rejects a value.
        """
        transformers, plain = _transformers(name), name.removeprefix(PREFIX)
        from huggingface_hub.errors import StrictDataclassError

        try:
            if plain in self._architectures():
                own = transformers.CONFIG_MAPPING[plain]
                _check_names(own().to_dict() | own.attribute_map, changes, own.__name__)
                return own(**changes)
            found = transformers.AutoConfig.from_pretrained(plain, revision=revision)
            _check_names(found.to_dict() | found.attribute_map, changes, type(found).__name__)
            return transformers.AutoConfig.from_pretrained(plain, revision=revision, **changes)
        except OSError as error:
            raise ConfigError("model.name", name, reason=_not_there(name, error)) from error
        except StrictDataclassError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                "model.kwargs", dict(changes), f"arguments that {name} accepts ({reason})"
            ) from error

    def _check_loaded(self, model: Any, report: Mapping[str, Any], config: ModelConfig) -> None:
        """Checks that every parameter comes from the weights, except those of a replaceable head.

        Raises:
            ConfigError: other parameters are missing or have another shape.
        """
        body = f"{model.base_model_prefix}." if self.head.replaceable else ""
        of_head = f"{body}{_UNREAD}"  # a pooler, if the model has a body separate from the head
        wrong = [key for key in _unloaded(report) if key.startswith(body) and not key.startswith(of_head)]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            told = f"missing or of another shape: {wrong[0]}{more} (see model.kwargs)"
            raise ConfigError(
                "model.weights", config.weights, reason=f"the weights do not fit the model; {told}"
            )

    def _revision(self, config: ModelConfig) -> str | None:
        """Returns the revision that `model.weights` requests from the hub.

        Raises:
            ConfigError: the name is an architecture, which has no weights, or a folder, which has no
                revisions.
        """
        plain = config.name.removeprefix(PREFIX)
        if plain in self._architectures():
            allowed = (
                f"null, since {config.name} is an architecture without weights; to load weights, set model.name to "
                "an id of the hub such as hf/google/vit-base-patch16-224"
            )
            raise ConfigError("model.weights", config.weights, allowed)
        if _is_path(plain) and config.weights != DEFAULT:
            allowed = f"{DEFAULT} or null for a folder, which has no revisions"
            raise ConfigError("model.weights", config.weights, allowed)
        return None if config.weights == DEFAULT else config.weights

    def _loader(self, name: str) -> Any:
        return getattr(_transformers(name), self.head.loader)

    def _architectures(self) -> list[str]:
        """Returns the names of the model types that have this head."""
        from transformers.models.auto import modeling_auto

        return list(getattr(modeling_auto, self.head.mapping))


def _unloaded(report: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parameters that affect the outputs but were not in the weights."""
    keys = {*report["missing_keys"], *(mismatch[0] for mismatch in report["mismatched_keys"])}
    return sorted(key for key in keys if not key.startswith(_UNREAD))


def parameters(config: ModelConfig) -> int | None:
    """Returns the number of parameters in a folder's weights, from safetensors headers.

    None if no weights are requested, or there is no such file or a damaged one.
    """
    folder = Path(config.name.removeprefix(PREFIX))
    files = sorted(folder.glob("*.safetensors")) if config.name.startswith(PREFIX) else []
    if config.weights is None or not files:
        return None
    try:
        return sum(int(math.prod(one["shape"])) for file in files for one in _entries(file))
    except (OSError, ValueError, KeyError, TypeError):  # reported when the file is read
        return None


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of a safetensors file's tensors; only the header is read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
    yield from (one for name, one in header.items() if name != "__metadata__")


def _check_names(known: Iterable[str], changes: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError for unknown names, which a configuration would accept and ignore."""
    names = {*known, *_GENERAL}
    for key, value in changes.items():
        if key not in names:
            reason = f"{what} has no such setting{did_you_mean(key, names)}"
            raise ConfigError(f"model.kwargs.{key}", value, reason=reason)


def _adapted(model: nn.Module, head: Head, name: str) -> nn.Module:
    """Returns `model` with a forward that accepts the head's inputs and returns a tensor, not a ModelOutput.

    The model's type becomes a subclass of its own type, so that module paths and state_dict stay the same.

    Raises:
        ConfigError: the model's forward does not accept these inputs (ImageGPT's accepts colour indices).
    """
    theirs: Any = type(model)
    missing = [one for one in head.takes if one not in inspect.signature(theirs.forward).parameters]
    if missing:
        what = "a text" if head.text else "an image"
        allowed = f"{what} model whose forward accepts {missing[0]}; {theirs.__name__}.forward does not"
        raise ConfigError("model.name", name, allowed)

    def of_pixels(self: nn.Module, pixel_values: Tensor) -> Tensor:
        logits: Tensor = theirs.forward(self, pixel_values=pixel_values).logits
        return logits

    def of_tokens(self: nn.Module, input_ids: Tensor) -> Tensor:
        logits: Tensor = theirs.forward(self, input_ids=input_ids, use_cache=False).logits
        return logits

    def of_texts(self: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = theirs.forward(self, input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    def of_pairs(
        self: nn.Module, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> Tensor:
        found = theirs.forward(
            self, input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )
        logits: Tensor = found.logits
        return logits

    def of_sentences(self: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = theirs.forward(self, input_ids=input_ids, attention_mask=attention_mask)
        return pooled(found.last_hidden_state, attention_mask)

    if head is ENCODER:
        pooled = pooling_of(name.removeprefix(PREFIX))
    texts = of_pairs if TYPES in takes_of(head, model.config, theirs) else of_texts
    known = {ENCODER: of_sentences, CAUSAL_LM: of_tokens, TEXT_CLASSIFIER: texts}
    forward = known.get(head, of_pixels)
    members = {"forward": forward, "__module__": theirs.__module__, "__doc__": theirs.__doc__}
    model.__class__ = type(theirs.__name__, (theirs,), members)
    return model


def _is_path(plain: str) -> bool:
    return plain.startswith(("/", ".", "~")) or Path(plain).is_dir()


def _not_there(name: str, error: BaseException) -> str:
    plain = name.removeprefix(PREFIX)
    if _is_path(plain):
        reason = first_line(error)[:120]
        return f"expected a folder written by save_pretrained of the model and of its processor or tokenizer ({reason})"
    return how_to_fetch(plain, error)


def _transformers(name: str) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        reason = f"the model needs the extra transformers; install it with {install_extra('transformers')} ({error})"
        raise ConfigError("model.name", name, reason=reason) from error
    found: ModuleType = transformers
    return found
