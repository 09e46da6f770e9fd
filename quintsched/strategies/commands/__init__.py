"""The commands about strategies: `predict` and `tune`, and `calibrate`, which measures a machine for both.

Imports what the commands of `quintsched.cli` import, and the rooms beside it inside the commands.
"""

import quintsched.cli  # noqa: F401  (whose commands these are: it is loaded first, whichever of them is asked for)
