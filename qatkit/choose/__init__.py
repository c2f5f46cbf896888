"""Choices made by measurement: candidates are exported, and their files are compared in ONNX Runtime.

Accuracy is measured on held-out images.

ranges, tournament   activation ranges, and the contest between calibration methods
algorithms           algorithm_choice=auto
precision/           precision=auto: operators that stay float for accuracy
placement/           placement=measured: operators that stay float for speed
epochs               verify.every: the best epoch of a fine-tuning
climb                rescue=ladder: the rule that decides which rung to build on
contest              the comparison: entrants, a judge, and a rule that keeps one entrant
judge, verdict       the results of files on held-out images, and the noise of the results
"""
