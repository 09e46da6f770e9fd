"""The commands about strategies: `predict` and `tune`, and `calibrate`, which measures a machine for both.

Imports what the commands of `quintsched.cli` import, and the rooms beside it inside the commands.
"""
