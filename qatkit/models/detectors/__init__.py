"""Detectors: pixels in, boxes and scores out, with the arithmetic of boxes in the graph.

detector.py             `Detector`: the outputs and the loss of a detector of task=detection
torchvision_detectors.py  torchvision's SSD, SSDlite, RetinaNet and FCOS, with their own losses
yolox.py                YOLOX by the names of its own checkpoints; yolox_loss.py assigns boxes to its cells
"""
