"""Orders that are fast although durations vary: samples of durations, and a search for the least 95th percentile.

`duration_samples` reads what varies by how much and times an order under many samples at once; `robust_search` improves
an order. Imports the files of `solve` and what these import.
"""
