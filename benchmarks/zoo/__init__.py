"""The models that `benchmarks/coverage.py --all` takes through the chain, instead of torchvision's classifiers.

Each is an `Entry`: a name, a builder with random weights, and its inputs. They are small (a few blocks, inputs of
32 to 96 pixels where the architecture allows it), since the question is whether qatkit handles the way in which a
model is written, which depends neither on its size nor on its training.

    timm_models     one small variant of each architecture family of timm
    hf_models       Hugging Face: vision, text and speech
    hf_recent       Hugging Face: families of 2025 and 2026
    smp_models      segmentation_models_pytorch: every decoder, several encoders
    vision_models   torchvision without its classifiers: segmentation, video, optical flow, parts of detectors
    einops_models   transformers written with einops (vit-pytorch)
    odd_*           our own models, in the various styles in which users write models
"""

from __future__ import annotations

from importlib import import_module

from zoo.entry import Entry

GROUPS = {
    "timm": ("timm_models",),
    "hf": ("hf_models", "hf_recent"),
    "smp": ("smp_models",),
    "vision": ("vision_models",),
    "einops": ("einops_models",),
    "odd": ("odd_branches", "odd_weights", "odd_weights2", "odd_inplace", "odd_vision", "odd_blocks", "odd_necks",
            "odd_attention", "odd_sequences", "odd_signatures", "odd_layers", "odd_refused",
            "odd_research", "odd_research2", "odd_users", "odd_masks",
            "odd_papers", "odd_recent_text", "odd_recurrences", "odd_recent_detectors",
            "odd_recent_vision", "odd_recent_sound", "odd_recent_tables"),
}  # fmt: skip


def entries(group: str) -> list[Entry]:
    """Returns all models of a group, in the order of their modules.

    Raises:
        ImportError: a package that the group needs is not installed.
    """
    found = []
    for module in GROUPS[group]:
        found += import_module(f"zoo.{module}").ENTRIES
    return found


def find(name: str) -> Entry:
    """Returns the model called "group/name".

    Raises:
        KeyError: there is no such model.
    """
    return {entry.name: entry for entry in entries(name.split("/")[0])}[name]
