"""The rendezvous of ranks that know only the address of rank 0."""

from __future__ import annotations

import http.client
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer
from horovod.runner.util.threads import in_thread

from adasum_hvd.horovod.launch.assignment import RankInfo
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.horovod.launch.route import Route

Reply = dict[str, Any]  # JSON
# Takes this rank's info and rank 0's function from all infos to a reply; returns that reply.
Rendezvous = Callable[[RankInfo, Callable[[Sequence[RankInfo]], Reply]], Reply]
_OPEN, _POLL_SECONDS = "open", 0.05
_LATE = (TimeoutError, RuntimeError)  # the latter is torch's DistStoreError


class HttpStore:
    """A store on Horovod's own key-value server, for ranks without torch.

    Rank 0 listens on the first free one of its context's ports.
    """

    def __init__(self, context: LaunchContext, timeout_seconds: float):
        self._host = "127.0.0.1" if context.rank == 0 else context.address
        self._scope = f"adasum.{zlib.crc32(context.job.encode())}"
        self._ports, self._timeout_seconds = context.ports, timeout_seconds
        if context.rank == 0:
            self._ports = [_serve(context.ports, self._scope)]

    def _request(
        self, port: int, method: str, key: str, body: str | None = None
    ) -> bytes | None:
        """Return the server's response; None if it has no value or does not run yet."""
        connection = http.client.HTTPConnection(self._host, port, timeout=5)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request(method, f"/{self._scope}/{key}", body)
            response = connection.getresponse()
            content = response.read()
            return content if response.status == http.client.OK else None
        return None

    def _until_there(self, method: str, key: str, body: str | None = None) -> bytes:
        limit = time.monotonic() + self._timeout_seconds
        while True:
            for port in self._ports:
                # Other programs, and other jobs' ranks, may listen on the ports in front.
                if self._request(port, "GET", _OPEN) is not None:
                    self._ports = [port]
                    if (reply := self._request(port, method, key, body)) is not None:
                        return reply
            if time.monotonic() > limit:
                ports = ", ".join(map(str, self._ports))
                raise TimeoutError(f"no value for {key} on {self._host}, port {ports}")
            time.sleep(_POLL_SECONDS)

    def set(self, key: str, value: str) -> None:
        """Wait for rank 0's server, then store a value."""
        self._until_there("PUT", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it; raise TimeoutError if no rank has stored it."""
        return self._until_there("GET", key)


def _serve(ports: Sequence[int], scope: str) -> int:
    """Start a server on the first port that is free; return its number."""
    for port in ports:
        try:
            server = RendezvousHTTPServer(("", port), KVStoreHandler, 0)
        except OSError as error:
            in_use = error
            continue
        server.cache[scope] = {_OPEN: b""}
        server.daemon_threads = True
        in_thread(target=server.serve_forever)
        return port
    raise LaunchError(
        f"MASTER_PORT: expected a free port among {', '.join(map(str, ports))}, but got all of "
        f"them in use ({in_use}); set MASTER_PORT on all ranks, and leave the next one free"
    ) from in_use


def through(
    store: Any, mine: RankInfo, reply_to: Callable[[Sequence[RankInfo]], Reply]
) -> Reply:
    """Send this rank's info through a store; return rank 0's reply, an error if a rank is missing.

    It is an :class:`HttpStore` or one of torch's, and may outlive the ranks, as torchrun's does.
    """
    context = mine.context
    prefix = f"adasum.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        store.set(f"{prefix}.{context.rank}", json.dumps(asdict(mine)))
        if context.rank:
            return json.loads(store.get(f"{prefix}.reply"))
    except _LATE as error:
        raise LaunchError(_missing(context, 0, error)) from error
    infos: list[RankInfo] = []
    try:
        while len(infos) < context.size:
            infos.append(_unpack(store.get(f"{prefix}.{len(infos)}")))
    except _LATE as error:
        reply: Reply = {"error": _missing(context, len(infos), error)}
    else:
        reply = reply_to(infos)
    store.set(f"{prefix}.reply", json.dumps(reply))
    return reply


def _unpack(data: bytes) -> RankInfo:
    fields = json.loads(data)
    context, route = LaunchContext(**fields["context"]), Route(**fields["route"])
    return RankInfo(context, fields["hostname"], route)


def _missing(context: LaunchContext, rank: int, error: Exception) -> str:
    return (
        f"{context.scheduler}: expected {context.size} ranks with rank 0 on {context.address}, "
        f"but rank {rank} did not respond ({error}); start all ranks with the same MASTER_ADDR "
        "and MASTER_PORT, or raise HOROVOD_START_TIMEOUT"
    )
