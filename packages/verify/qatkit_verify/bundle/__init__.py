"""The bundle that is handed over: its files (`manifest`), as a folder or a zip (`archive`), its maker
(`signature`), and the expected answers of the model (`golden`).
"""
