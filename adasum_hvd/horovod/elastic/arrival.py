"""The rendezvous of an elastic job's ranks, before Horovod connects them.

An exception in Horovod's own would end the process: docs/elastic.md, Differences. Here the ranks
wait in Python, through horovodrun's key-value server. Rank 0 writes "go" when all ranks have
arrived. If a rank is missing it writes "again", and every rank requests a new assignment;
horovodrun replies when each rank has asked or ended.

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

from adasum_hvd.base.logging import logger

# The fields of horovodrun's reply, in its order.
ASSIGNMENT = tuple(
    f"HOROVOD_{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
)
MISSING_SECONDS = 30.0  # then all ranks request new assignments
UNRESPONSIVE_SECONDS = 10.0  # a waiting rank sends heartbeats more often
REQUEST_SECONDS = 60.0
GO, AGAIN = "go", "again"
SCOPE = "/adasum.rendezvous"


def _request(method: str, path: str, body: str | None = None) -> str | None:
    """Return the value at `/scope/key` of horovodrun's key-value server, or None if it has none.

    New assignments empty its scopes. A request that waits for other ranks has no time limit, and
    logs a warning every minute.
    """
    host = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    connection = http.client.HTTPConnection(host, port, timeout=REQUEST_SECONDS)
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
            f"elastic job: expected a reply from horovodrun at {host}:{port}, but got "
            f"{type(error).__name__}: {error}; it has ended, or has declared this rank dead: see "
            "its output"
        ) from error
    finally:
        connection.close()


def init_together(init: Callable[[], None], again: bool) -> None:
    """Start Horovod: at once, or in an elastic job when all ranks have arrived.

    If it was started before (`again`), assignments may have changed; a rank without a slot ends.
    Collective: every rank; blocks until all have called it.
    """
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if os.environ.get("HOROVOD_ELASTIC") != "1" or not address:
        init()
        return
    if again:
        _request_assignment()
    while not _all_have_arrived():
        _request_assignment()
    if again:
        # Else Horovod requests an assignment, too, and horovodrun counts two ranks.
        del os.environ["HOROVOD_ELASTIC"]
    try:
        init()
    finally:
        os.environ["HOROVOD_ELASTIC"] = "1"


def _request_assignment() -> None:
    """Wait for horovodrun's reply with this rank's number and slot, and set the variables."""
    host, slot = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
    reply = _request("GET", f"/rank_and_size/{host}:{slot}")
    values = (reply or "-1").split(",")
    if int(values[0]) < 0:
        logger.warning("the job has no slot %s:%s any more: this rank ends", host, slot)
        raise SystemExit(0)
    os.environ.update(zip(ASSIGNMENT, values, strict=True))


def _all_have_arrived() -> bool:
    """Return whether all assigned ranks have arrived, as rank 0 decides."""
    rank, size = (int(os.environ[name]) for name in ASSIGNMENT[:2])
    peers = range(1, size) if rank == 0 else range(1)
    # By peer: its last heartbeat, and the time when this rank first saw that heartbeat.
    heartbeats: dict[int, tuple[str | None, float]] = {}
    began = time.monotonic()
    for count in itertools.count():
        _request("PUT", f"{SCOPE}/{rank}", str(count))
        now = time.monotonic()
        for peer in peers:
            heartbeat = _request("GET", f"{SCOPE}/{peer}")
            if peer not in heartbeats or heartbeats[peer][0] != heartbeat:
                heartbeats[peer] = heartbeat, now
        all_here = all(
            heartbeat and now - since < UNRESPONSIVE_SECONDS
            for heartbeat, since in heartbeats.values()
        )
        if rank == 0:
            is_late = now - began > MISSING_SECONDS
            decision = GO if all_here else AGAIN if is_late else None
            if decision:
                _request("PUT", f"{SCOPE}/verdict", decision)
        else:
            decision = _request("GET", f"{SCOPE}/verdict")
            if not (decision or all_here) and now - began > 2 * MISSING_SECONDS:
                decision = AGAIN
        if decision:
            break
        time.sleep(0.05 + size / 200)  # the more ranks, the fewer requests of each
    return decision == GO
