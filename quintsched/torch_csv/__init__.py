"""Schedule files of torch.distributed.pipelining (CSV): import with proof, and export.

    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,…      one line per pipeline rank, one cell per action:
    1RECV_F0,1F0,1B0,1SEND_B0,…                   stage, word, microbatch

`csv_vocabulary` has the vocabulary, `csv_cells` parses a file's cells, `csv_reader` turns them into a proved plan,
`csv_writer` exports a plan. Imports `passes`, `verify` and packages below.
"""

from quintsched.torch_csv.csv_cells import MAX_CHARACTERS
from quintsched.torch_csv.csv_reader import Imported, loads
from quintsched.torch_csv.csv_writer import dumps, left_out

__all__ = ["MAX_CHARACTERS", "Imported", "dumps", "left_out", "loads"]
