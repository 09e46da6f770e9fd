"""The schedule files of torch.distributed.pipelining: read, proved, and written.

    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,…      a line per pipeline rank, a cell per action:
    1RECV_F0,1F0,1B0,1SEND_B0,…                   stage, word, microbatch

There are two forms. *Compute-only* files hold F, B, I and W alone, and empty cells where a rank idles: our passes add
the rest, as for a schedule of ours. Files *with communication* hold the messages too, whose order is kept, and
`REDUCE_GRAD`, which stands where gradients are summed over the replicas.

What a plan has and torch has not (metrics, the gradient norm, the optimizer) is added on the way in and left out on
the way out. `UNSHARD` and `RESHARD`, FSDP's gathering of weights, are the `GatherParams` and `FreeParams` of a plan
whose replicas share their weights out (`zero=3`); in a plan in which a stage keeps its full weights they are dropped,
with a note. `OVERLAP_F_B` becomes its two parts, in order, as torch's own runtime takes it.
"""

from quintsched.formats.torch_csv.cells import MAX_CHARACTERS
from quintsched.formats.torch_csv.reader import Imported, loads
from quintsched.formats.torch_csv.writer import dumps

__all__ = ["MAX_CHARACTERS", "Imported", "dumps", "loads"]
