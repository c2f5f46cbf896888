"""Compares a detector's file that includes non-maximum suppression with PyTorch.

PyTorch suppresses the boxes that the detector's file without suppression returns.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from qatkit.records.detections import METADATA_KEY, Suppression, nms_file
from qatkit.records.fixes import Fix
from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit_verify.errors import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qatkit.config.schema import VerifyConfig
    from qatkit.tasks.decisions.matched_boxes import Boxes

_SAME = 0.99  # minimum overlap of boxes that count as the same, and minimum share of such boxes


class DetectionsCheck(Check):
    """The share of boxes that the file with suppression and PyTorch have in common; the bound is 99 %.

    Two boxes count as the same if they overlap by at least 99 %.
    """

    name = "detections"

    def measure(self, subject: Subject, results: Results) -> Results:
        path = nms_file(subject.files["int8"])
        if not subject.task.boxes or not path.is_file():
            return results
        from qatkit.tasks.decisions.matched_boxes import matches
        from qatkit_verify.session import open_session, run_outputs

        sessions = [
            open_session(one, threads=subject.settings.threads, options=subject.options)
            for one in (subject.files["int8"], path)
        ]
        how = Suppression(**json.loads(sessions[1].get_modelmeta().custom_metadata_map[METADATA_KEY]))
        matched = both = pictures = 0
        for images in subject.first_images(subject.settings.parity_images):
            boxes, scores = run_outputs(sessions[0], images)
            rows = run_outputs(sessions[1], images)[0]
            for place in range(len(boxes)):
                wanted = _suppressed(boxes[place], scores[place], how)
                found = _of_rows(rows[rows[:, 0] == place])
                matched += matches(wanted, found, _SAME)
                both += wanted.count + found.count
            pictures += len(boxes)
        figures = {"file": path.name, "images": pictures, "boxes": both, "matched": matched}
        return results.with_measured(self.name, figures)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        found = results.measured.get(self.name)
        if found is None or _share(found) >= _SAME:
            return []
        share = f"{100 * _share(found):.2f} % of the boxes of {found['file']}"
        line = f"export.nms: {share} match PyTorch's, less than 99 %"
        return [
            Shortfall(line, [Fix(("export.nms=false",), "then there is only the file of boxes and scores")])
        ]

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(self.name)
        if found is None:
            return []
        if not found["boxes"]:
            where = f"no box on {counted(found['images'], 'image')}"
            return [f"detections ({found['file']}): {where} has a score above export.nms_score"]
        return [
            f"detections ({found['file']}): {100 * _share(found):.2f} % of {found['boxes'] // 2:,} boxes on"
            f" {counted(found['images'], 'image')} match those of PyTorch's non-maximum suppression (IoU {_SAME:g})"
        ]


def _share(found: dict[str, Any]) -> float:
    return 2 * found["matched"] / found["boxes"] if found["boxes"] else 1.0


def _suppressed(boxes: NDArray[Any], scores: NDArray[Any], how: Suppression) -> Boxes:
    """Returns the boxes of one picture that PyTorch keeps, best first."""
    import numpy as np
    import torch
    from torchvision.ops import nms

    from qatkit.tasks.decisions.matched_boxes import Boxes

    corners, labels, kept_scores = [], [], []
    for label, own in enumerate(scores.T):
        above = np.flatnonzero(own > how.score)
        kept = nms(torch.from_numpy(boxes[above]), torch.from_numpy(own[above]), how.overlap)
        chosen = above[kept.numpy()[: how.boxes]]
        corners.append(boxes[chosen])
        kept_scores.append(own[chosen])
        labels.append(np.full(len(chosen), label))
    order = np.argsort(-np.concatenate(kept_scores), kind="stable")
    return Boxes(
        np.concatenate(corners).astype(np.float64)[order],
        np.concatenate(kept_scores).astype(np.float64)[order],
        np.concatenate(labels)[order],
    )


def _of_rows(rows: NDArray[Any]) -> Boxes:
    import numpy as np

    from qatkit.tasks.decisions.matched_boxes import Boxes

    rows = rows[np.argsort(-rows[:, 5], kind="stable")].astype(np.float64)
    return Boxes(rows[:, 1:5], rows[:, 5], rows[:, 6].astype(np.int64))
