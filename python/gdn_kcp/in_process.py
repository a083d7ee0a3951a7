"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch

from .errors import InvalidArgumentError, PeerFailedError, packed
from .members import AgreesAtOnce, in_one_place, raise_disagreement, raise_first, raise_out_of_step


class InProcessGroup:
    """``size`` ranks as threads of this process, for tests and for several ranks on one GPU.

    ``group.run(fn)`` calls ``fn(rank)`` on one thread per rank and returns their results in rank
    order; the first failing rank's error is raised. Backwards run on the rank's own thread.
    """

    def __init__(self, size: int, timeout: float = 300.0):
        if size < 1:
            raise InvalidArgumentError(f"size: expected at least 1, got {size}")
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._slots: list[Any] = [None] * size
        self.agreements = [0] * size  # of each rank in this run

    def member(self, rank: int) -> "ThreadMember":
        return ThreadMember(self, rank)

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size
        self._barrier.reset()
        self.agreements = [0] * self.size  # a rank that left the last run may be one ahead

        def main(rank: int) -> None:
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(rank)
            except BaseException as error:  # noqa: BLE001: handed to the caller
                errors[rank] = error
                self._barrier.abort()  # nobody waits for a rank that left

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [error for error in errors if error is not None]
        for error in raised:
            if not isinstance(error, PeerFailedError):
                raise error
        if raised:
            raise raised[0]
        return results

    def close(self) -> None:
        """No rank meets the others again before the next ``run``."""
        self._barrier.abort()

    def exchange(self, rank: int, item: Any, take: Callable[[list[Any]], Any]) -> Any:
        """Shows every rank's item to ``take``; items stay valid until all have taken."""
        self._slots[rank] = item
        try:
            self._barrier.wait()
            taken = take(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerFailedError("another rank failed, left, or never came") from None
        return taken


class ThreadMember(AgreesAtOnce):
    """One rank of an :class:`InProcessGroup`."""

    collectives = "threads"

    def __init__(self, group: InProcessGroup, rank: int):
        self.group, self.rank, self.size = group, rank, group.size

    @property
    def agreements(self) -> int:
        return self.group.agreements[self.rank]

    def agree(self, error: Exception | None, digest: int, what: str, at: int = 0) -> None:
        states = self.group.exchange(self.rank, (error and packed(error), digest, at), list)
        self.group.agreements[self.rank] += 1
        failures, digests, points = zip(*states)
        if not in_one_place(points):
            self.group.close()
            raise_out_of_step()
        raise_first(list(failures))
        if len(set(digests)) > 1:
            raise_disagreement(what)

    def _share(self, item: tuple, take: Callable[[list[Any]], Any]) -> None:
        def taken(items: list[Any]) -> None:
            take(items)
            if item[0].is_cuda:
                torch.cuda.current_stream(item[0].device).synchronize()

        if item[0].is_cuda:
            torch.cuda.current_stream(item[0].device).synchronize()
        self.group.exchange(self.rank, item, taken)

    def all_to_all(self, send, send_bytes, receive, receive_bytes) -> None:
        def take(items: list[Any]) -> None:
            at = 0
            for (block, sizes), size in zip(items, receive_bytes):
                begin = sum(sizes[: self.rank])
                receive[at : at + size].copy_(block[begin : begin + size])
                at += size

        self._share((send, send_bytes), take)

    def all_gather(self, send, receive, receive_bytes) -> None:
        def take(items: list[Any]) -> None:
            at = 0
            for (block,), size in zip(items, receive_bytes):
                receive[at : at + size].copy_(block)
                at += size

        self._share((send,), take)
