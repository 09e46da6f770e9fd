"""Commands on strategies: `predict` and `tune`, and `calibrate`, which measures a machine for both.

Imports at once only modules that `quintsched.cli` imports; the packages beside it are imported inside the commands.
"""

import quintsched.cli  # noqa: F401  (loaded first, whichever module is imported, to avoid a circular import)
