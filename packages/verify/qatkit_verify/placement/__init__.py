"""Measures on this machine which operators of a model should run in int8 and which in float (the placement).

record   placement.json
sites    the operators that a placement changes
machine  the description of this machine
quiet    the timing of files while the machine does nothing else
decide   the choice of the fastest file
measure  the command `qatkit-measure`
"""
