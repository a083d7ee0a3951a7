#!/usr/bin/env bash
# FLA's and FlashQLA's own tests of the chunked gated delta rule, with this library's operator in
# the place of theirs; what failed, what the operator refused and the counts last. On a machine with a
# GPU, torch with CUDA, pytest and FLA (whose tests use its references); FlashQLA is not needed.
# Usage: tests/gpu/peer_tests.sh FOLDER FLA_TEST FLASHQLA_TESTS [LOGS [pytest arguments]]
# FOLDER holds gdn_torch.so and the libhwy.so.1 beside it. FLA_TEST is FLA's tests/ops/test_gdn.py,
# FLASHQLA_TESTS FlashQLA's tests folder, with test_gdr_unit.py and ref_gdr.py; either may be -. LOGS
# (default: a new folder of /tmp) keeps every log whole. In the environment: PEER_TESTS_DEVICE
# (default cuda) for FlashQLA's, PEER_TESTS_ITERATIONS (default 100, FlashQLA's own is 1000) of its
# tests of determinism, PEER_TESTS_SECONDS (default 100) for each file.
set -uo pipefail
if (($# < 3)); then
  sed -n 's/^# Usage/usage/p' "$0" >&2
  exit 2
fi
export GDN_KCP_LIBRARY PYTHONPATH
GDN_KCP_LIBRARY=$(realpath "$1/gdn_torch.so")
fla_test=$2 flashqla_tests=$3
[[ $fla_test == - ]] || fla_test=$(realpath "$fla_test")
[[ $flashqla_tests == - ]] || flashqla_tests=$(realpath "$flashqla_tests")
logs=$(realpath -m "${4:-$(mktemp -d)}")
shift $(($# < 4 ? $# : 4))
cd "$(dirname "$0")/../.."
shims=$PWD/tests/gpu/peer_tests
PYTHONPATH=$PWD/python:$shims:${PYTHONPATH-}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 FLA_DISABLE_BACKEND_DISPATCH=1
unset FLA_CI_ENV  # it makes FLA's tolerances wider
mkdir -p "$logs"
status=0

# run NAME PLUGIN FILE pytest arguments...: into its log, its exit code beside it. No settings and no
# conftest of the peer's checkout. An interrupt, not a kill, so that pytest says what failed so far.
run() {
  local name=$1 plugin=$2 file=$3 rc=0
  shift 3
  timeout --signal=INT --kill-after=10 "${PEER_TESTS_SECONDS:-100}" env --default-signal=INT \
    python3 -m pytest -v -c /dev/null --rootdir "$(dirname "$file")" --noconftest \
    -p no:cacheprovider -p peer_outcomes -p "$plugin" --tb=short -rN --no-header --durations=8 \
    -o faulthandler_timeout=60 "$file" "$@" >"$logs/$name.log" 2>&1 || rc=$?
  echo "$rc" >"$logs/$name.rc"
}

names=()
if [[ $fla_test != - ]]; then
  names+=(fla)
  run fla peer_fla "$fla_test" "$@" &
fi
if [[ $flashqla_tests != - ]]; then
  names+=(flashqla)
  PYTHONPATH=$shims/flashqla:$PYTHONPATH \
    run flashqla peer_flashqla "$flashqla_tests/test_gdr_unit.py" "$@" &
fi
wait
for name in "${names[@]}"; do
  rc=$(<"$logs/$name.rc")
  if grep -q '^== summary' "$logs/$name.log"; then
    sed -n '/^== summary/,$p' "$logs/$name.log" | grep -v '^== summary'
  else  # it did not get so far
    tail -n 20 "$logs/$name.log"
  fi
  echo "== $name: exit $rc"
  [[ $rc == 0 ]] || status=1
done
echo "== exit $status after $SECONDS s; logs in $logs"
exit $status
