"""Tensors as the bytes of a safetensors file.

The file is laid out once in host memory and refilled at each checkpoint. Its header, which names the learning rate and
much else that changes, may grow within the room before the tensors.

Copying into existing memory is several times faster than copying into new memory. The copied bytes are already the
file, so nothing is assembled afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch

from shared.models.loaded import TORCH_DTYPES

ALIGNMENT = 8
# The names of dtypes in safetensors.
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
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
        # Bytes before the tensors, of which the header takes the last ones.
        self._capacity = 0

    def fill(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> memoryview:
        """Return the bytes of a file with these tensors.

        The bytes hold the tensors' present values. Raises `TypeError` for a dtype that the format does not know.
        """
        form = {name: (one.dtype, one.shape) for name, one in tensors.items()}
        pinned = any(one.is_cuda for one in tensors.values())
        header = encode_header(tensors, metadata)
        if form != self._form or len(header) > self._capacity:
            self._lay_out(tensors, len(header), pinned)
            self._form = form
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._touched()
                self._views[name].copy_(tensor.detach(), non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        begin = self._capacity - len(header)
        self._buffer[begin : self._capacity] = torch.frombuffer(header, dtype=torch.uint8)
        return self._buffer.numpy().data[begin:]

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], header_bytes: int, pinned: bool) -> None:
        """Lay out the tensors, behind twice the room that the header takes now."""
        self._capacity = 2 * header_bytes
        places = places_of(tensors)
        size = max((end for _, end in places.values()), default=0)
        self._buffer = torch.empty(self._capacity + size, dtype=torch.uint8, pin_memory=pinned)
        self._views = {
            name: self._buffer[self._capacity + begin : self._capacity + end]
            .view(tensors[name].dtype)
            .view(tensors[name].shape)
            for name, (begin, end) in places.items()
        }


def places_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return where each tensor begins and ends behind the header, in the order of the file."""
    places: dict[str, tuple[int, int]] = {}
    at = 0
    # Wide elements come first, so that each tensor is aligned. Sorting by name makes the order reproducible.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, which no checkpoint can hold")
        size = tensor.numel() * tensor.element_size()
        places[name] = (at, at + size)
        at += size
    return places


def encode_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytearray:
    """Return what stands before the tensors in a file of safetensors: its length, and JSON up to the alignment."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, (begin, end) in places_of(tensors).items():
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    return bytearray(len(encoded).to_bytes(8, "little") + encoded)


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
    return nested(form, safetensors.torch.load(data))


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


def nested(form: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the nested value of a JSON form, with these tensors in it, or with what stands for them."""
    if not isinstance(form, list):
        return form
    kind, inner = form
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {nested(key, tensors): nested(one, tensors) for key, one in inner}
    values = [nested(one, tensors) for one in inner]
    return tuple(values) if kind == "tuple" else values
