"""The tokenizer of a text model, from a tokenizer.json, or from a folder or id that transformers can convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import write_text
from qatkit_verify.installed import install_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from qatkit.config.schema import DataConfig

KEY = "data.tokenizer"
# Keys of the facts declared by a text model.
PLACE, VOCABULARY, POSITIONS, PADDING, LABELS = "tokenizer", "vocabulary", "positions", "padding", "labels"
_CONFIG = "tokenizer_config.json"
_LEAST = 0.9  # minimum share of the model's vocabulary, which is often padded by a few percent


def tokenizer_of(settings: DataConfig, about: Mapping[str, str]) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names or, if it is null, the model's own.

    Args:
        settings: the data group.
        about: facts that the model declares: the folder or id of its tokenizer, and its number of tokens.

    Raises:
        ConfigError: neither the setting nor the model names a tokenizer, or the tokenizer cannot be read,
            belongs to another model, or needs a package that is missing.
    """
    place = settings.tokenizer or about.get(PLACE)
    if place is None:
        raise ConfigError(KEY, None, "a folder with a tokenizer.json, since the model comes without one")
    found = _read(place)
    size = found.get_vocab_size(with_added_tokens=True)
    words = int(about.get(VOCABULARY, size))
    if not _LEAST * words <= size <= words:
        allowed = f"the tokenizer of this model, which has {words:,} tokens; the given one has {size:,}"
        raise ConfigError(KEY, place, allowed)
    return found


def save_tokenizer(settings: DataConfig, about: Mapping[str, str], folder: Path) -> None:
    """Writes the tokenizer of `tokenizer_of` as tokenizer.json and tokenizer_config.json, which runtimes read."""
    tokenizer_of(settings, about).save(str(folder / "tokenizer.json"))
    beside = Path(settings.tokenizer or about.get(PLACE, ""), _CONFIG)
    if beside.is_file():
        shutil.copyfile(beside, folder / _CONFIG)
    else:
        write_text(folder / _CONFIG, json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")


def _read(place: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        reason = (
            f"text needs the extra transformers; install it with {install_extra('transformers')} ({error})"
        )
        raise ConfigError(KEY, place, reason=reason) from error
    file = Path(place, "tokenizer.json") if Path(place).is_dir() else Path(place)
    try:
        if file.is_file():
            found: Tokenizer = Tokenizer.from_file(str(file))
            found.no_truncation()  # a sentence encoder's folder may set it, but texts are cut into windows
            found.no_padding()
            return found
        from transformers import AutoTokenizer

        made: Tokenizer = AutoTokenizer.from_pretrained(place).backend_tokenizer
    except Exception as error:  # tokenizers raises bare Exceptions
        told = f"the tokenizer can't be read ({first_line(error)[:160]})"
        reason = f"{told}; set {KEY} to a folder with a tokenizer.json"
        raise ConfigError(KEY, place, reason=reason) from error
    return made
