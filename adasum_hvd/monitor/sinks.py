"""Where a monitor's records go: a file of JSON lines, TensorBoard, any function."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from adasum_hvd.monitor.statistics import NAMES

Record = dict[str, Any]
Sink = Callable[[Record], Any]


class Jsonl:
    """Appends a line of JSON per record; `adasum-hvd plot` draws it.

    Args:
        path: the file; its folder is made. It is opened with the first record.
    """

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(
            path if path.exists() else path.parent, os.W_OK
        ):
            raise ValueError(f"required a file that can be written, got {path}")

    def __call__(self, record: Record) -> None:
        """Append a record, so that a reader sees it at once."""
        with self.path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


class TensorBoard:
    """Writes a scalar `adasum/STATISTIC/TENSOR` per value.

    Args:
        folder: of the event files; it is made with the first record.

    Raises:
        ValueError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: Path):
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                f"required the package tensorboard for the folder {folder}, got none; "
                "pip install tensorboard, or name a file that ends in .jsonl"
            )
        self.folder = folder
        self._file: IO[bytes] | None = None

    def __call__(self, record: Record) -> None:
        """Append a record, so that a reader sees it at once."""
        # Not its EventFileWriter, which imports TensorFlow where there is one.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            where = f"{int(record['time'])}.{socket.gethostname()}.{os.getpid()}"
            self._file = (self.folder / f"events.out.tfevents.{where}").open("ab")
            version = Event(wall_time=record["time"], file_version="brain.Event:2")
            RecordWriter(self._file).write(version.SerializeToString())
        values = [
            Summary.Value(tag=f"adasum/{what}/{name}", simple_value=tensor[what])
            for name, tensor in record["tensors"].items()
            for what in NAMES
            if tensor[what] is not None
        ]
        event = Event(wall_time=record["time"], step=record["step"])
        event.summary.value.extend(values)
        RecordWriter(self._file).write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Sinks:
    """Several sinks; one that fails is left out, with a warning, and training goes on.

    Args:
        to: paths that end in `.jsonl`, other paths (folders for TensorBoard), functions of a
            record; or one of these.

    Raises:
        TypeError: something else.
        ValueError: a file that cannot be written; TensorBoard is not installed.
    """

    def __init__(self, to: Any):
        several = isinstance(to, Sequence) and not isinstance(to, str)
        self._sinks: list[Sink] = [_sink(one) for one in (to if several else [to])]

    def __call__(self, record: Record) -> None:
        """Hand a record to all."""
        for sink in list(self._sinks):
            try:
                sink(record)
            except (
                Exception
            ) as error:  # a full disk, or whatever a user's function raises
                self._sinks.remove(sink)
                warnings.warn(
                    f"AdasumMonitor: {sink!r} failed and gets no more records: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Close those that hold something open."""
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()


def _sink(one: Any) -> Sink:
    if isinstance(one, str | os.PathLike):
        path = Path(one)
        return Jsonl(path) if path.suffix == ".jsonl" else TensorBoard(path)
    if not callable(one):
        raise TypeError(
            "to: required paths that end in .jsonl, folders for TensorBoard, or functions of a "
            f"record, got {one!r}"
        )
    return one
