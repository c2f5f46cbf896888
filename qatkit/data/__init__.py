"""Data sources, preprocessing and loaders: from samples to normalised batches, in small replaceable parts.

- `sources`: functions `(root, download, seed) -> Splits` that return images and labels.
- `image_files`, `survey`: image files, read within limits and checked before any long work.
- `preprocessing`: one immutable `Preprocessing` (size, mean, std) that turns pixels into the model's input,
  in evaluation, in training (with augmentation) and, as JSON in the bundle, in production.
- `arrays`: samples as mappings from the names of a model's inputs to arrays. `rollout`: the same samples with
  the states that the float file computed, for a model that feeds outputs back into its next step.
- `audio`: frames of WAV and FLAC files; `drawn`: random samples for the inputs that a file declares.
- `recordings`: features of labelled recordings, which come from `spoken_digits`, `speech_commands` or `tones`.
- `loading`: loaders that work on whole batches and whose position in an epoch can be saved and restored.
- `prepared_splits`: the checked and capped splits of a run, built from the parts above.
- `module`: the `DataModule`, which reads batches from these splits for Lightning, calibration and
  verification.

A source of your own is any importable function with the signature above, given as `data.source`:

    def my_source(root: str | None, download: bool, seed: int) -> qatkit.data.Splits:
        return Splits(train=..., test=..., classes=("cat", "dog"))

`train` and `test` are map-style datasets whose items are `(image, label)`: a PIL image or a uint8 tensor
(channels, height, width), and an int below `len(classes)`. Tasks other than classification have other targets
(`qatkit.tasks`). Each dataset has an attribute `targets` with all its labels, like torchvision's datasets, so
that balanced subsets can be chosen without opening every image. A source whose function has a parameter
`request` receives the model's inputs (`qatkit.data.request.Request`). A source without labels has no classes,
and each of its targets is `NO_LABEL`. For image files, use the dataset `ImageFiles(samples)`: unreadable
files are then found before any long work.
"""

from qatkit.data.image_files import ImageFiles
from qatkit.data.module import DataModule
from qatkit.data.picture_folders import one_picture_each, pictures
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.sources import (
    NO_LABEL,
    ImageDataset,
    Splits,
    TensorImages,
    cifar10,
    digits,
    fashion_mnist,
    image_folder,
    synthetic,
)

__all__ = [
    "NO_LABEL",
    "DataModule",
    "ImageDataset",
    "ImageFiles",
    "Preprocessing",
    "Splits",
    "TensorImages",
    "cifar10",
    "digits",
    "fashion_mnist",
    "image_folder",
    "one_picture_each",
    "pictures",
    "synthetic",
]
