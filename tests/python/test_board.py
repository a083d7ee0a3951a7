"""Numbers of several processes in memory that they share."""

import contextlib
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


@contextlib.contextmanager
def running(place, first=1, turns=TURNS):
    """Rank 1, until the end of the block."""
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, *place, str(first), str(turns)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert peer.stdout.readline() == "opened\n"
        yield peer
    finally:
        end(peer)


def end(peer):
    peer.kill()
    peer.communicate()


@pytest.mark.parametrize("first", [1, board._TURNS - TURNS // 2])  # with and without the turn's wrap
def test_both_read_what_both_posted_in_every_turn(place, first):
    mine = board.Board(*place, 0, 2, 60)
    mine._turns = itertools.count(first)
    with running(place, first) as peer:
        for i in range(TURNS):
            assert mine.read(mine.post(i)) == [i, 1000 + i]
        assert peer.stdout.readline() == "posted\n"


def test_a_rank_that_is_killed_is_named(place):
    mine = board.Board(*place, 0, 2, 60)
    with running(place, turns=1) as peer:
        assert mine.read(mine.post(0)) == [0, 1000]
        assert peer.stdout.readline() == "posted\n"
        peer.send_signal(signal.SIGKILL)
        with pytest.raises(PeerFailedError, match="rank 1 left"):
            mine.read(mine.post(0))


def test_a_rank_that_is_too_late_is_named(place):
    mine = board.Board(*place, 0, 2, 0.3)
    with running(place, turns=0):
        began = time.monotonic()
        with pytest.raises(PeerFailedError, match="rank 1 did not come within 0.3 s"):
            mine.read(mine.post(0))
        assert time.monotonic() - began < 30


def test_a_board_that_one_rank_closed_is_closed_for_all(place):
    mine = board.Board(*place, 0, 2, 0.3)
    with running(place, turns=1) as peer:
        assert mine.read(mine.post(0)) == [0, 1000]
        with pytest.raises(PeerFailedError, match="rank 1 did not come"):
            mine.read(mine.post(0))
        end(peer)
        view = board.Board(*place, 1, 2, 60)  # what rank 1 would see, came it now
        view._turns = itertools.count(2)
        with pytest.raises(PeerFailedError, match="rank 0 gave up a call"):
            view.read(view.post(0))
        with pytest.raises(PeerFailedError, match="gave up a call"):
            mine.read(mine.post(0))


def test_an_interrupted_rank_closes_the_board(place, monkeypatch):
    mine = board.Board(*place, 0, 2, 60)

    def interrupted(seconds):
        raise KeyboardInterrupt

    with running(place, turns=0):
        monkeypatch.setattr(board.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.read(mine.post(0))
        monkeypatch.undo()
        with pytest.raises(PeerFailedError, match="rank 0 gave up a call"):
            mine.read(mine.post(0))


def test_the_last_number_of_a_rank_that_left_is_read(place):
    mine = board.Board(*place, 0, 2, 60)
    with running(place, turns=1) as peer:
        turn = mine.post(0)
        mine.read(turn)
        end(peer)
        assert mine.read(turn) == [0, 1000]


def test_memory_of_others_is_refused(place):
    with pytest.raises(OSError, match="of other ranks"):
        board.Board(place[0], "0" * 32, 0, 2, 60)
    with pytest.raises(OSError):
        board.Board(place[0] + ".gone", place[1], 0, 2, 60)
