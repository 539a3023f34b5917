"""The identity of rows: a digest that is the same in each process for the same rows of the same files.

It covers the rows' classes and members, such as files, cuts, columns and their casts. How the files are opened, such as
the store's keys, is no part of it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from types import FunctionType, MappingProxyType
from typing import Any

import pyarrow as pa

from data_service.formats.images import ClassNames
from data_service.storage.source_files import SourceFile


def identity_of(rows: object) -> str:
    """Returns the digest of rows, such as a tuple of runs."""
    file = io.BytesIO()
    _Identity(file).dump(rows)
    return hashlib.sha256(file.getvalue()).hexdigest()


class _Identity(pickle.Pickler):
    """Writes bytes that are compared and never read.

    What differs by process, or says nothing about the rows, is written in another form, or left out. What the parts of
    a source have in common, such as its columns and their casts, is written as a digest, which is computed once.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        # Without a memo. With one, the bytes depend on which of the equal values are one object.
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, SourceFile):
            return tuple, (["file", *obj.identity],)
        if isinstance(obj, ClassNames):  # a set, and what was computed of it so far
            return tuple, (["classes", *obj.names],)
        if isinstance(obj, (FunctionType, pa.Schema, MappingProxyType)):
            return tuple, (["shared", _SHARED.digest_of(obj)],)
        if isinstance(obj, pa.Array):  # its buffers may have unused bits
            return tuple, (["array", obj.type, obj.to_pylist()],)
        return NotImplemented


class _SharedDigests:
    """The digests of functions, schemas and mappings, which do not change.

    Each is kept with its object, so that no other object gets the same id meanwhile.
    """

    MAX = 10_000

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, str]] = {}

    def digest_of(self, shared: FunctionType | pa.Schema | MappingProxyType[Any, Any]) -> str:
        found = self._found.get(id(shared))
        if found is None:
            if len(self._found) >= self.MAX:
                self._found.clear()
            found = self._found[id(shared)] = shared, identity_of(_members_of(shared))
        return found[1]


_SHARED = _SharedDigests()


def _members_of(shared: FunctionType | pa.Schema | MappingProxyType[Any, Any]) -> list[Any]:
    if isinstance(shared, FunctionType):
        return ["function", *_identity_of_function(shared)]
    if isinstance(shared, pa.Schema):
        fields = [(field.name, field.type, field.nullable, field.metadata) for field in shared]
        return ["schema", fields, shared.metadata]
    return ["mapping", dict(shared)]


def _identity_of_function(function: FunctionType) -> tuple[Any, ...]:
    """Returns its place in the code, and all that it got from the function that made it."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    place = function.__module__, function.__qualname__, function.__code__.co_firstlineno
    return *place, cells, function.__defaults__, function.__kwdefaults__
