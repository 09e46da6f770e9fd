"""A hub in a process of its own, where no launcher of ours started the ranks: rank 0 does, before the run begins.

python -m quintsched.runtime.watch.alone SOCKET NUM_RANKS        the key is in the environment

It ends with the last rank. Every rank that is left says the verdict; where none is left, this does.
"""

from __future__ import annotations

import os
import socket
import sys

from .connection import KEY
from .hub import Hub


def main() -> int:
    """Watch until all ranks have ended."""
    file, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    hub = Hub(num_ranks, key=os.environ[KEY], listening=socket.socket(fileno=file), spoken=False, ends_alone=True)
    hub.run()
    hub.close()
    if hub.verdict is not None and not hub.verdict.has_survivors:
        sys.stderr.write(f"error: {hub.verdict.message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
