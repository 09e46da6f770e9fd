"""The interpreter that runs plans, and the parallel modules that it runs."""
