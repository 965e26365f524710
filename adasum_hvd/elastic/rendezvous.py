"""How the ranks of an elastic job come together, before Horovod connects them.

Horovod does it in its background thread, where an exception ends the process: where one rank
takes more than 30 seconds to start, dies meanwhile, or has no place any more, those that wait for
it abort, and the job is over. Here they wait in Python, by way of horovodrun's own server. The
first rank says "go" when all are there; where one is missing it says "again", and all ask
horovodrun for a new place, who answers when it has heard of every rank, or of its end.

References:
    Horovod 0.28.1: runner/elastic/rendezvous.py, runner/http/http_server.py and
    common/gloo/gloo_context.cc.
"""

from __future__ import annotations

import http.client
import itertools
import os
import select
import time
from collections.abc import Callable

from adasum_hvd.common.logging import logger

# What horovodrun says of a rank's place, in its order.
PLACE = tuple(
    f"HOROVOD_{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
)
MISSING_SECONDS = 30.0  # then horovodrun is asked what has become of a rank
SILENT_SECONDS = 10.0  # a rank that waits shows it more often
REQUEST_SECONDS = 60.0
GO, AGAIN = "go", "again"
SCOPE = "/adasum.rendezvous"


class _Server:
    """horovodrun's store of values by scope and key, whose scopes begin anew with the places."""

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port

    def ask(self, method: str, path: str, body: str | None = None) -> str | None:
        """Return the value at `/scope/key`, None where there is none.

        A request that waits for other ranks may take any time; it is said once a minute.

        Raises:
            RuntimeError: horovodrun has ended, or takes this rank for dead.
        """
        connection = http.client.HTTPConnection(
            self._address, self._port, timeout=REQUEST_SECONDS
        )
        try:
            connection.request(method, path, body)
            waited = 0.0
            while not select.select([connection.sock], [], [], REQUEST_SECONDS)[0]:
                waited += REQUEST_SECONDS
                logger.warning("waiting for the other ranks for %.0f s", waited)
            response = connection.getresponse()
            value = response.read().decode()
            return value if response.status == http.client.OK else None
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(
                f"elastic job: required an answer from horovodrun at {self._address}:"
                f"{self._port}, got {type(error).__name__}: {error}; it has ended, or takes this "
                "rank for dead"
            ) from error
        finally:
            connection.close()


def start(init: Callable[[], None], again: bool) -> None:
    """Start Horovod when all ranks are there; where the job is not elastic, at once.

    Args:
        init: Horovod's, of one framework.
        again: it was started before, so that places may have changed.

    Raises:
        SystemExit: this rank has no place in the job any more.
        RuntimeError: horovodrun does not answer.

    Collective: every rank; blocks until all have.
    """
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if os.environ.get("HOROVOD_ELASTIC") != "1" or not address:
        init()
        return
    server = _Server(address, int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    if again:
        _take_place(server)
    while not _all_are_there(server):
        _take_place(server)
    if again:
        # Horovod would ask for a place, too, and horovodrun take it for two ranks.
        del os.environ["HOROVOD_ELASTIC"]
    try:
        init()
    finally:
        os.environ["HOROVOD_ELASTIC"] = "1"


def _take_place(server: _Server) -> None:
    """Wait until horovodrun has heard of all ranks, and take the place that it gives this one."""
    host, slot = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
    answer = server.ask("GET", f"/rank_and_size/{host}:{slot}")
    values = (answer or "-1").split(",")
    if int(values[0]) < 0:
        logger.warning(
            "%s:%s has no place in the job any more: this rank ends", host, slot
        )
        raise SystemExit(0)
    os.environ.update(zip(PLACE, values, strict=True))


def _all_are_there(server: _Server) -> bool:
    """Return whether all ranks that have a place have come, as the first of them says."""
    rank, size = (int(os.environ[name]) for name in PLACE[:2])
    watched = range(1, size) if rank == 0 else range(1)
    beats: dict[int, tuple[str | None, float]] = {}  # a rank's last one, and since when
    began = time.monotonic()
    for count in itertools.count():
        server.ask("PUT", f"{SCOPE}/{rank}", str(count))
        now = time.monotonic()
        for other in watched:
            beat = server.ask("GET", f"{SCOPE}/{other}")
            if other not in beats or beats[other][0] != beat:
                beats[other] = beat, now
        all_here = all(
            b and now - since < SILENT_SECONDS for b, since in beats.values()
        )
        if rank == 0:
            late = now - began > MISSING_SECONDS
            verdict = GO if all_here else AGAIN if late else None
            if verdict:
                server.ask("PUT", f"{SCOPE}/verdict", verdict)
        else:
            verdict = server.ask("GET", f"{SCOPE}/verdict")
            if not (verdict or all_here) and now - began > 2 * MISSING_SECONDS:
                verdict = AGAIN
        if verdict:
            break
        time.sleep(0.05 + size / 200)  # many ranks ask less often
    return verdict == GO
