"""Elastic jobs in every framework: the state that ranks share, and the loop around failures.

The classes and the order of events are Horovod's. Three differences fix lost work and waits:

- after a change all ranks synchronize, always, from the rank with the newest commit;
- when hosts come or go, trained weights and the state's attributes are kept;
- a host update that arrives during a restart, or in the same second as another one, is kept.

References:
    Horovod 0.28.1's elastic API; docs/elastic.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from horovod.common.elastic import ObjectState, notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult

Result = TypeVar("Result")


class SharedState(ObjectState):
    """A state that all ranks get from the one whose last commit is the newest.

    Where a rank dies in the moment of a commit some of the others have made it, and some not.

    The first base class of a framework's state.
    """

    _commits = 0  # that led to this rank's state, synchronizations too; 0: it is new

    # The framework's functions, static: they compare settings, and return every rank's object
    # and the root's. Collective.
    _agree: Callable[[], None]
    _gather: Callable[..., list[Any]]
    _broadcast: Callable[..., Any]

    def _sync_trained(self, root: int) -> None:
        """Give every rank what the root has trained. Collective."""
        raise NotImplementedError

    @property
    def _survived(self) -> bool:
        return self._commits > 0

    def save(self) -> None:
        """Commit what there is now, without looking for news of hosts."""
        super().save()
        self._commits += self._survived

    def sync(self) -> None:
        """Give every rank what the surviving one with the newest commit has, and commit it.

        Collective: every rank; blocks.

        Raises:
            ValueError: models, optimizers or settings differ between ranks; on every rank.
            HorovodInternalError: a rank has died (TensorFlow: a `tf.errors.OpError`).
        """
        self._agree()
        commits = self._gather(self._commits, name="adasum.elastic.commits")
        root = commits.index(max(commits))
        self._sync_trained(root)
        mine = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state: dict[str, Any] = self._broadcast(
            mine, root, name="adasum.elastic.objects"
        )
        self._set_attrs()
        self.save()
        self._commits = max(commits) + 1

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt if any rank was told that hosts come or go.

        Horovod's asks rank 0 only, and leaves out what comes within a second of the last news.

        Collective: every rank; blocks.

        Raises:
            HostsUpdatedInterrupt: so it is; on every rank.
        """
        news = HostUpdateResult.no_update
        while not self._host_messages.empty():
            _, update = self._host_messages.get()
            news |= update
        if any(self._gather(news, name="adasum.elastic.hosts")):
            raise HostsUpdatedInterrupt(skip_sync=False)

    def on_reset(self) -> None:
        """As Horovod's, and keeps the news that has come since the ranks began to start again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()


def running(
    func: Callable[..., Result],
    restart: Callable[[], None],
    is_failure: Callable[[Exception], bool],
) -> Callable[..., Result]:
    """Return `func` as a function that goes on when ranks die, leave or come.

    Args:
        func: its first argument is the state.
        restart: shuts Horovod down and starts it with the ranks that there are now.
        is_failure: whether an error means that another rank has died, so that this one is to
            go on from its last commit. Others are raised.
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
                        restart()
                        state.on_reset()
                    state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt:
                    state.save()
                except Exception as error:
                    if not (
                        isinstance(error, HorovodInternalError) or is_failure(error)
                    ):
                        raise
                    state.restore()
                is_first = False
        finally:
            notification_manager.remove_listener(state)

    return wrapper
