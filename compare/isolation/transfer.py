"""Passes inputs and results between processes: arrays lie in anonymous memory files that both map,
whose memory is freed with the last array that maps it, even where a process is killed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import mmap
import os
import pickle
import socket
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401 - gives np.dtype the names bfloat16 and float8_*
import numpy as np

from compare.protocol.arrays import span
from compare.protocol.inputs import Inputs, Result

_MOST_FILES = 200  # in one message; the system takes 253


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """An Inputs or a Result, pickled; the memory of its arrays is in `files`, in their order."""

    content: bytes
    files: tuple[BinaryIO, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Announced:
    """What a Packed is on the way: its files follow the message."""

    content: bytes
    files: int


class _Pickler(pickle.Pickler):
    """Arrays out of band, wherever they are nested. NumPy's own way would copy those whose dtype is
    of ml_dtypes and those that aren't dense into the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, np.ndarray):
            return NotImplemented
        strides = None
        flat = None if obj.flags.c_contiguous else span(obj)
        if flat is not None:  # stored with its gaps
            strides = obj.strides
        dense = np.ascontiguousarray(obj) if flat is None else flat
        buffer = pickle.PickleBuffer(dense.reshape(-1).view(np.uint8)) if dense.size else None
        return _array, (buffer, obj.dtype.name, obj.shape, strides)


def _array(
    buffer: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> np.ndarray:
    """The array whose bytes are in `buffer`; None: it has no elements."""
    if buffer is None:
        return np.empty(shape, np.dtype(dtype))
    array = np.frombuffer(buffer, np.uint8).view(np.dtype(dtype))
    if strides is None:
        return array.reshape(shape)
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def pack(value: Inputs | Result) -> Packed:
    """The dataclass, pickled; each array in it is written to a file."""
    files: list[BinaryIO] = []

    def store(buffer: pickle.PickleBuffer) -> None:
        files.append(_hidden_file())
        np.frombuffer(buffer, np.uint8).tofile(files[-1])

    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=store).dump(value)
    return Packed(content=content.getvalue(), files=tuple(files))


def send(connection: Connection, message: tuple[Any, ...]) -> None:
    """Sends a message, some of whose parts may be Packed. OSError where the receiver is gone."""
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
    write to one stays in this process. EOFError or OSError where the sender is gone."""
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
        memory = (mmap.mmap(number, 0, access=mmap.ACCESS_COPY) for number in descriptors)
        return tuple(
            pickle.loads(part.content, buffers=list(itertools.islice(memory, part.files)))
            if isinstance(part, _Announced)
            else part
            for part in message
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _announced(packed: Packed) -> _Announced:
    return _Announced(content=packed.content, files=len(packed.files))


def _hidden_file() -> BinaryIO:
    """A file without a name: in memory where the system has such, since results of gigabytes
    would wait for a disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("mla-crosscheck"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _socket_of(connection: Connection) -> socket.socket:
    """The connection as the socket that it is; closing this leaves the connection open."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def fingerprint(inputs: Inputs) -> str:
    """A hash of every scalar, shape and dtype and of up to 64 rows of each array: tells in a
    moment whether two processes hold the same inputs."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(inputs):
        if field.name != "case":
            _add(digest, field.name, getattr(inputs, field.name))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in sorted(value.items()):
            _add(digest, key, item)
    elif isinstance(value, tuple) and any(isinstance(item, Inputs) for item in value):
        for item in value:
            digest.update(fingerprint(item).encode())
    elif isinstance(value, np.ndarray):
        rows = np.linspace(0, len(value) - 1, min(len(value), 64)).astype(int)
        digest.update(f"{name}:{value.dtype.name}{list(value.shape)}".encode())
        digest.update(np.ascontiguousarray(value[rows]).view(np.uint8))
    else:
        digest.update(f"{name}={value!r}".encode())
