"""Mixed precision: the choice of float and int8 operators that keeps most accuracy for the time it costs.

layout     the remaining quantization where a set of operators is float, and the borders where types change
costs      milliseconds of such a set, from profiles of a few files on this machine, corrected by later files
simulate   the loss of such a set, by a run of the int8 module with all other quantizers turned off
front      sets on the front of predicted loss and predicted time; the choice of a point on a measured front
search     files that decide between the predicted sets; mixtures makes their modules
chosen     the operators that an earlier front or this run keeps in float
mixed      the stage of a run

The same choice for the bits of weights instead of float and int8, as an algorithm:

mixed_bits       settings
bit_allocation   bits of each weight
"""
