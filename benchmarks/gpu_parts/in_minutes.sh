#!/bin/bash
# What matters most of `make gpu`, on a machine that is lent for five minutes: tests side by side, then benchmarks in the
# order of their worth, each with a limit of its own, and its output in a file of its own as it comes.
#
#   NCCL=libnccl.so.2.xz OUT=out/gpu bash benchmarks/gpu_parts/in_minutes.sh       (from the root; OUT is made)
#
# NCCL (2.30 or newer, or its .xz) lets ranks share the GPU. Where the machine has NVIDIA's multi-process service, it
# runs meanwhile. NCCL_DEBUG=WARN says why a communicator fails.

set -u
export PYTHON=${PYTHON:-python3} MAKE=${MAKE:-make}
source benchmarks/gpu_parts/python.sh
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
mkdir -p "${OUT:=out/gpu}"
say() { echo "[$SECONDS s] $*"; }

preloaded=()
if [ -n "${NCCL:-}" ]; then
  library=$NCCL
  [[ $NCCL == *.xz ]] && library=$(mktemp -d)/libnccl.so.2 && xz -dc "$NCCL" >"$library"
  preloaded=(env "LD_PRELOAD=$(realpath "$library")")
fi
service=$(command -v nvidia-cuda-mps-control || ls /usr/local/nvidia/bin/nvidia-cuda-mps-control 2>/dev/null)
begin_service() {
  [ -n "$service" ] || return 0
  export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) && export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY && "$service" -d
}
end_service() {
  [ -n "$service" ] || return 0
  echo quit | "$service"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

tests() { # name, seconds, arguments
  local name=$1 limit=$2
  shift 2
  timeout -k 5 "$limit" "${preloaded[@]}" "$python" -m pytest -p no:cacheprovider -p no:benchmark -rfE --tb=short \
    --durations 20 "$@" >"$OUT/$name.log" 2>&1
  say "$name: $(grep -aE '^(FAILED|ERROR)|passed|failed' "$OUT/$name.log" | cut -c1-150)"
}

bench() { # name, seconds, arguments
  local name=$1 limit=$2
  shift 2
  timeout -k 5 "$limit" "$python" benchmarks/gpu.py --json "$@" >"$OUT/$name.json" 2>"$OUT/$name.log"
  grep -v '^$' "$OUT/$name.log" | cut -c1-160
  say "$name"
}

begin_service
of_one="tests/gpu/test_device.py tests/gpu/test_graphs.py"
of_several="tests/gpu/test_transport.py tests/gpu/test_matrix.py"
tests one 90 $of_one -n 3 &
tests several 100 $of_several -n 6 --begin-within 45 &
tests refused 95 tests/gpu/test_refused_plans.py -n 4 &
wait
end_service
bench steps 65 --rounds 8 --only steps
bench few 45 --rounds 8 --only halves memory host
bench predicted 85 --rounds 6 --only predicted
bench more 30 --rounds 8 --only ring experts
begin_service
[ ${#preloaded[@]} = 0 ] || export LD_PRELOAD=${preloaded[1]#LD_PRELOAD=}
bench beside 100 --rounds 6 --only beside
unset LD_PRELOAD
end_service
