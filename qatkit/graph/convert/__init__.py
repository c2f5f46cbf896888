"""From the prepared graph to integers: the converted modules, and a graph without what only training needs."""
