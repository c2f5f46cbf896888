"""Measured placement: which operators of a model are int8, by the clock of the machine that will run it.

operators, tensors and what each takes ── cut ──> the cheapest placement ── choices ──> sites that are another
than in the backend's table ── record ──> placement.json
"""
