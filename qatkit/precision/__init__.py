"""Mixed precision: which operators are float and which int8, so that the most accuracy is kept for the time it costs.

layout     what is left of quantization where a set of operators is float, and the borders where types change
costs      milliseconds of such a set, from profiles of a few files on this machine, corrected by those made since
simulate   the loss of such a set, by a run of the int8 module with all else turned off
choose     sets on the front of predicted loss and predicted time; which point of a measured front is taken
records    the front, plain

Nothing here trains, exports or knows the configuration: `qatkit.run.mixed` is the stage.
"""
