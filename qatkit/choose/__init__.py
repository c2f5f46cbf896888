"""Choices made by measurement: candidates become files, and ONNX Runtime decides on held-out images.

ranges, tournament   activation ranges, and the contest between calibration methods
algorithms           algorithm_choice=auto
precision/           precision=auto: operators that stay float for accuracy
placement/           placement=measured: operators that stay float for speed
epochs               verify.every: the epoch of a fine-tuning
climb                rescue=ladder: the rule that decides which rung to build on
contest              the engine: entrants, a judge, a rule that keeps one of them
judge, verdict       files on held-out images; the results of each, and their noise
"""
