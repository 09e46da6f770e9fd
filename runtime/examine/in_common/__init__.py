"""What blocks of several stages have in common, and hand on through it.

Imports what `examine` may, and what is told of weights from beside it.
"""
