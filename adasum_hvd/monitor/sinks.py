"""Outputs for a monitor's records: a JSON-lines file, TensorBoard, or any function."""

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

SUMMARY = ("noise_scale", "adascale_gain", "lengthening")  # over all tensors

Record = dict[str, Any]
Sink = Callable[[Record], Any]


class Jsonl:
    """Appends one JSON line per record; ValueError if the file cannot be written.

    Its folder is created at once, the file with the first record.
    """

    def __init__(self, path: Path):
        self.path = path
        _make_folder(path.parent)
        changed = path if path.exists() else path.parent
        if path.is_dir() or not os.access(changed, os.W_OK):
            raise ValueError(f"expected a file that can be written, but got {path}")

    def __call__(self, record: Record) -> None:
        """Append a record and close the file, so that readers see it at once."""
        line = json.dumps(record, allow_nan=False) + "\n"
        if _is_cut(self.path):
            line = "\n" + line
        with self.path.open("a") as file:
            file.write(line)


class TensorBoard:
    """Writes a scalar `adasum/STATISTIC/TENSOR` per value, and `adasum/STATISTIC` over all.

    Raises ValueError without `tensorboard`, or if the folder cannot be created.
    """

    def __init__(self, folder: Path):
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                f"expected the package tensorboard for the folder {folder}, but got none; "
                "pip install tensorboard, or name a file that ends in .jsonl"
            )
        _make_folder(folder)
        self.folder = folder
        self._file: IO[bytes] | None = None

    def __call__(self, record: Record) -> None:
        """Append the record's values and flush, so that readers see them at once."""
        # TensorBoard's EventFileWriter would import TensorFlow.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            suffix = f"{int(record['time'])}.{socket.gethostname()}.{os.getpid()}"
            self._file = (self.folder / f"events.out.tfevents.{suffix}").open("ab")
            version = Event(wall_time=record["time"], file_version="brain.Event:2")
            RecordWriter(self._file).write(version.SerializeToString())
        values = [
            Summary.Value(tag=f"adasum/{key}/{name}", simple_value=tensor[key])
            for name, tensor in record["tensors"].items()
            for key in NAMES
            if tensor[key] is not None
        ]
        values += [
            Summary.Value(tag=f"adasum/{key}", simple_value=record[key])
            for key in SUMMARY
            if record.get(key) is not None
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
    """Several sinks; a sink that fails is removed with a warning, and training continues.

    `to` has paths that end in `.jsonl`, other paths (folders for TensorBoard) and functions of a
    record, or is one of these; else TypeError.
    """

    def __init__(self, to: Any):
        is_list = isinstance(to, Sequence) and not isinstance(to, str)
        self._sinks: list[Sink] = [*map(_sink, to if is_list else [to])]

    def __call__(self, record: Record) -> None:
        """Pass a record to all sinks."""
        for sink in list(self._sinks):
            try:
                sink(record)
            # A full disk, or any error of a user's function.
            except Exception as error:
                self._sinks.remove(sink)
                warnings.warn(
                    f"AdasumMonitor: {sink!r} failed and gets no more records: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Close the sinks that have open files."""
        for sink in self._sinks:
            getattr(sink, "close", lambda: None)()


def _is_cut(path: Path) -> bool:
    """Return whether a file ends inside a line, of a run that ended while it wrote."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # empty, or write-only
        return False


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"expected a folder that exists or can be created: {error}"
        ) from error


def _sink(target: Any) -> Sink:
    if isinstance(target, str | os.PathLike):
        path = Path(target)
        return Jsonl(path) if path.suffix == ".jsonl" else TensorBoard(path)
    if not callable(target):
        raise TypeError(
            "to: expected paths that end in .jsonl, folders for TensorBoard, or functions of a "
            f"record, but got {target!r}"
        )
    return target
