"""Processes over torch.distributed's gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


# A stand-in of libnccl.so.2 on host memory (build/.../src/comm/libfake_nccl.so).
FAKE_NCCL = os.environ.get("GDN_FAKE_NCCL")


def run_processes(W, *arguments, **more):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(W),
           "PYTHONPATH": path, "GDN_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **more}
    workers = [
        subprocess.Popen([sys.executable, HERE / "gloo_worker.py", *arguments],
                         env={**env, "RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(W)
    ]
    outputs = []
    try:
        for worker in workers:
            outputs.append(worker.communicate(timeout=240)[0])
    finally:
        for worker in workers:
            worker.kill()
    for rank, (worker, text) in enumerate(zip(workers, outputs)):
        assert worker.returncode == 0 and f"rank {rank} of {W}: passed" in text, text[-3000:]


@pytest.mark.parametrize("W", [2, 3, 4])
def test_processes(W):
    run_processes(W)


with_fake_nccl = pytest.mark.skipif(
    not FAKE_NCCL, reason="GDN_FAKE_NCCL names no stand-in of libnccl.so.2"
)


@with_fake_nccl
@pytest.mark.parametrize("W", [2, 3])
def test_processes_with_nccl_of_the_librarys_own(W, tmp_path):
    run_processes(W, GDN_NCCL_LIBRARY=FAKE_NCCL, TMPDIR=str(tmp_path))
    assert not list(tmp_path.glob("fake_nccl_*"))  # they go with the last process


@pytest.mark.parametrize("how", ["leaves", "never comes"])
def test_a_lost_rank_ends_the_others(how):
    run_processes(3, how)


@with_fake_nccl
@pytest.mark.parametrize("how", ["leaves", "never comes"])
def test_a_lost_rank_ends_the_others_with_nccl_of_the_librarys_own(how, tmp_path):
    run_processes(3, how, GDN_NCCL_LIBRARY=FAKE_NCCL, TMPDIR=str(tmp_path))
