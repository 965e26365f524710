"""Elastic jobs in every framework: the state that ranks share, and the loop around failures.

The classes and the order of events are Horovod's. docs/elastic.md has the differences, which fix
lost work and waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.common.elastic import ObjectState, notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult

from adasum_hvd.horovod.elastic.attributes import is_stateful, pack, unpack

Result = TypeVar("Result")


class SharedState(ObjectState):
    """The first base class of a framework's state: all ranks get the newest committed state.

    docs/elastic.md, What a state holds. When a rank dies during a commit, some of the other ranks
    have finished it and some have not, so ranks count their commits.
    """

    _commits = 0  # of this rank's state, including synchronizations; 0 for a new rank

    # Static functions of the framework: compare settings, gather every rank's object, and
    # broadcast the root's object. Collective.
    _agree: Callable[[], None]
    _gather: Callable[..., list[Any]]
    _broadcast: Callable[..., Any]

    def _sync_trained(self, root: int, newest: bool) -> None:
        """Copy the root's models and optimizers; `newest`: this rank has its commit. Collective."""
        raise NotImplementedError

    def _trained(self) -> Callable[[Any], bool]:
        """Return whether an object belongs to a model or optimizer, as a function of it."""
        raise NotImplementedError

    @property
    def _survived(self) -> bool:
        return self._commits > 0

    def _stateful(self) -> set[str]:
        return {name for name in self._saved_state if is_stateful(getattr(self, name))}

    def _pack(self, stateful: set[str]) -> bytes:
        values = {name: getattr(self, name) for name in self._saved_state}
        kept, is_trained = {id(values[name]) for name in stateful}, self._trained()
        for name in stateful:
            values[name] = values[name].state_dict()
        return pack(
            type(self).__name__, values, lambda obj: id(obj) in kept or is_trained(obj)
        )

    def _load(self, name: str, content: Any, stateful: bool) -> None:
        if stateful:
            getattr(self, name).load_state_dict(content)
        else:
            setattr(self, name, content)

    def _commit(self) -> None:
        """Keep the current values."""
        self._packed = self._pack(self._stateful())

    def save(self) -> None:
        """Commit the current state, without checking for host updates.

        Raises TypeError for an attribute that cannot be pickled, or refers to a model or optimizer.
        """
        self._commit()
        super().save()
        self._commits += self._survived

    def restore(self) -> None:
        """Restore the last commit, also inside lists, dictionaries and arrays."""
        super().restore()  # sets the attributes to the objects of that commit
        for name, content in unpack(self._packed):
            self._load(name, content, is_stateful(getattr(self, name)))

    def sync(self) -> None:
        """Copy the state of the rank with the newest commit to every rank, and commit it.

        Collective: every rank; blocks.

        Raises:
            ValueError: models, optimizers or settings differ between ranks, or an attribute
                cannot be copied; on every rank.
            HorovodInternalError: a rank has died (TensorFlow: a `tf.errors.OpError`).
        """
        self._agree()
        mine = self._commits, self._stateful()
        by_rank = self._gather(mine, name="adasum.elastic.commits")
        commits, stateful = zip(*by_rank, strict=True)
        root = commits.index(max(commits))
        self._sync_trained(root, self._commits == max(commits))
        self._sync_attributes(root, set.intersection(*stateful))
        self.save()
        self._commits = max(commits) + 1

    def _sync_attributes(self, root: int, stateful: set[str]) -> None:
        """Copy the root's attributes, of which all ranks have the `stateful` objects."""
        is_root, packed, failure = self._rank() == root, b"", ""
        try:
            packed = self._pack(stateful) if is_root else b""
        except Exception as error:  # raised by an attribute; every rank reports it
            failure = str(error)
        packed = self._broadcast(packed, root, name="adasum.elastic.objects")
        try:
            for name, content in unpack(packed):
                self._saved_state.setdefault(name)
                if name in stateful or not is_root:
                    self._load(name, content, name in stateful)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = self._gather(failure, name="adasum.elastic.loaded")
        for rank, text in enumerate(failures):
            if text:
                raise ValueError(
                    f"{type(self).__name__}: expected attributes that every rank gets from rank "
                    f"{root}, but got an error on rank {rank} of {len(failures)}: {text}; "
                    "create the same attributes on every rank before the state"
                )

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank if any has received a host update.

        Horovod's method checks rank 0 only, and drops updates within a second of the last one.
        Collective: every rank; blocks.
        """
        updates = HostUpdateResult.no_update
        while not self._host_messages.empty():
            _, update = self._host_messages.get()
            updates |= update
        if any(self._gather(updates, name="adasum.elastic.hosts")):
            raise HostsUpdatedInterrupt(skip_sync=False)

    def on_reset(self) -> None:
        """Reset as Horovod does, but keep host updates that arrived during the restart."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()


def running(
    func: Callable[..., Result],
    shutdown: Callable[[], None],
    start: Callable[..., None],
    is_failure: Callable[[Exception], bool] = lambda error: False,
) -> Callable[..., Result]:
    """Return `func` as a function that continues when ranks die, leave or join.

    Its first argument is the state. `shutdown` ends Horovod, and `start(again=True)` starts it with
    the job's current ranks. If an error means that another rank has died (`is_failure`), this rank
    continues from its last commit. Other errors are raised.
    """

    @functools.wraps(func)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> Result:
        notification_manager.init()
        notification_manager.register_listener(state)
        is_first = True
        try:
            while True:
                try:
                    if not is_first:
                        shutdown()
                        start(again=True)
                        state.on_reset()
                    state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt:
                    state.save()
                except Exception as error:
                    is_internal = isinstance(error, HorovodInternalError)
                    if not (is_internal or is_failure(error)):
                        raise
                    state.restore()
                is_first = False
        finally:
            notification_manager.remove_listener(state)

    return wrapper
