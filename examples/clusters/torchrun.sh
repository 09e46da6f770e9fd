#!/bin/bash
# On each node, alike:
#   MASTER=10.0.0.1:29500 NODES=2 RANKS=2 examples/clusters/torchrun.sh examples/clusters/job.yaml [OPTION …]
#   MASTER=10.0.0.1:29500 NODES=1:4 RANKS=2 … --set parallel.elastic=true       nodes may leave and join
#
# MASTER is the address of one of the nodes, with a free port. The run goes on from the newest checkpoint where there is
# one. After a failure torchrun starts the ranks of all nodes again, three times in all.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # without it, nodes of torch 2.13 wait forever for one that came back
exec torchrun --nnodes "${NODES:?1:4, or 2}" --nproc-per-node "${RANKS:?ranks of this node}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER:?HOST:PORT}" --rdzv-id "${RUN:-quintsched}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} -m quintsched.runtime --resume --config "$@"
