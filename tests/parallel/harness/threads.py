"""Ranks that are threads of one process: several on one device, each with a stream of its own.

Everything is the engine's but the messages: a rank posts its tensors, and the others copy their
parts on their own streams, after an event of the rank's. torch's process groups for threads
(`multi_threaded_pg`) tell each thread its rank. `backward` of all ranks would run in one thread of
a device, so DDP itself cannot run; `Bucket` is what it hands to its hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from adasum_hvd.distributed.communicator import Communicator

SECONDS = 20  # that a rank waits for the others


class Meeting:
    """A rendezvous of the ranks of a group, one exchange after the other."""

    def __init__(self, ranks: int):
        self._barrier = threading.Barrier(ranks, timeout=SECONDS)
        self._posted: dict[int, Any] = {}
        self._done: dict[int, Any] = {}
        self.abort = self._barrier.abort

    def exchange(
        self, rank: int, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> None:
        """Copy what every rank has for this one, in the order of the current stream."""
        device = out[0].device
        self._posted[rank] = out, event_on(device)
        self._barrier.wait()
        for peer, (sent, posted) in list(self._posted.items()):
            if peer != rank:
                wait_for(posted, device)
                into[peer].copy_(sent[rank])
        self._done[rank] = event_on(device)
        self._barrier.wait()
        for copied in list(self._done.values()):  # before a tensor may change again
            wait_for(copied, device)


def event_on(device: torch.device) -> Any:
    """Return an event after the work of the current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: Any, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


class Bucket(dist.GradBucket):
    """A bucket as DDP's, which torch makes only itself: `Bucket.of(gradients, ...)`."""

    @classmethod
    def of(cls, parameters: list[torch.nn.Parameter], index: int, last: bool) -> Bucket:
        bucket = cls.__new__(cls)  # its __init__ is C++'s, and has no arguments for us
        bucket.own = parameters, index, last
        bucket.flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        return bucket

    def index(self) -> int:
        return self.own[1]

    def is_last(self) -> bool:
        return self.own[2]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.own[0]


def run(ranks: int, device: str, function: Callable[[int], Any]) -> list[Any]:
    """Call a function on every rank, a thread each, and return what they returned.

    Raises:
        BaseException: the first error of a rank; the others do not wait for it.
    """
    meetings: dict[Any, Meeting] = {}
    lock, store = threading.Lock(), dist.HashStore()
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def meeting_of(communicator: Communicator) -> Meeting:
        key = tuple(communicator.ranks), communicator._tag
        with lock:
            return meetings.setdefault(key, Meeting(communicator.size))

    def exchange(self: Communicator, out: Any, into: Any) -> None:
        meeting_of(self).exchange(self.rank, out, into)

    def spread(self: Communicator, parts: list[torch.Tensor]) -> None:
        exchange(self, [parts[self.rank]] * self.size, parts)

    def main(rank: int) -> None:
        own = nullcontext()
        if device != "cpu":
            own = torch.cuda.stream(torch.cuda.Stream(device))
        try:
            with own:
                dist.init_process_group(
                    "threaded", rank=rank, world_size=ranks, store=store
                )
                results[rank] = function(rank)
                if device != "cpu":
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            for meeting in list(meetings.values()):
                meeting.abort()
        finally:
            dist.destroy_process_group()

    changed = mock.patch.multiple(
        Communicator, may_use_core=False, _exchange=exchange, _spread=spread
    )
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with changed:
            threads = [threading.Thread(target=main, args=(r,)) for r in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [results[rank] for rank in range(ranks)]
