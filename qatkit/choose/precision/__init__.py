"""Mixed precision: chooses float and int8 operators with the best accuracy for their latency.

layout     the remaining quantization for a set of float operators, and the borders where types change
costs      the milliseconds of such a set, from profiles of a few files on this machine, corrected by later files
simulate   the loss of such a set, by a run of the int8 module without the quantizers of these operators
front      sets on the front of predicted loss and predicted time; the choice of a point on a measured front
search     files that decide between the predicted sets; mixtures builds their modules
chosen     the operators that an earlier front or this run keeps in float
mixed      the stage of a run

The same choice for the bit widths of weights instead of float and int8, as an algorithm:

mixed_bits       the settings
bit_allocation   the bits of each weight
"""
