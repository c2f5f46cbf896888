"""Finds activation ranges from real images (calibration), before any fine-tuning.

observe       passes the images through the graph once while every FakeQuantize observes
candidates    computes several ranges per tensor from the same pass, and chooses the best one
cache         stores the statistics in a file, so that a second run needs no pass
checks        reports whether there were too few images, or none of some class
limits        cuts off the parts of ranges in which the results of the next functions do not change
mixed_scales  finds tensors that need more than one scale
losses        classes for the results of mixed_scales
reach         finds the nodes that reach outputs and logarithms
"""

from qatkit.calibration.observe import calibrate, calibrate_parts

__all__ = ["calibrate", "calibrate_parts"]
