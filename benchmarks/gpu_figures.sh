#!/usr/bin/env bash
# The figures of docs/performance.md again, on a host with NVLink GPUs:
#
#     benchmarks/gpu_figures.sh OUT [STEP...]
#
# Runs go to OUT/STEP, what a step printed to OUT/STEP.log, how it ended to OUT/steps.txt; a step that fails stops no other.
# MPIRUN starts one rank per GPU (default: mpirun -n 2), PYTHON runs each.
set -uo pipefail
if [ $# = 0 ]; then
    sed -n '2,7s/^# \?//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
out="$(cd "$1" && pwd)"
shift
cd "$(dirname "$0")/.."
mpirun="${MPIRUN:-mpirun -n 2}" python="${PYTHON:-python3}"

sweep() { $mpirun "$python" -m mpi4py -m ncclep_bench.cli sweep --no-preflight --format csv "$@"; }
shapes() { $mpirun "$python" -m mpi4py benchmarks/token_shapes.py "$@"; }

tests() { "$python" -m pytest -q tests/gpu; }
doctor() { "$python" -m ncclep_bench.doctor_cli check && "$python" -m ncclep_bench.doctor_cli selftest --np 2 --backend cuda; }
cuda() { sweep nvlink-decode nvlink-prefill nvlink-params nvlink-large-params --backend cuda --out "$out/cuda"; }
sms() {
    sweep nvlink-prefill --set layout=flat --set dtype=bfloat16 --set num_sms=16,32,64 --backend cuda --out "$out/sms"
}
nccl() {
    sweep nvlink-params nvlink-large-params --set window=off,symmetric,symmetric_zero_cta --backend nccl --out "$out/nccl"
}
nccl_ep() {
    sweep nvlink-decode nvlink-prefill --set dtype=bfloat16 --set window=off,symmetric --backend nccl_ep --out "$out/nccl_ep"
}
nccl_ep_sms() {
    sweep nvlink-prefill --set layout=flat --set dtype=bfloat16 --set window=symmetric --set num_sms=16 --backend nccl_ep \
        --out "$out/nccl_ep_sms"
}
use() { sweep gpu-use --backend cuda --out "$out/use"; }
staged() {
    sweep nvlink-prefill --set layout=flat --set dtype=bfloat16 --set transport=messages --backend cuda --out "$out/staged"
}
shapes_ll() { shapes --mode ll; }
shapes_ht() { shapes --mode ht --sms 16,32,64,132; }
calls() { $mpirun "$python" -m mpi4py benchmarks/call_time.py; }

steps=("$@")
[ $# -gt 0 ] || steps=(tests doctor cuda sms nccl nccl_ep nccl_ep_sms use staged shapes_ll shapes_ht calls)
failed=0
for step in "${steps[@]}"; do
    start=$SECONDS
    [ "$(type -t "$step")" = function ] || { echo "no step is called $step" >&2; exit 2; }
    "$step" </dev/null >"$out/$step.log" 2>&1
    code=$?
    [ $code = 0 ] || failed=1
    echo "$step: exit $code, $((SECONDS - start)) s" | tee -a "$out/steps.txt"
done
exit $failed
