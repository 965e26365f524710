"""How ranks that know only where rank 0 is tell one another the rest."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer
from horovod.runner.util.threads import in_thread

from adasum_hvd.launch.assignment import Hello
from adasum_hvd.launch.place import LaunchError, Place
from adasum_hvd.launch.route import Route

Answer = dict[str, Any]  # JSON
# From what this rank says of itself, and rank 0's function of what all say, to its answer.
Meeting = Callable[[Hello, Callable[[Sequence[Hello]], Answer]], Answer]
_SCOPE, _POLL_SECONDS = "adasum", 0.05
_LATE = (TimeoutError, RuntimeError)  # the latter is torch's DistStoreError


class Store(Protocol):
    """Values by name, kept by rank 0."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def get(self, key: str) -> Any:
        """Return a value in bytes, as soon as it is there; an error when it takes too long."""


class SmallStore:
    """A store on Horovod's own key-value server, for ranks without torch.

    Args:
        place: where this process stands; rank 0 listens on the port behind `place.port`.
        timeout_seconds: how long to wait for a value.

    Raises:
        LaunchError: the port is taken.
    """

    def __init__(self, place: Place, timeout_seconds: float):
        self._host = "127.0.0.1" if place.rank == 0 else place.address
        self._port, self._timeout_seconds = place.port + 1, timeout_seconds
        if place.rank == 0:
            try:
                server = RendezvousHTTPServer(("", self._port), KVStoreHandler, 0)
            except OSError as error:
                raise LaunchError(
                    f"MASTER_PORT: required a free port behind it, got {self._port} in use "
                    f"({error}); set it to another one, on all ranks"
                ) from error
            server.daemon_threads = True
            in_thread(target=server.serve_forever)

    def _request(self, method: str, key: str, body: str | None = None) -> bytes | None:
        """Return what the server answers, None where it has, or is, nothing yet."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5)
        try:
            connection.request(method, f"/{_SCOPE}/{key}", body)
            response = connection.getresponse()
            content = response.read()
            return content if response.status == http.client.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _until_there(self, method: str, key: str, body: str | None = None) -> bytes:
        limit = time.monotonic() + self._timeout_seconds
        while (answer := self._request(method, key, body)) is None:
            if time.monotonic() > limit:
                raise TimeoutError(f"nothing under {key} on {self._host}:{self._port}")
            time.sleep(_POLL_SECONDS)
        return answer

    def set(self, key: str, value: str) -> None:
        """Keep a value, as soon as rank 0 is there."""
        self._until_there("PUT", key, value)

    def get(self, key: str) -> bytes:
        """Return a value, as soon as it is there.

        Raises:
            TimeoutError: it was not there in time.
        """
        return self._until_there("GET", key)


def _pack(hello: Hello) -> str:
    return json.dumps(asdict(hello))


def _unpack(data: bytes) -> Hello:
    fields = json.loads(data)
    place, route = Place(**fields["place"]), Route(**fields["route"])
    return Hello(place, fields["hostname"], route)


class InStore:
    """A meeting in a store.

    Args:
        store: all ranks'; it may outlive them, as torchrun's does.
    """

    def __init__(self, store: Store):
        self._store = store
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"adasum.{attempt}"

    def __call__(
        self, mine: Hello, answer_to: Callable[[Sequence[Hello]], Answer]
    ) -> Answer:
        """Return rank 0's answer to what all ranks say; an error where some do not come."""
        place = mine.place
        try:
            self._store.set(f"{self._prefix}.{place.rank}", _pack(mine))
        except _LATE as error:
            raise LaunchError(_missing(place, 0, error)) from error
        if place.rank == 0:
            answer = self._answer(place, answer_to)
            self._store.set(f"{self._prefix}.answer", json.dumps(answer))
            return answer
        try:
            return json.loads(self._store.get(f"{self._prefix}.answer"))
        except _LATE as error:
            raise LaunchError(_missing(place, 0, error)) from error

    def _answer(
        self, place: Place, answer_to: Callable[[Sequence[Hello]], Answer]
    ) -> Answer:
        hellos = []
        for rank in range(place.size):
            try:
                hellos.append(_unpack(self._store.get(f"{self._prefix}.{rank}")))
            except _LATE as error:
                return {"error": _missing(place, rank, error)}
        return answer_to(hellos)


def _missing(place: Place, rank: int, error: Exception) -> str:
    return (
        f"{place.scheduler}: required {place.size} ranks with rank 0 on {place.address}, ports "
        f"{place.port} and {place.port + 1}, got nothing from rank {rank} ({error}); start all "
        "ranks with the same MASTER_ADDR and MASTER_PORT, or give them longer by "
        "HOROVOD_START_TIMEOUT"
    )
