"""Calibration: activation ranges from real images, before any fine-tuning.

observe      one pass over the images, every FakeQuantize observing
candidates   what the same pass offers each tensor, and which of it serves the operators behind best
cache        what was seen, in a file: a second run needs no pass
checks       whether there were images enough, and of every class
"""

from qatkit.calibration.observe import calibrate, calibrate_parts

__all__ = ["calibrate", "calibrate_parts"]
