"""Hang detection: every rank publishes its position; a hub beside them detects stalls, and names the rank at fault.

    rank: Publisher ──store──▶ Cell (memory that the hub maps) ◀──reads── Hub: in the launcher, or a separate process
          Watcher   ◀──────────── TCP: identity, errors, goodbyes ──────────▶   Progress: is the pause too long?
                    ◀── verdict: exit 4 ─────────────────────────────────────   find_culprit ─▶ message, stall.json

The watch has connections of its own: no process group, no pickle, frames of bounded size, and authentication by a key.
A hub on the same machine can read a rank's cell, up to the last store, even after the rank was killed or stopped.

On accelerators the host runs ahead: a verdict names the instruction that the host has begun, and a device that hangs
shows as a host that waits in a synchronisation. Imports nothing of the runtime, and no torch but in `rendezvous`.
"""

from .position_publisher import Publisher

__all__ = ["Publisher"]
