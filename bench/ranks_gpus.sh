#!/bin/bash
# KCP over the GPUs of one host, in one command: the communicators' suite over NCCL, every layout
# against one rank, times beside predictions, the peers' rank parallelism in the same run, a table.
#   bench/ranks_gpus.sh [--gpus W] [--bin FOLDER] [--peers FOLDER] [--arms NAMES] [--seconds N] [LETTER...] [-- flags of ranks_bench]
# --bin holds ranks_bench and nccl_test (build/cuda/tests/gpu); --peers holds peers_cp.py and what it
# imports, and where the packages are not installed site.tar.xz (a folder for PYTHONPATH) and
# compile_cache.tar.xz (tl and tr: TileLang's and Triton's caches). Shapes: M I H N; the peers run
# those of 16/48 heads, which their cache is for, with the arms named (fla-c,fla-z,qla-c,fla-hs, and
# ours-z,ours-c where gdn_kcp imports). All ends after --seconds (400): a peer that is not
# done by then has no row. PYTHON names the interpreter that has torch. Results go to $OUT, or a
# temporary folder. Exit status: that of the first of our own steps that fails.
set -u
gpus=2 bin=build/cuda/tests/gpu peers="" arms="" seconds=400 shapes=() flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --gpus) gpus=$2; shift 2 ;;
    --bin) bin=$2; shift 2 ;;
    --peers) peers=$(realpath "$2"); shift 2 ;;
    --arms) arms=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --) shift; flags=("$@"); break ;;
    [A-N]) shapes+=("$1"); shift ;;
    *) echo "ranks_gpus.sh: '$1' is no option and no shape from A to N" >&2; exit 2 ;;
  esac
done
[ ${#shapes[@]} -gt 0 ] || shapes=(M I H N)
python=${PYTHON:-python3}
here=$(realpath "$(dirname "$0")")
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
out=${OUT:-$work}
unpack() { mkdir "$2" && { tar xJf "$1" -C "$2" 2>/dev/null || "$python" -m tarfile -e "$1" "$2"; }; }
left() { echo $((seconds - SECONDS > 5 ? seconds - SECONDS : 5)); }

# The NCCL that torch brings, where the loader would find none.
if [ -z "${GDN_NCCL_LIBRARY:-}" ]; then
  found=$("$python" -c 'import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], "lib", "libnccl.so.2"))' 2>/dev/null)
  [ -n "$found" ] && export GDN_NCCL_LIBRARY=$found
fi
echo "NCCL: ${GDN_NCCL_LIBRARY:-as the loader finds it}"

code=0
echo "== nccl_test"
timeout -k 5 "$(left)" "$bin/nccl_test" --gtest_brief=1 2>&1 | tee "$out/nccl_test.txt"
status=${PIPESTATUS[0]}; [ "$status" -eq 0 ] || { echo "nccl_test: exit status $status"; code=$status; }

echo "== ranks_bench --gpus $gpus ${shapes[*]}"
timeout -k 5 "$(left)" "$bin/ranks_bench" --gpus "$gpus" "${flags[@]}" "${shapes[@]}" 2>&1 | tee "$out/ours.txt"
status=${PIPESTATUS[0]}
[ "$status" -eq 0 ] || { echo "ranks_bench: exit status $status"; [ "$code" -ne 0 ] || code=$status; }

: > "$out/peers.txt"
letters=$(printf %s "${shapes[@]}" | tr -d N)
if [ -n "$peers" ] && [ -n "$letters" ]; then
  if [ -e "$peers/site.tar.xz" ]; then
    unpack "$peers/site.tar.xz" "$work/site"
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
  fi
  if [ -e "$peers/compile_cache.tar.xz" ]; then
    unpack "$peers/compile_cache.tar.xz" "$work/cache"
    export TILELANG_CACHE_DIR=$work/cache/tl TRITON_CACHE_DIR=$work/cache/tr
  fi
  if [ -z "$arms" ]; then
    arms=fla-c,fla-z,qla-c,fla-hs
    "$python" -c 'import gdn_kcp' 2>/dev/null && arms=ours-z,ours-c,$arms
  fi
  echo "== peers_cp.py $letters $arms, $(left) s left"
  timeout -k 5 "$(left)" "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    "$peers/peers_cp.py" "$letters" "$arms" 2 2>&1 | tee "$out/peers.txt"
fi

echo "== table"
"$python" "$here/ranks_table.py" "$out/ours.txt" "$out/peers.txt" | tee "$out/table.txt"
exit "$code"
