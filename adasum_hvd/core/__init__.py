"""The core: AdaSum in memory that ranks share and over a network, by the C interface of `adasum.h`.

It needs Linux and NumPy, and neither Horovod nor a framework. The wheel has the library; a
checkout has it after `pip install --editable .`, if there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ABI",
    "CoreError",
    "Group",
    "Network",
    "Unresponsive",
    "quota",
    "share",
    "why_missing",
]

ABI = 6
LIBRARY = Path(__file__).with_name("libadasum.so")
DTYPES = {"float16": 0, "float32": 1, "float64": 2, "bfloat16": 3}
GROUP_OPS = {"adasum": 0, "average": 1, "sum": 2}
_UNRESPONSIVE = -2
# `adasum_tensor`; addresses as integers, so that NumPy computes those of a flat buffer.
TENSOR = np.dtype(
    [("input", "u8"), ("output", "u8"), ("elements", "i8"), ("observation", "u8")]
)
# `adasum_message`; the same.
MESSAGE = np.dtype(
    [("send", "u8"), ("send_bytes", "i8"), ("receive", "u8"), ("receive_bytes", "i8")]
)
# From Gram matrices, float64 [tensors, N (N + 1) / 2], to coefficients, float64 [tensors, N].
Rule: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class CoreError(RuntimeError):
    """The core cannot do what it was called for."""


class Unresponsive(CoreError):
    """A rank has ended, or did not respond within the timeout."""


class Network(Protocol):
    """Messages to ranks that share no memory with this one, over any network.

    Methods are called in a thread that waits for a group, and raise what its call then raises.
    """

    def start(self, messages: NDArray[Any]) -> None:
        """Start one exchange; messages, of :data:`MESSAGE`, by rank."""

    def wait(self) -> None:
        """Wait for the oldest exchange."""

    def abort(self) -> None:
        """Leave the buffers of all exchanges alone, and let no rank wait for this one."""


_Done = ctypes.POINTER(ctypes.c_int)
_Start = ctypes.CFUNCTYPE(None, ctypes.c_void_p, _Done)
_Wait = ctypes.CFUNCTYPE(None, _Done)  # and abort


class _Network(ctypes.Structure):
    _fields_ = [
        ("start", _Start),
        ("wait", _Wait),
        ("abort", _Wait),
        ("problem", ctypes.c_char * 256),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("hosts", ctypes.POINTER(ctypes.c_int)),
        ("places", ctypes.POINTER(ctypes.c_int)),
        ("job_ranks", ctypes.POINTER(ctypes.c_int)),
        ("group_op", ctypes.c_int),
        ("group_size", ctypes.c_int),
        ("timeout_s", ctypes.c_double),
        ("limit", ctypes.c_char_p),
        ("network", ctypes.POINTER(_Network)),
    ]


class _Shards(ctypes.Structure):
    _fields_ = [
        ("group", ctypes.c_void_p),
        ("tensors", ctypes.POINTER(ctypes.c_int)),
        ("count", ctypes.c_int),
    ]


_Doubles = ctypes.POINTER(ctypes.c_double)
_Rule = ctypes.CFUNCTYPE(None, _Doubles, _Doubles, _Done)


class _Extra(ctypes.Structure):
    _fields_ = [
        ("shards", ctypes.POINTER(_Shards)),
        ("shards_count", ctypes.c_int),
        ("rule", _Rule),
    ]


@functools.cache
def _loaded() -> tuple[Any, str]:
    """Return the library and "", or None and why there is none."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.adasum_abi() != ABI:
            return None, f"expected ABI {ABI}, but {LIBRARY.name} has another one"
    except (OSError, AttributeError) as error:
        return None, str(error)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    integers = ctypes.POINTER(integer)
    for name, result, arguments in (
        ("error", ctypes.c_char_p, []),
        ("listen", integer, [ctypes.POINTER(_Config), ctypes.POINTER(pointer), integers, integers]),
        ("connect", integer, [pointer, integers, integers]),
        ("reduce", integer, [pointer, pointer, integer, integer, ctypes.POINTER(_Extra)]),
        ("gather", integer, [pointer, pointer, pointer, ctypes.c_int64]),
        ("levels", integer, [pointer, integers, integer]),
        ("describe", ctypes.c_char_p, [pointer]),
        ("share", pointer, [pointer, ctypes.c_int64]),
        ("free", None, [pointer]),
        ("close", None, [pointer]),
        ("quota", ctypes.c_double, [ctypes.c_char_p, ctypes.c_char_p]),
    ):  # fmt: skip
        function = getattr(library, f"adasum_{name}")
        function.restype, function.argtypes = result, arguments
    return library, ""


