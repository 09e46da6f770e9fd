#!/bin/bash
#SBATCH --job-name=quintsched
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# sbatch --gpus-per-node=2 examples/clusters/slurm.sh examples/clusters/job.yaml     2 nodes of 2 ranks: dp=2,pp=2
#
# One launcher per node starts the ranks of its node. Two minutes before the time is over, on scancel, or when the cluster
# wants the nodes back, every launcher gets SIGTERM: the run finishes its step, saves and ends with 0. A job whose time is
# over is queued again and goes on from there. So is one that failed, from its newest checkpoint, three times in all.
set -uo pipefail

job=${1:?usage: sbatch slurm.sh JOB.yaml [OPTION …]}
shift
checkpoints=${CHECKPOINTS:-out/checkpoints-$SLURM_JOB_ID}      # the same for a job that is queued again; or a URL
log=out/said-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p out
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | grep -oP ' NodeAddr=\K\S+')

export MASTER=$address:$((20000 + SLURM_JOB_ID % 12000))       # below 32768, where systems begin to give ports away
# One launcher per node; said here too, as a job that is changed to fewer nodes keeps the number of tasks it began with.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c '
    exec quintsched run "$@" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master "$MASTER"
' run "$job" --set checkpoint.dir="$checkpoints" --resume "$@" 2>&1 | tee "$log"
code=${PIPESTATUS[0]}

# 0: ended well, but perhaps only since it was asked to stop. 2 and 3: a setting is wrong, which comes again.
if ((code == 0)); then grep -q "^stopped as asked: saved" "$log" && scontrol requeue "$SLURM_JOB_ID"; exit 0; fi
if ((code != 2 && code != 3 && ${SLURM_RESTART_COUNT:-0} < 3)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
