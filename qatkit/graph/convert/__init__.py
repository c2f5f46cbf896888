"""Converts the prepared graph to integers, and removes operators that only training needs."""