def why_missing() -> str:
    """Return why there is no library that fits, or "" if there is one."""
    return _loaded()[1]


def quota(root: Path = Path("/")) -> float:
    """Return the number of processors that control groups grant this process, infinite for all."""
    paths = (bytes(root / name) for name in ("proc/self/cgroup", "sys/fs/cgroup"))
    return _library().adasum_quota(*paths) if _library() else math.inf


def _library() -> Any:
    return _loaded()[0]


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*values)


def _check(code: int) -> None:
    if code:
        kind = Unresponsive if code == _UNRESPONSIVE else CoreError
        raise kind(_library().adasum_error().decode(errors="replace"))


class _Calls:
    """The library's calls of Python, whose errors are raised when the library returns."""

    def __init__(self, size: int, network: Network | None):
        self._size, self._failed = size, list[BaseException]()
        self.functions = _Network()
        if network:
            start = functools.partial(self._start, network)
            self.functions.start = _Start(functools.partial(self._call, start))
            self.functions.wait = _Wait(functools.partial(self._call, network.wait))
            self.functions.abort = _Wait(functools.partial(self._call, network.abort))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        *given, done = arguments
        try:
            function(*given)
            done[0] = 1
        except BaseException as error:
            self._failed.append(error)
            text = str(error) or type(error).__name__
            self.functions.problem = text.encode(errors="replace")[:255]

    def _start(self, network: Network, at: int) -> None:
        table = (ctypes.c_char * (self._size * MESSAGE.itemsize)).from_address(at)
        network.start(np.frombuffer(table, MESSAGE))

    def of_rule(self, rule: Rule, tensors: int) -> Any:
        """Return a rule as the library calls it."""
        pairs = self._size * (self._size + 1) // 2
        shapes = (tensors, pairs), (tensors, self._size)

        def apply(*pointers: Any) -> None:
            grams, coefficients = map(np.ctypeslib.as_array, pointers, shapes)
            coefficients[...] = rule(grams)

        return _Rule(functools.partial(self._call, apply))

    def check(self, code: int, others: Sequence[Group] = ()) -> None:
        """Raise what a call has raised, also for other groups, or the library's error."""
        if not code:
            return
        failed: list[BaseException] = []
        for calls in (self, *(one._calls for one in others)):
            failed += calls._failed
            calls._failed.clear()
        if failed:
            raise failed.pop(0)  # which this frame must not keep
        _check(code)


