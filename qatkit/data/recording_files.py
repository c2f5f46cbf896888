"""Splits of sound files with class names; all files are read before any long work."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.config.schema import DataConfig
from qatkit.data.recordings import recordings_of
from qatkit.data.request import Request
from qatkit.data.sound_survey import Recording, SoundSurvey, repeated_note, resampling_note, samples_of
from qatkit.data.sources import Splits
from qatkit_verify.errors import ConfigError
from qatkit_verify.sound_files import Samples

Named = Sequence[tuple[str, str]]  # (path, name of the class)
_SHOWN = 5


class RecordingFiles:
    """A dataset of recordings; an item is (samples [T] in -1..1, label).

    Args:
        files: recordings with their labels.
        rate: the sampling rate in Hz to which samples are converted.

    Attributes:
        targets: the label of each recording.
    """

    def __init__(self, files: Sequence[tuple[Recording, int]], rate: int) -> None:
        self.files, self.rate = [file for file, _ in files], rate
        self.targets = [label for _, label in files]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Samples, int]:
        file = self.files[index]
        samples = file.kept if file.kept is not None else samples_of(file.path, self.rate).samples
        return samples, self.targets[index]


def recording_splits(
    root: str, train: Named, test: Named, request: Request, notes: Sequence[str] = ()
) -> Splits:
    """Returns the splits of labelled sound files.

    Args:
        root: folder of the files, for messages.
        train, test: files of each split.
        request: the request; its settings define the length and the rate of recordings.
        notes: lines for the report.

    Raises:
        ConfigError: there is only one class; a split has no usable file of a class; a file is unusable with
            data.bad=refuse; a FLAC file needs an extra that is not installed; or settings do not fit
            recordings (`recordings_of`).
    """
    classes = _classes(root, train, test)
    settings: DataConfig = request.settings
    prepared = recordings_of(settings)
    rate, labels = prepared.sound.rate, {name: label for label, name in enumerate(classes)}
    survey = SoundSurvey(root, rate, prepared.sound.window, settings.bad)
    parts = list[RecordingFiles]()
    for name, files in (("train", train), ("test", test)):
        found = survey.usable([path for path, _ in files])
        by_path = {file.path: file for file in found}
        kept = [(by_path[path], labels[label]) for path, label in files if path in by_path]
        lost = sorted({label for _, label in files} - {classes[label] for _, label in kept})
        if lost:
            raise ConfigError(
                "data.root", root, f"usable recordings of every class; {name} has none of {_few(lost)}"
            )
        parts.append(RecordingFiles(kept, rate))
    first, second = (part.files for part in parts)
    long = sum(file.count > prepared.sound.samples for file in (*first, *second))
    cut = (
        [
            f"recordings cut off because they are longer than data.seconds: {long} of {len(first) + len(second)}"
        ]
        if long
        else []
    )
    told = [
        *notes,
        *resampling_note([*first, *second], rate),
        *cut,
        *survey.notes(),
        *repeated_note(first, second),
    ]
    return Splits(parts[0], parts[1], classes, notes=tuple(told), recordings=True)


def _classes(root: str, train: Named, test: Named) -> tuple[str, ...]:
    """Returns the names of the classes, sorted.

    Raises:
        ConfigError: the classes of the splits differ, or there is only one class.
    """
    mine, other = ({label for _, label in part} for part in (train, test))
    if mine != other:
        parts = [
            f"only {name} has {_few(sorted(own))}"
            for name, own in (("train", mine - other), ("test", other - mine))
            if own
        ]
        raise ConfigError("data.root", root, f"the same classes in both splits; {', and '.join(parts)}")
    if len(mine) < 2:
        raise ConfigError(
            "data.root",
            root,
            f"recordings of at least two classes; all are of the class {_few(sorted(mine))}",
        )
    return tuple(sorted(mine))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
