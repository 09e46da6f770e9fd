"""Commands around runs: what they saved (checkpoint), what they train on (data), what they run on (doctor).

Imports `quintsched.cli`'s options, and the code of each command lazily.
"""
