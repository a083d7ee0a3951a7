#!/usr/bin/env bash
# The Python package on a machine with a GPU and torch with CUDA: what needs the GPU for itself (tests of
# waits and memory, times) step by step, then the other tests side by side; the failures once more,
# shortly, last. Under five minutes.
# Usage: tests/gpu/python_gpu.sh FOLDER [LOGS]
# FOLDER holds gdn_torch.so, built with -DGDN_TORCH=ON -DGDN_CUDA=ON (on any machine), and the
# libhwy.so.1 beside it. LOGS (default: a new folder of /tmp) keeps every log whole.
set -uo pipefail
export GDN_KCP_LIBRARY
GDN_KCP_LIBRARY=$(realpath "$1/gdn_torch.so")
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
began=$SECONDS
status=0

# run NAME SECONDS command...: into its log, its exit code beside it; 124 is a timeout. An interrupt, not
# a kill, so that pytest says what failed until then (a shell has its background jobs ignore them).
run() {
  local name=$1 limit=$2 rc=0 left=$((275 - (SECONDS - began)))
  shift 2
  limit=$((limit < left ? limit : left))
  if ((limit < 5)); then
    rc="none, no time left"
  else
    timeout --signal=INT --kill-after=10 "$limit" env --default-signal=INT "$@" >"$logs/$name.log" 2>&1 || rc=$?
  fi
  echo "$rc" >"$logs/$name.rc"
}

# told NAME LINES: the last LINES lines of its log.
told() {
  local rc
  rc=$(<"$logs/$1.rc")
  [[ -f $logs/$1.log ]] && tail -n "$2" "$logs/$1.log"
  echo "== $1: exit $rc, $((SECONDS - began)) s so far"
  [[ $rc == 0 ]] || status=1
}

step() {  # NAME SECONDS LINES command...
  local name=$1 limit=$2 lines=$3
  shift 3
  run "$name" "$limit" "$@"
  told "$name" "$lines"
}
pytest=(python3 -m pytest -v -p no:cacheprovider --tb=short --no-header -rfEs --durations=8
  -o faulthandler_timeout=40)

step import 60 12 python3 -c '
import torch, gdn_kcp
print("torch", torch.__version__, "on", torch.cuda.get_device_name())
for b in gdn_kcp.backends(): print(b.name, "|", b.refusal or "takes it")
assert gdn_kcp.backends()[0].name.startswith("cuda") and gdn_kcp.is_supported("cuda")'
step cuda 70 3 "${pytest[@]}" tests/python/test_cuda.py
step host_time 40 20 python3 bench/host_time.py --device cuda --calls 100 --groups 9
step forms 60 24 python3 bench/forms.py N M
step packed_views 20 6 python3 bench/packed_views.py --device cuda --tokens 32768 --heads 16,48

export GDN_NUM_THREADS=4  # of each of these, for the fp64 references
run autograd 100 "${pytest[@]}" -k cuda tests/python/test_autograd.py tests/python/test_packed.py \
  tests/python/test_capacity.py tests/python/test_compile.py tests/python/test_conv.py &
run chunk 100 "${pytest[@]}" -k cuda tests/python/test_chunk.py tests/python/test_kcp.py &
run matrix 200 "${pytest[@]}" -k 'cuda and not cuda-64' tests/python/test_matrix.py &
run matrix_64 200 "${pytest[@]}" -k cuda-64 tests/python/test_matrix.py &
run cpu 275 "${pytest[@]}" -k 'not cuda and not training' tests/python &
wait
for name in autograd chunk matrix matrix_64 cpu; do told "$name" 3; done

echo "== failures"
for name in cuda autograd chunk matrix matrix_64 cpu; do
  [[ -f $logs/$name.log ]] || continue
  # Each with the lines that say what was wrong, and where a run was cut short its last test.
  grep -hE '^(FAILED|ERROR|SKIPPED)' "$logs/$name.log" | cut -c1-230 | sort | uniq | head -n 40
  grep -hE '^E  ' "$logs/$name.log" | cut -c1-180 | sort | uniq -c | sort -rn | head -n 15
  if ! grep -q -E '^=+ .*(passed|failed|error)' "$logs/$name.log"; then  # cut short
    grep -hE ' (FAILED|ERROR) ' "$logs/$name.log" | cut -c1-160 | head -n 20
    tail -n 15 "$logs/$name.log"
  fi
done
echo "== exit $status after $((SECONDS - began)) s; logs in $logs"
exit $status
