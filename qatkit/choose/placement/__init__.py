"""Measured placement: which operators of a model are int8, by the latency on the machine that will run it.

operators, tensors and the time of each ── cut ──> the cheapest placement ── choices ──> sites that differ
from the backend's table ── record ──> placement.json
"""
