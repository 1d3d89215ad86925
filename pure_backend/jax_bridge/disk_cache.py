"""Bytes by text, on disk, shared by the processes of a user.

An entry is one file. Its name is the hash of its key; the key itself is in the file and compared in full.

    magic | blake2b of all that follows | length of the header | header, JSON: {"key", "metadata"} | content

A file is written beside its place and renamed into it: a reader sees a whole entry or none, and of two writers the later one
wins. Its modification time is that of its last use; the entries used longest ago go first when the folder grows over its limit.
Nothing here raises: what cannot be read is dropped, and where nothing can be written the cache is read only, with one warning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_logger = logging.getLogger("pure_backend.cache")

_MAGIC = b"pure_backend 1\n"
_DIGEST = 32
_LENGTH = 8
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ABANDONED_S = 3600


class Entry(NamedTuple):
    """What is stored under a key."""

    metadata: dict[str, Any]
    content: bytes


class Stored(NamedTuple):
    """A file of the cache: when it was last used, its size, its path."""

    used: float
    size: int
    path: str


class DiskCache:
    """Entries in one folder.

    Args:
        folder: Made at the first `put`, for its owner alone: executables are read from it.
        limit: Bytes that the entries may take together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._writable = True

    def get(self, key: str) -> Entry | None:
        """The entry of a key, or None."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        found = _unpacked(data)
        if found is None:
            _logger.warning("dropped a damaged entry of the disk cache: %s", path)
            self.drop(key)
            return None
        known, entry = found
        if known != key:  # another key with this hash
            return None
        _touch(path)
        return entry

    def put(self, key: str, metadata: dict[str, Any], content: bytes) -> bool:
        """Store an entry; whether it was stored."""
        data = _packed(key, Entry(metadata, content))
        if not self._writable or len(data) > self.limit:
            return False
        try:
            self._write(self._path(key), data)
        except OSError as error:
            self._writable = False
            _logger.warning("cannot write to the disk cache (%s): programs are not stored", error)
            return False
        self.trim()
        return True

    def drop(self, key: str) -> None:
        """Remove the entry of a key."""
        _remove(self._path(key))

    def entries(self) -> list[Stored]:
        """The files of all entries, the one used longest ago first."""
        return sorted(_files(self.folder, ".entry"))

    def trim(self) -> None:
        """Remove what was used longest ago until the limit is kept, and what dead writers left."""
        entries = self.entries()
        surplus = sum(entry.size for entry in entries) - self.limit
        for entry in entries:
            if surplus <= 0:
                break
            _remove(entry.path)
            surplus -= entry.size
        for unfinished in _files(self.folder, ".unfinished"):
            if unfinished.used < time.time() - _ABANDONED_S:
                _remove(unfinished.path)

    def clear(self) -> int:
        """Remove all entries; how many there were."""
        entries = self.entries()
        for stored in [*entries, *_files(self.folder, ".unfinished")]:
            _remove(stored.path)
        return len(entries)

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.entry"

    def _write(self, path: Path, data: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(suffix=".unfinished", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except OSError:
            _remove(name)
            raise


def disk_cache() -> DiskCache | None:
    """The cache that the environment names, or None where it is switched off.

    `PURE_BACKEND_CACHE_DIR` is its folder (by default in the user's cache folder; empty or `0`: no disk cache),
    `PURE_BACKEND_CACHE_SIZE` its limit (bytes, or as `500M`; by default `2G`).

    Raises:
        ValueError: The limit is no size.
    """
    folder = os.environ.get("PURE_BACKEND_CACHE_DIR")
    if folder in ("", "0"):
        return None
    return _cache_at(folder, os.environ.get("PURE_BACKEND_CACHE_SIZE", "2G"))


@functools.lru_cache(maxsize=16)
def _cache_at(folder: str | None, limit: str) -> DiskCache:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", limit.strip().upper())
    if match is None:
        raise ValueError(f"PURE_BACKEND_CACHE_SIZE must be a number of bytes or a size as '500M' or '2G', got {limit!r}")
    if folder is None:
        import platformdirs

        folder = platformdirs.user_cache_dir("pure_backend", appauthor=False)
    return DiskCache(Path(folder).expanduser(), int(match[1]) * _UNITS[match[2]])


def _packed(key: str, entry: Entry) -> bytes:
    header = json.dumps({"key": key, "metadata": entry.metadata}).encode()
    rest = b"".join((len(header).to_bytes(_LENGTH, "little"), header, entry.content))
    return b"".join((_MAGIC, _digest(rest), rest))


def _unpacked(data: bytes) -> tuple[str, Entry] | None:
    """The inverse of `_packed`: the key and its entry; None for anything else."""
    start = len(_MAGIC) + _DIGEST
    magic, digest, rest = data[: len(_MAGIC)], data[len(_MAGIC) : start], data[start:]
    if magic != _MAGIC or digest != _digest(rest):
        return None
    end = _LENGTH + int.from_bytes(rest[:_LENGTH], "little")
    header = json.loads(rest[_LENGTH:end])
    return header["key"], Entry(header["metadata"], rest[end:])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _files(folder: Path, suffix: str) -> Iterator[Stored]:
    try:
        found = list(os.scandir(folder))
    except OSError:
        return
    for file in found:
        if file.name.endswith(suffix):
            try:
                seen = file.stat()
            except OSError:  # another process removed it
                continue
            yield Stored(seen.st_mtime, seen.st_size, file.path)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:  # a folder that is read only has no order of use
        return


def _remove(path: str | Path) -> None:
    try:
        os.unlink(path)
    except OSError:  # another process removed it, or nobody may
        return
