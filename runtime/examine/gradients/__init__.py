"""Whether blocks change gradients by more than a factor: `own_backwards` finds who may, `backwards` tries them.

Imports what `examine` may, and runs of blocks from beside it.
"""
