"""Numbers of several processes in memory that they share."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from gdn_kcp import board
from gdn_kcp.errors import PeerFailedError

TURNS = 3 * board._SLOTS

# Rank 1 of two: opens, then posts its turns from `first` on; says so each time, and waits to be killed.
PEER = """
import itertools, sys
from gdn_kcp import board
path, token, first, turns = sys.argv[1:]
mine = board.Board(path, token, 1, 2, 60)
mine._turns = itertools.count(int(first))
print("opened", flush=True)
for i in range(int(turns)):
    turn = mine.post(1000 + i)
    assert mine.read(turn) == [i, 1000 + i], mine.read(turn)
print("posted", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def place():
    path, token = board.create(2)
    yield path, token
    os.unlink(path)


def start(place, first=1, turns=TURNS):
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, *place, str(first), str(turns)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert peer.stdout.readline() == "opened\n"
    return peer


def ended(peer):
    peer.kill()
    peer.communicate()


@pytest.mark.parametrize("first", [1, board._TURNS - TURNS // 2])  # with and without the turn's wrap
def test_both_read_what_both_posted_in_every_turn(place, first):
    mine = board.Board(*place, 0, 2, 60)
    mine._turns = itertools.count(first)
    peer = start(place, first)
    try:
        for i in range(TURNS):
            assert mine.read(mine.post(i)) == [i, 1000 + i]
        assert peer.stdout.readline() == "posted\n"
    finally:
        ended(peer)


def test_a_rank_that_is_killed_or_too_late_is_named(place):
    mine = board.Board(*place, 0, 2, 1.0)
    peer = start(place, turns=1)
    try:
        mine.timeout = 60
        assert mine.read(mine.post(0)) == [0, 1000]
        mine.timeout = 0.3
        began = time.monotonic()
        with pytest.raises(PeerFailedError, match="rank 1 did not come within 0.3 s"):
            mine.read(mine.post(0))
        assert time.monotonic() - began < 30
        mine.timeout = 60
        assert peer.stdout.readline() == "posted\n"
        peer.send_signal(signal.SIGKILL)
        with pytest.raises(PeerFailedError, match="rank 1 left"):
            mine.read(mine.post(0))
    finally:
        ended(peer)


def test_who_comes_too_late_learns_that_the_others_gave_up(place):
    mine = board.Board(*place, 0, 2, 0.3)
    peer = start(place, turns=0)
    try:
        with pytest.raises(PeerFailedError, match="rank 1 did not come"):
            mine.read(mine.post(0))
        with pytest.raises(PeerFailedError, match="rank 0 had given up waiting"):
            mine._number(0, 1)  # as rank 1 would read it
    finally:
        ended(peer)


def test_the_last_number_of_a_rank_that_left_is_read(place):
    mine = board.Board(*place, 0, 2, 60)
    peer = start(place, turns=1)
    try:
        turn = mine.post(0)
        mine.read(turn)
        ended(peer)
        assert mine.read(turn) == [0, 1000]
    finally:
        ended(peer)


def test_memory_of_others_is_refused(place):
    with pytest.raises(OSError, match="of other ranks"):
        board.Board(place[0], "0" * 32, 0, 2, 60)
    with pytest.raises(OSError):
        board.Board(place[0] + ".gone", place[1], 0, 2, 60)
