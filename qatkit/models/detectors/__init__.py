"""Detectors that compute boxes and scores from pixels; the arithmetic of boxes is part of the graph.

detector.py               `Detector`: the outputs and the loss of a detector for task=detection
torchvision_detectors.py  torchvision's SSD, SSDlite, RetinaNet and FCOS, with their own losses
two_stages.py             torchvision's Faster R-CNN, with its own losses
yolox.py                  YOLOX with the names of its own checkpoints; yolox_loss.py assigns boxes to its cells
"""