class Group:
    """Ranks that reduce together; for one thread at a time.

    Every rank makes one, gathers `name` and `nonce` of all, calls :meth:`connect`, and gathers
    whether that returned on all: else none may use its group. Its end closes the connections.

    Args:
        rank: of this process in the group.
        hosts: as `places` and `job_ranks`, by rank: `adasum_config` in `adasum.h`.
        group_op: "adasum", "average" or "sum".
        group_size: ranks in a group; 0: a host is a group.
        timeout_seconds: of a wait in which nothing moves.
        limit: what sets this timeout, for messages.
        network: between places; the group does not keep what keeps the group.

    Attributes:
        name: where this rank listens.
        nonce: what a peer must know to connect.

    Raises:
        CoreError: the system refuses shared memory or a socket.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        places: Sequence[int],
        job_ranks: Sequence[int],
        group_op: str,
        group_size: int,
        timeout_seconds: float,
        limit: str,
        network: Network | None = None,
    ):
        self._handle, name, nonce = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        self._calls = _Calls(len(hosts), network)
        config = _Config(
            ABI, rank, len(hosts), _integers(hosts), _integers(places), _integers(job_ranks),
            GROUP_OPS[group_op], group_size, timeout_seconds, limit.encode(),
            ctypes.pointer(self._calls.functions) if network else None,
        )  # fmt: skip
        _check(_library().adasum_listen(config, self._handle, name, nonce))
        self.name, self.nonce = name.value, nonce.value
        # A rank that waits for this one then fails. The end of the process closes it, too.
        weakref.finalize(self, _library().adasum_close, self._handle).atexit = False

    def connect(self, names: Sequence[int], nonces: Sequence[int]) -> None:
        """Connect by all ranks' names and nonces; CoreError after 10 s, or half of the timeout."""
        names, nonces = _integers(names), _integers(nonces)
        _check(_library().adasum_connect(self._handle, names, nonces))

    def reduce(
        self,
        tensors: NDArray[Any],
        dtype: str,
        shards: Sequence[tuple[Group, Sequence[int]]] = (),
        rule: Rule | None = None,
    ) -> None:
        """Replace outputs by AdaSum over the ranks of inputs; without the GIL.

        Args:
            tensors: of :data:`TENSOR`, the same elements on all ranks.
            dtype: a key of :data:`DTYPES`.
            shards: groups of ranks that hold other shards, and numbers of the tensors that they
                share: dot products are added up over them.
            rule: in AdaSum's place.

        Raises:
            Unresponsive: a rank has ended, or did not respond within the timeout.
            CoreError: this or another rank failed; the groups are of no use afterwards.
            Exception: of the network, or of the rule. Where the rule has not failed it is
                CoreError; then no output has changed, and the group can go on.

        Collective: all ranks, and those of the shards' groups; blocks.
        """
        extra = None
        if shards or rule:
            table = [(one._handle, _integers(own), len(own)) for one, own in shards]
            parts = (_Shards * len(table))(*itertools.starmap(_Shards, table))
            call = self._calls.of_rule(rule, len(tensors)) if rule else _Rule()
            extra = _Extra(parts, len(table), call)
        self._calls.check(
            _library().adasum_reduce(
                self._handle, tensors.ctypes.data, len(tensors), DTYPES[dtype], extra
            ),
            [one for one, _ in shards],
        )

    def gather(self, mine: int, everyone: int, size_bytes: int) -> None:
        """Gather a row of so many bytes from address `mine` to `everyone`, by rank.

        Without the GIL; the same size on all ranks; errors as :meth:`reduce`. Collective; blocks.
        """
        self._calls.check(
            _library().adasum_gather(self._handle, mine, everyone, size_bytes)
        )

    @property
    def levels(self) -> tuple[int, ...]:
        """By level, how many vectors AdaSum joins: the form of an observation's row."""
        sizes = (ctypes.c_int * 64)()
        return tuple(sizes[: _library().adasum_levels(self._handle, sizes, len(sizes))])

    def __str__(self) -> str:
        """Return levels, kernels and threads."""
        return _library().adasum_describe(self._handle).decode()


def share(at: int, size_bytes: int) -> int:
    """Put memory that the ranks of a host can map under a mapping; `at` is its address, of a page.

    Address and content stay. Returns another address of the memory, which `Group.reduce` reduces
    without a copy. Raises CoreError if the system has no such memory.
    """
    if not (other := _library().adasum_share(at, size_bytes)):
        raise CoreError(_library().adasum_error().decode(errors="replace"))
    return other


def free(other: int) -> None:
    """Free what `share` has returned, after the mapping is gone."""
    _library().adasum_free(other)
