"""Extras: whether what a step is given beside inputs and targets belongs to samples. Imports `blocks`, `parallel`."""
