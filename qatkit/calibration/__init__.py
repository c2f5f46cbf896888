"""Calibration: activation ranges from real images, before any fine-tuning.

observe      one pass over the images, every FakeQuantize observing
candidates   the ranges that the same pass offers for each tensor, and the choice of the best one
cache        the statistics in a file: a second run needs no pass
checks       whether there were enough images, and some of every class
"""

from qatkit.calibration.observe import calibrate, calibrate_parts

__all__ = ["calibrate", "calibrate_parts"]
