"""State that blocks of several stages share, and values that they pass on through it.

Imports what `examine` may, and `weights_not_held` from beside it.
"""
