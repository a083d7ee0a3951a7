#!/usr/bin/env bash
# Whole workloads on a GPU against the CPU backend in fp64, every document and, as far as memory
# goes, every head: a row for each tensor that missed a bar, else one for each workload.
# Usage: tests/gpu/workloads.sh GDN [LETTER[:HEADS]...] [-- flags of gdn check]
# GDN: the command, built with CUDA. HEADS: of the 16 key heads, the first ones that are compared
# (the run has all). A machine of 128 GiB takes A:6 and the like; without letters, all of A to N so.
# WORKLOADS_BACKEND (default cuda-sm90a) is checked, WORKLOADS_SECONDS (default 150) is what one may
# take, WORKLOADS_LOGS (default: a new folder of /tmp) keeps what the command printed. Exit status 1
# if one missed a bar or did not end.
set -uo pipefail
gdn=$1
shift
letters=() flags=()
while (($#)); do
  if [[ $1 == -- ]]; then
    flags=("${@:2}")
    break
  fi
  letters+=("$1")
  shift
done
((${#letters[@]})) || letters=(N M L K I J H G D:6 F:6 E:6 C:6 B:6 A:6)
logs=${WORKLOADS_LOGS:-$(mktemp -d)}
mkdir -p "$logs"
status=0
for one in "${letters[@]}"; do
  letter=${one%%:*} heads=() rc=0 began=$SECONDS
  [[ $one == *:* ]] && heads=(--reference-heads "${one#*:}")
  log=$logs/$letter.txt
  timeout "${WORKLOADS_SECONDS:-150}" "$gdn" check --workload "$letter" \
    --backend "${WORKLOADS_BACKEND:-cuda-sm90a}" --reference cpu \
    "${heads[@]}" "${flags[@]}" >"$log" 2>&1 || rc=$?
  grep -h FAIL "$log"
  printf '%s %s: %s, %d s; rel-RMS' "$letter" "${heads[*]:-all heads}" \
    "$([[ $rc == 0 ]] && echo passed || echo "exit $rc")" $((SECONDS - began))
  awk '/ (pass|FAIL)/ { printf " %s %s", $1, $2 }' "$log"
  echo
  [[ $rc == 0 ]] || status=1
  [[ $rc == 0 || $rc == 1 ]] || tail -n 3 "$log"
done
echo "== exit $status after $SECONDS s; logs in $logs"
exit $status
