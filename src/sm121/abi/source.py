"""Bounded random access to bytes that nobody vouches for.

Every parser here reads through `Source`, so a length field can never make it read, or
allocate, more than the file has.
"""

from __future__ import annotations

import os
from typing import Protocol


class Malformed(Exception):
    """The bytes are not what their own headers say. Caught by `scan`, reported as a fault."""


class Source(Protocol):
    """Something with a size (bytes) from which ranges can be read."""

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes. Raises Malformed when the range is not inside."""
        ...


def check_range(size: int, offset: int, length: int, what: str = "a table") -> None:
    """Raises Malformed unless 0 <= offset and offset + length <= size."""
    if offset < 0 or length < 0 or offset + length > size:
        raise Malformed(
            f"{what} of {length} bytes at offset {offset} reaches past the end ({size} bytes): "
            "the file is cut off or damaged"
        )


class BytesSource:
    """A `Source` over bytes in memory."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.size, offset, length)
        return self._data[offset : offset + length]


class FileSource:
    """A `Source` over an open file descriptor. The caller closes it."""

    __slots__ = ("_fd", "size")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self.size, offset, length)
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise Malformed(f"short read: {len(data)} of {length} bytes at offset {offset}")
        return data
