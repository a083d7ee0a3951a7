#!/usr/bin/env bash
# The Python package on a machine with a GPU and torch with CUDA: its tests and times, in an order that
# shows most first; the failures once more, shortly, last. Under six minutes.
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

# step NAME SECONDS LINES command...: its last LINES lines; 124 is a timeout.
step() {
  local name=$1 limit=$2 lines=$3 rc=0 left=$((345 - (SECONDS - began)))
  shift 3
  limit=$((limit < left ? limit : left))
  if ((limit < 5)); then
    echo "== $name: no time left"
    status=1
    return
  fi
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 || rc=$?
  tail -n "$lines" "$logs/$name.log"
  echo "== $name: exit $rc, $((SECONDS - began)) s so far"
  if ((rc != 0)); then
    status=1
  fi
}
pytest=(python3 -m pytest -v -p no:cacheprovider --tb=short --no-header -rfEs --durations=8
  -o faulthandler_timeout=40)

step import 60 12 python3 -c '
import torch, gdn_kcp
print("torch", torch.__version__, "on", torch.cuda.get_device_name())
for b in gdn_kcp.backends(): print(b.name, "|", b.refusal or "takes it")
assert gdn_kcp.backends()[0].name.startswith("cuda") and gdn_kcp.is_supported("cuda")'
step cuda 100 3 "${pytest[@]}" tests/python/test_cuda.py
step autograd 70 3 "${pytest[@]}" -k cuda tests/python/test_autograd.py tests/python/test_packed.py \
  tests/python/test_capacity.py tests/python/test_compile.py tests/python/test_conv.py
step host_time 40 12 python3 bench/host_time.py --device cuda --calls 100 --groups 9
step forms 60 24 python3 bench/forms.py N M
step chunk 60 3 "${pytest[@]}" -k cuda tests/python/test_chunk.py tests/python/test_kcp.py
step matrix 60 3 "${pytest[@]}" -k cuda tests/python/test_matrix.py
step packed_views 20 6 python3 bench/packed_views.py --device cuda --tokens 32768 --heads 16,48
step cpu 345 3 "${pytest[@]}" -k 'not cuda and not training' tests/python

echo "== failures"
for name in cuda autograd chunk matrix cpu; do
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
