#!/bin/sh
# Builds the study: build.sh OUT [nvcc options]. Run from the repository root.
set -e
out=$1; shift
include="-Isrc -Iinclude -Ilab/sm90"
sm90=src/backend/cuda/sm90
work=$(mktemp -d)
for source in $sm90/schedule.cc $sm90/tensor_map.cc src/backend/cuda/common/launch.cc src/base/status.cc; do
  g++ -std=c++20 -O2 -DFMT_HEADER_ONLY $include -I/usr/local/cuda/include -c $source -o $work/$(basename $source).o
done
nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -cudart static "$@" $include -o "$out" \
  lab/sm90/forward.cu $sm90/prepare.cu $sm90/walk.cu $work/*.o
rm -r $work
