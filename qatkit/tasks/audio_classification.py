"""The task of classifying recordings: logits [N, classes] against labels [N].

samples [T] ── features ── model ──> logits [N, classes] ── argmax ──> class
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from qatkit.config.schema.model import SOUND_AUGMENTATIONS
from qatkit.tasks.classification import Classification
from qatkit_verify.classification import TOP1, TOP5
from qatkit_verify.records import TaskNames

if TYPE_CHECKING:
    from qatkit.tasks.drawing import Drawing


class AudioClassification(Classification):
    """Classification of recordings with cross entropy, top-1 and top-5.

    Two models agree if they predict the same class.
    """

    names = TaskNames(
        "audio_classification",
        "audio classification",
        (TOP1, TOP5),
        "top-1 class",
        "logits",
        samples="recordings",
    )
    augmentations: ClassVar = ("none", *SOUND_AUGMENTATIONS)

    def drawing(self) -> Drawing:
        from qatkit.tasks.spectrograms import Spectrograms

        return Spectrograms()
