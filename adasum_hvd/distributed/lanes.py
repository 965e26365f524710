"""Reductions that run while the program goes on, one after the other.

On a CPU a thread runs them, with messages of its own. On other devices a stream does.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from adasum_hvd.distributed.communicator import Communicator, RanksLost

Task: TypeAlias = Callable[[Communicator], Any]
Future: TypeAlias = torch.futures.Future
_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]]
_threads = weakref.WeakKeyDictionary()  # and their tasks


@atexit.register
def _end_threads() -> None:
    """End idle threads while Python is whole; those that wait for a rank end with the process."""
    for thread, tasks in list(_threads.items()):
        tasks.put(None)
        thread.join(timeout=1.0)


class ThreadLane:
    """Runs tasks in a thread, which alone uses the communicator; all ranks submit the same."""

    def __init__(self, communicator: Communicator):
        self._tasks: queue.SimpleQueue[tuple[Task, Future] | None] = queue.SimpleQueue()
        # A daemon: one that waits for a rank that has died must not keep the process.
        words = self._tasks, communicator
        thread = threading.Thread(None, _run, "adasum_hvd", words, daemon=True)
        thread.start()
        _threads[thread] = self._tasks
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, task: Task, tensors: Sequence[torch.Tensor]) -> Future:
        """Begin a task, which keeps the tensors that it uses; return the future of its result."""
        future: Future = torch.futures.Future()
        self._tasks.put((task, future))
        return future


def _run(
    tasks: queue.SimpleQueue[tuple[Task, Future] | None], communicator: Communicator
) -> None:
    lost = ""  # why the ranks are; every message would then wait as long again
    while (entry := tasks.get()) is not None:
        task, future = entry
        try:
            if lost:
                raise RanksLost(lost)
            with torch.no_grad():
                result = task(communicator)
        except BaseException as error:  # the program's thread raises it
            lost = str(error) if isinstance(error, RanksLost) else lost
            if not isinstance(error, Exception):  # which a future does not take
                error = RuntimeError(
                    f"AdaSum: expected a result or an Exception of the rule, but got {error!r} "
                    f"(rank {communicator.rank} of {communicator.size}); raise an Exception"
                )
            future.set_exception(error)
        else:
            future.set_result(result)
        # Neither keeps a tensor until the next task comes.
        del entry, task, future
        result = None


class StreamLane:
    """Runs tasks on a stream of their own, after the work of the stream that submits them."""

    def __init__(self, communicator: Communicator, device: torch.device):
        self._communicator, self._device = communicator, device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def submit(self, task: Task, tensors: Sequence[torch.Tensor]) -> Future:
        """Begin a task that uses tensors; a future's `wait` makes the current stream wait."""
        future: Future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(self._module.current_stream(self._device))
        try:
            with self._module.stream(self._stream), torch.no_grad():
                future.set_result(task(self._communicator))
        finally:
            for tensor in tensors:
                tensor.record_stream(self._stream)
        return future


def done(tensor: torch.Tensor) -> Future:
    """Return the future of a tensor that is there; its `wait` synchronizes a device's streams."""
    devices = None if tensor.is_cpu else [tensor.device]
    future: Future = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


def wait_quietly(future: Future) -> None:
    """Wait for a task whose result and error are of no interest."""
    with contextlib.suppress(Exception):
        future.wait()


Lane: TypeAlias = ThreadLane | StreamLane


def lane_on(device: torch.device, communicator: Communicator) -> Lane:
    """Return a new lane for tensors of a device, with a communicator of its own."""
    if device.type == "cpu":
        return ThreadLane(communicator)
    return StreamLane(communicator, device)
