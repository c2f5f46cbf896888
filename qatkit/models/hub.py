"""Advice for when the Hugging Face hub cannot be reached, shared by all sources that need it."""

from __future__ import annotations

from qatkit_verify.errors import first_line


def how_to_fetch(repository: str, error: BaseException) -> str:
    """Returns why `repository` ("google/vit-base-patch16-224") is missing, and how to fetch it elsewhere."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = f"models--{repository.replace('/', '--')}"
    return (
        f"it cannot be fetched ({first_line(error)[:120]}); where there is a network run `hf download {repository}`, "
        f"then copy the folder {folder} of its cache into {HF_HUB_CACHE}"
    )
