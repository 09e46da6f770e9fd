#!/bin/bash
#SBATCH --job-name=quintsched
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#
# sbatch examples/slurm.sh examples/full_3d.yaml          2 nodes of 4 ranks: the mesh dp=2,pp=2,tp=2
#
# One launcher per node starts the ranks of its node. Two minutes before the time is over, or when the cluster wants the
# nodes back, every launcher gets SIGTERM: the run finishes its step, saves and ends with 0. The job then is queued again
# and goes on from there; after a failure, three times from the newest checkpoint without leaving the nodes.
set -euo pipefail

job=${1:?usage: sbatch slurm.sh JOB.yaml [OPTION …]}
shift
checkpoints=${CHECKPOINTS:-out/checkpoints-$SLURM_JOB_ID}      # the same folder for a job that is queued again
log=out/done-$SLURM_JOB_ID
mkdir -p out
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
resume=()
if [[ -d $checkpoints ]]; then resume=(--resume); fi

export MASTER=${nodes[0]}:$((20000 + SLURM_JOB_ID % 40000))
srun --kill-on-bad-exit=0 bash -c '
    exec quintsched run "$@" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master "$MASTER"
' run "$job" --set checkpoint.dir="$checkpoints" --set checkpoint.every=500 --restarts 3 "${resume[@]}" "$@" | tee "$log"

# Ended well, but only since it was asked to stop: more is to be done.
if grep -q "^stopped as asked: saved" "$log"; then scontrol requeue "$SLURM_JOB_ID"; fi
