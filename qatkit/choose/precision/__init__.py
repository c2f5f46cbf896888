"""Mixed precision: chooses which operators are float and which int8, by accuracy and latency.

layout     the remaining quantization for a set of float operators, and the borders where types change
costs      the latency with such a set, from profiles of a few files on this machine, corrected by later files
simulate   the loss with such a set, by a run of the int8 module without the quantizers of these operators
front      sets on the Pareto front of predicted loss and latency; the choice of a point on a measured front
search     files that decide between the predicted sets
mixtures   the modules from which these files are exported
chosen     the operators that stay float, from the front of an earlier run or from this run's search
mixed      the stage of a run in which the set is chosen

The same choice for the bit widths of weights instead of float and int8, as an algorithm:

mixed_bits       the settings
bit_allocation   the bits of each weight
"""
