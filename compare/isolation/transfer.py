"""Inputs and results between processes: the arrays lie in files that nobody sees, open on both
sides, whose memory goes with the last array that shows them, even where a process is killed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401 - gives np.dtype the names bfloat16 and float8_*
import numpy as np

from compare.protocol.arrays import span
from compare.protocol.inputs import Inputs, Result

_MOST_FILES = 200  # in one message; the system takes 253

NESTED = ("shards", "stages")
"""The fields that hold a tuple of dataclasses with arrays of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """An array in the file that comes as number `file`; None: it has no elements. strides: in
    elements, of a view stored with its gaps; None: dense."""

    file: int | None
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """An Inputs or a Result, its arrays Stored in `files`."""

    value: Any
    files: tuple[BinaryIO, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Announced:
    """What a Packed is on the way: its files follow the message."""

    value: Any
    files: int


def pack(value: Inputs | Result) -> Packed:
    """The dataclass with each of its arrays, and of what it nests, written to a file and replaced
    by a Stored."""
    files: list[BinaryIO] = []
    return Packed(value=_stored(value, files), files=tuple(files))


def send(connection: Connection, message: tuple[Any, ...]) -> None:
    """Sends a message, some of whose parts may be Packed. OSError where nobody listens any more."""
    packed = [part for part in message if isinstance(part, Packed)]
    connection.send(tuple(_announced(p) if isinstance(p, Packed) else p for p in message))
    files = [file for part in packed for file in part.files]
    if files:
        with _socket_of(connection) as channel:
            for batch in itertools.batched(files, _MOST_FILES):
                socket.send_fds(channel, [b"\0"], [file.fileno() for file in batch])
    for file in files:
        file.close()


def receive(connection: Connection) -> Any:
    """The next message, what was Packed in it as the dataclass it was. Its arrays are mapped; a
    write to one stays in this process. EOFError or OSError where the other side is gone."""
    message = connection.recv()
    if not isinstance(message, tuple):
        return message
    count = sum(part.files for part in message if isinstance(part, _Announced))
    descriptors: list[int] = []
    if count:
        with _socket_of(connection) as channel:
            for start in range(0, count, _MOST_FILES):
                expected = min(_MOST_FILES, count - start)
                descriptors += socket.recv_fds(channel, 1, expected)[1]
    try:
        if len(descriptors) != count:
            raise EOFError(f"{len(descriptors)} of {count} files came")
        left = iter(descriptors)
        return tuple(_unpacked(p, left) if isinstance(p, _Announced) else p for p in message)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _announced(packed: Packed) -> _Announced:
    return _Announced(value=packed.value, files=len(packed.files))


def _unpacked(announced: _Announced, descriptors: Iterator[int]) -> Any:
    own = list(itertools.islice(descriptors, announced.files))
    return _fetched(announced.value, own)


def _stored(value: Any, files: list[BinaryIO]) -> Any:
    return _with_arrays(value, np.ndarray, lambda array: _store(array, files))


def _fetched(value: Any, descriptors: list[int]) -> Any:
    return _with_arrays(value, Stored, lambda stored: _fetch(stored, descriptors))


def _with_arrays(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The dataclass with each `kind` in it changed: in a field, in a mapping, in what it nests."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if isinstance(held, kind):
            changed[field.name] = change(held)
        elif isinstance(held, Mapping):
            changed[field.name] = {
                name: change(item) if isinstance(item, kind) else item
                for name, item in held.items()
            }
        elif field.name in NESTED and held:
            changed[field.name] = tuple(_with_arrays(part, kind, change) for part in held)
    return dataclasses.replace(value, **changed)


def _store(array: np.ndarray, files: list[BinaryIO]) -> Stored:
    strides = None
    flat = None if array.flags.c_contiguous else span(array)
    if flat is not None:
        strides = tuple(step // array.itemsize for step in array.strides)
    held = np.ascontiguousarray(array) if flat is None else flat
    if held.size == 0:
        return Stored(file=None, dtype=array.dtype.name, shape=array.shape)
    file = _hidden_file()
    files.append(file)
    held.reshape(-1).view(np.uint8).tofile(file)
    return Stored(file=len(files) - 1, dtype=array.dtype.name, shape=array.shape, strides=strides)


def _hidden_file() -> BinaryIO:
    """A file without a name: in memory where the system has such, since results of gigabytes
    would wait for a disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("mla-crosscheck"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _fetch(stored: Stored, descriptors: list[int]) -> np.ndarray:
    dtype = np.dtype(stored.dtype)
    if stored.file is None:
        return np.empty(stored.shape, dtype)
    memory = mmap.mmap(descriptors[stored.file], 0, access=mmap.ACCESS_COPY)
    array = np.frombuffer(memory, np.uint8).view(dtype)
    if stored.strides is None:
        return array.reshape(stored.shape)
    steps = tuple(step * dtype.itemsize for step in stored.strides)
    return np.lib.stride_tricks.as_strided(array, stored.shape, steps)


def _socket_of(connection: Connection) -> socket.socket:
    """The connection as the socket that it is; closing this leaves the connection open."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def fingerprint(inputs: Inputs) -> str:
    """A hash of every scalar, shape and dtype and of up to 64 rows of each array: tells in a
    moment whether two processes hold the same inputs."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Mapping):
            for name, item in sorted(value.items()):
                _add(digest, name, item)
        elif field.name in NESTED:
            for part in value or ():
                digest.update(fingerprint(part).encode())
        elif field.name != "case":
            _add(digest, field.name, value)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, value: Any) -> None:
    if not isinstance(value, np.ndarray):
        digest.update(f"{name}={value!r}".encode())
        return
    rows = np.linspace(0, len(value) - 1, min(len(value), 64)).astype(int)
    digest.update(f"{name}:{value.dtype.name}{list(value.shape)}".encode())
    digest.update(np.ascontiguousarray(value[rows]).view(np.uint8))
