"""A verdict, always: every rank says where it is; a hub beside them sees who stands still, and whose fault that is.

    rank: Publisher ──store──▶ Cell (memory that the hub maps) ◀──reads── Hub: in the launcher, or a process of its own
          Watcher   ◀──────────── TCP: who it is, errors, goodbyes ─────────▶   Progress: may it stand still so long?
                    ◀── verdict: exit 4 ─────────────────────────────────────   find_culprit ─▶ message, stall.json

What the ranks say takes ways of its own: no process group, no pickle, frames of bounded size behind a secret key. Where
the hub is on the same machine it reads a rank's cell also when that rank was killed or stopped, up to the last store.

On accelerators the host runs ahead: the instruction that is named is the one that the host has begun, and a device that
hangs shows as a host that waits where it synchronises. No torch is imported here; imports nothing of the runtime.
"""

from .publisher import Publisher

__all__ = ["Publisher"]
