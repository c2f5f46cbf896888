"""Mixed precision: chooses float and int8 operators with the best accuracy for their latency.

layout     the remaining quantization for a set of float operators, and the borders where types change
costs      the latency with such a set, from profiles of a few files on this machine, corrected by later files
simulate   the loss with such a set, by a run of the int8 module without the quantizers of these operators
front      sets on the Pareto front of predicted loss and latency; the choice of a point on a measured front
search     files that decide between the predicted sets
mixtures   the modules from which these files are exported
chosen     the operators that an earlier front or this run keeps in float
mixed      the stage of a run in which the set is chosen

The same choice for the bit widths of weights instead of float and int8, as an algorithm:

mixed_bits       the settings
bit_allocation   the bits of each weight
"""
