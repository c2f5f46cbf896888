"""Advice for users who cannot reach the Hugging Face hub, shared by all sources that need it."""

from __future__ import annotations

from qatkit_verify.errors import first_line


def how_to_fetch(repository: str, error: BaseException) -> str:
    """Returns the reason why `repository` ("google/vit-base-patch16-224") is missing, and how to fetch it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = f"models--{repository.replace('/', '--')}"
    return (
        f"{repository} cannot be fetched ({first_line(error)[:120]}); run `hf download {repository}` on a machine with "
        f"network access, then copy the folder {folder} from its cache into {HF_HUB_CACHE}"
    )
