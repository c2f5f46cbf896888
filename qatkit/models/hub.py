"""What to do where the Hugging Face hub can't be reached: one sentence for every source that needs it."""

from __future__ import annotations

from qatkit_verify.errors import first_line


def how_to_fetch(repository: str, error: BaseException) -> str:
    """Why `repository` ("google/vit-base-patch16-224") isn't here, what to run elsewhere, and where to put it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = f"models--{repository.replace('/', '--')}"
    return (
        f"it cannot be fetched ({first_line(error)[:120]}); where there is a network run `hf download {repository}`, "
        f"then copy the folder {folder} of its cache into {HF_HUB_CACHE}"
    )
