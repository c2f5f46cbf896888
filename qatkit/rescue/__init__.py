"""The ladder that a model climbs back to its float accuracy: its rungs, and what each came to.

    rungs      each rung as a change of the configuration
    records    what a rung came to, and the table of them: plain, for reports

`qatkit.run.rescue` climbs: every rung is a whole run in a folder of its own.
"""
