"""Checks the folders of the project's data sources, so that a missing one is reported before torch is imported."""

from __future__ import annotations

from pathlib import Path

from qatkit_verify.errors import ConfigError

# The required contents of each source's folder, by the dotted path of the source.
FOLDERS = {
    "qatkit.data.image_folder": "a folder with train/CLASS/* and val/CLASS/* (or test/CLASS/*) images",
    "qatkit.data.one_picture_each": "a folder with at least two pictures (jpg or png), one per class",
    "qatkit.data.pictures": (
        "a folder with at least two pictures (jpg, png, webp, bmp, ...) in it or in its subfolders"
    ),
    "qatkit.data.arrays.arrays": (
        "a folder of .npz or .npy files, whose arrays are named after the model's inputs"
    ),
    "qatkit.data.label_pictures.label_pictures": (
        "a folder with pictures and label pictures of the same names: train/ and train_labels/, test/ and test_labels/ "
        "(or val), or images/train and labels/train, and so on (masks, annotations)"
    ),
    "qatkit.data.pictures_with_values.pictures_with_values": (
        "a folder of pictures with a targets.csv (columns file and value): at least one picture for training and one "
        "for verification, or one in each of train/ and test/"
    ),
    "qatkit.data.segmentation_sets.voc_segmentation": (
        "a folder with VOCdevkit/VOC2012 (or an empty one with data.download=true, which fetches 2 GB)"
    ),
    "qatkit.data.segmentation_sets.cityscapes": "a folder with Cityscapes' leftImg8bit/ and gtFine/",
    "qatkit.data.boxed_pictures.voc_boxes": (
        "a folder with JPEGImages/NAME.jpg, Annotations/NAME.xml and ImageSets/Main/train.txt (or trainval.txt) and "
        "test.txt (or val.txt), as in Pascal VOC, or a folder that contains only this folder"
    ),
    "qatkit.data.boxed_pictures.coco_boxes": (
        "a folder with annotations/instances_train*.json and instances_val*.json next to folders of pictures, as in "
        "COCO, or with train/_annotations.coco.json and test/_annotations.coco.json (or valid) next to the pictures"
    ),
    "qatkit.data.labelled_text.labelled_text": (
        "a folder of .tsv, .csv or .jsonl files with texts and labels (files with 'test' in their names for "
        "verification, at least one other for calibration), or a folder with train/CLASS/*.txt and test/CLASS/*.txt"
    ),
    "qatkit.data.sentence_pairs.sentence_pairs": (
        "a folder of .tsv files with pairs of sentences and scores (files with 'test' in their names for "
        "verification, at least one other for calibration)"
    ),
    "qatkit.data.spoken_digits.spoken_digits": (
        "a folder with LABEL_SPEAKER_N.wav recordings (N from 0 to 4 for verification, others for training)"
    ),
    "qatkit.data.speech_commands.speech_commands": "a folder with CLASS/*.wav recordings, as in Speech Commands",
    "qatkit.data.text.text": (
        "a folder of .txt files (files with 'test' in their names for verification, "
        "others for calibration and training)"
    ),
}


def data_folder(source: str, root: str | None) -> Path:
    """Returns the folder of a source that is listed in `FOLDERS`.

    Raises:
        ConfigError: the folder is missing: `root` is None, or no such folder exists.
    """
    if root is None or not Path(root).is_dir():
        found = "" if root is None else "; there is no such folder"
        raise ConfigError("data.root", root, f"{FOLDERS[source]}{found}")
    return Path(root)
