"""Mixed precision: which operators are float and which int8, so that the most accuracy is kept for the time it costs.

layout     what is left of quantization where a set of operators is float, and the borders where types change
costs      milliseconds of such a set, from profiles of a few files on this machine, corrected by later files
simulate   the loss of such a set, by a run of the int8 module with all else turned off
front      sets on the front of predicted loss and predicted time; which point of a measured front is taken
search     files that decide between the predicted sets; mixtures makes their modules
chosen     the operators that an earlier front or this run keeps in float
mixed      the stage of a run

Of weights alone, in the place of float and int8 (an algorithm, beside those that round):

mixed_bits       settings
bit_allocation   which weight gets how many bits
"""
