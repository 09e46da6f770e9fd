"""The commands about strategies: `predict` says how long a step takes and what it holds, `tune` finds the best.

Imports what the other commands import, and `prediction` and `tuning` inside the commands.
"""
