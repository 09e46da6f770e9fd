"""Pictures of runs: the curves of their logs, and the positions of ranks in a stall.

Imports the sheet and the pictures of plans beside it.
"""
