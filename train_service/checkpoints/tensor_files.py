"""Tensors as the bytes of a safetensors file.

The file is laid out once in host memory and refilled at each checkpoint.

Copying into existing memory is several times faster than copying into new memory. The copied bytes are already the
file, so nothing is assembled afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch

ALIGNMENT = 8
# The names of dtypes in safetensors.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The metadata key in the header that holds the form of a nested state.
NEST = "nest"


class TensorFile:
    """One file, filled by one thread at a time. The result of `fill` is valid until the next `fill`."""

    def __init__(self, touched: Callable[[], None] = lambda: None) -> None:
        """Create the file. `touched` is called for each tensor, because copying a large model takes long."""
        self._touched = touched
        self._form: object = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}

    def fill(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> memoryview:
        """Return the bytes of a file with these tensors.

        The bytes hold the tensors' present values. Raises `TypeError` for a dtype that the format does not know.
        """
        metadata = dict(metadata or {})
        form = ({name: (one.dtype, one.shape) for name, one in tensors.items()}, metadata)
        pinned = any(one.is_cuda for one in tensors.values())
        if form != self._form:
            self._lay_out(tensors, metadata, pinned)
            self._form = form
        with torch.no_grad():
            for name, one in tensors.items():
                self._touched()
                self._views[name].copy_(one.detach(), non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        return self._buffer.numpy().data

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], pinned: bool) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        # Wide elements come first, so that each tensor is aligned. Sorting by name makes the order reproducible.
        ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        at = 0
        for name in ordered:
            tensor = tensors[name]
            if tensor.dtype not in DTYPES:
                raise TypeError(f"{name} is {tensor.dtype}, which no checkpoint can hold")
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + size],
            }
            at += size
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % ALIGNMENT)
        start = ALIGNMENT + len(encoded)
        buffer = torch.empty(start + at, dtype=torch.uint8, pin_memory=pinned)
        buffer[:start] = torch.frombuffer(bytearray(len(encoded).to_bytes(8, "little") + encoded), dtype=torch.uint8)
        self._buffer = buffer
        self._views = {
            name: buffer[start + header[name]["data_offsets"][0] : start + header[name]["data_offsets"][1]]
            .view(tensors[name].dtype)
            .view(tensors[name].shape)
            for name in ordered
        }


def take_apart(nest: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Split a nested value into tensors and JSON.

    The value consists of dicts, lists and tuples. `put_together` is the inverse.

    Raises `TypeError` for a value that is neither a tensor nor plain.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, json.dumps(_flat(nest, tensors), separators=(",", ":"))


def put_together(data: bytes) -> Any:
    """Return the nested value of a file's bytes. `take_apart` made the file's content. Nothing in it is code."""
    length = int.from_bytes(data[:8], "little")
    form = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][NEST])
    return _nested(form, safetensors.torch.load(data))


def _flat(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the JSON form of a value.

    Plain values stay unchanged. A value without a JSON form becomes a list that begins with its kind.
    """
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return ["tensor", name]
    if isinstance(value, dict):
        # Use pairs, because keys may be numbers: parameters are numbered.
        return ["dict", [[_flat(key, tensors), _flat(one, tensors)] for key, one in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__ if type(value) in (list, tuple) else "tuple", [_flat(v, tensors) for v in value]]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bool, int, float, str)):  # for example an enum or a number of NumPy's
        return _flat(_plain(value), tensors)
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__} of an optimizer or scheduler: {value!r:.200}")


def _plain(value: bool | int | float | str) -> bool | int | float | str:
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def _nested(form: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(form, list):
        return form
    kind, inner = form
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {_nested(key, tensors): _nested(one, tensors) for key, one in inner}
    values = [_nested(one, tensors) for one in inner]
    return tuple(values) if kind == "tuple" else values
