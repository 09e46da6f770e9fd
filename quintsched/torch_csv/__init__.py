"""The schedule files of torch.distributed.pipelining: read, proved, and written.

    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,…      a line per pipeline rank, a cell per action:
    1RECV_F0,1F0,1B0,1SEND_B0,…                   stage, word, microbatch

`words` has the vocabulary, `cells` reads a file's cells, `reader` makes a proved plan of them, `writer` goes the other
way. Imports `passes`, `verify` and below.
"""

from quintsched.torch_csv.cells import MAX_CHARACTERS
from quintsched.torch_csv.reader import Imported, loads
from quintsched.torch_csv.writer import dumps, left_out

__all__ = ["MAX_CHARACTERS", "Imported", "dumps", "left_out", "loads"]
