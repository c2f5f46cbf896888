"""The bundle, which leaves the house: its files (`manifest`), as a folder or a zip (`archive`), who made it
(`signature`), and what the model must answer (`golden`).
"""
