"""Tensors as safetensors files: the whole ones of rank 0, and the rows that each rank of a sharded model writes and
reads.

A file of whole tensors is laid out once in host memory and refilled at each checkpoint. Its header, which names the
learning rate and much else that changes, may grow within the room before the tensors. Copying into existing memory is
several times faster than copying into new memory. The copied bytes are already the file, so nothing is assembled
afterwards.

Of a sharded model, a snapshot in memory would be as large as three quarters of what a rank holds. So the rank's rows of
weights and optimizer state are written to an unnamed file in the folder for temporary files, and go to the store from
there while training goes on. A process that is killed leaves no such file. Rank 0 learns of the written files from the
store.

    {folder}/model-00001-of-00004.safetensors        see `shared.checkpoint.reading`
    {folder}/optimizer-00001-of-00004.safetensors
    {folder}/written/00001.json                      paths and digests of both; rank 0 removes it at the end

When it goes on, the bytes go from the store right into the shards, a few ranges at a time, so nothing is whole on any
rank. The checkpoint may have whole tensors or shards of any number of ranks.
"""

from __future__ import annotations

import errno
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor, nn

from shared.checkpoint import Checkpoint, CheckpointContent, CheckpointEntry, load_checkpoint
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.checkpoint.reading import (
    SHARDS,
    Readable,
    StoredTensor,
    Wanted,
    digests_of,
    read_index,
    read_rows,
    shard_path,
)
from shared.checkpoint.reading import encode_header as encode_shard_header
from shared.errors import Internal, ResourceExhausted
from shared.models.loaded import TORCH_DTYPES, memory_of
from shared.storage import ObjectMissing, ObjectStore
from train_service.learning.sharding import local_rows

# --- Whole tensors ---

ALIGNMENT = 8
# The names of dtypes in safetensors.
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# The metadata key in the header that holds the form of a nested state.
NEST = "nest"


class TensorFile:
    """One file, filled by one thread at a time. The result of `fill` is valid until the next `fill`."""

    def __init__(self, note_progress: Callable[[], None] = lambda: None) -> None:
        """Create the file. `note_progress` is called for each tensor, because copying a large model takes long."""
        self._note_progress = note_progress
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
                self._note_progress()
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


# --- Files of a rank ---

# Bytes that are copied from a device at a time.
COPIED_BYTES = 32 * 2**20
# The errors of a full disk, and the delay before it is tried again.
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_RETRY_S = 30.0
# How often rank 0 looks for the other ranks' shards, and for how long once the run has ended.
POLL_INTERVAL_S = 0.2
WAIT_AT_THE_END_S = 20.0


@dataclass(frozen=True)
class SpooledFile:
    """A shard on this node's disk. `path` is its path in the checkpoint."""

    path: str
    file: BinaryIO


def spool_shards(
    weights: Mapping[str, Tensor],
    state: Any,
    rank: int,
    ranks: int,
    note_progress: Callable[[], None] = lambda: None,
) -> list[SpooledFile]:
    """Copy this rank's rows to disk. `state` is nested, and like `weights` has the sharded tensors themselves.

    Raises `ResourceExhausted` if the disk is full, and then leaves no file.
    """
    tensors, form = take_apart(state)
    first = _spool(shard_path(WEIGHTS, rank, ranks), weights, {}, rank, note_progress)
    try:
        return [first, _spool(shard_path(OPTIMIZER, rank, ranks), tensors, {NEST: form}, rank, note_progress)]
    except BaseException:
        first.file.close()
        raise


def _spool(
    path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], rank: int, note_progress: Callable[[], None]
) -> SpooledFile:
    own: dict[str, Tensor] = {}
    shards: dict[str, tuple[int, list[int]]] = {}
    for name, tensor in tensors.items():
        rows, part = local_rows(tensor)
        is_shard = rows != slice(None)
        if rank and (not is_shard or not len(part)):
            continue
        own[name] = part
        if is_shard:
            shards[name] = (rows.start, list(tensor.shape))
    places = places_of(own)
    header: dict[str, Any] = {"__metadata__": {**metadata, SHARDS: json.dumps(shards, separators=(",", ":"))}}
    for name, (begin, end) in places.items():
        one = own[name]
        header[name] = {"dtype": DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [begin, end]}
    encoded = memoryview(encode_shard_header(header))
    size_bytes = len(encoded) + sum(end - begin for begin, end in places.values())
    with _full_disk_named(path, rank, size_bytes):
        file = tempfile.TemporaryFile(prefix="millrace-shard-", buffering=0)  # noqa: SIM115 - open until it is uploaded
        try:
            _write_all(file, encoded)
            for name in places:
                note_progress()
                _write_tensor(file, own[name])
        except BaseException:
            file.close()
            raise
    return SpooledFile(path, file)


@contextmanager
def _full_disk_named(path: str, rank: int, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ResourceExhausted(
            f"rank {rank} needs {size_bytes:,} bytes in {tempfile.gettempdir()} for {path}, and the disk is full; free "
            "space on its node, give the node more disk, or set TMPDIR to a larger disk",
            reason="SCRATCH_FULL",
            metadata={"ranks": str(rank)},
            retry_after_s=FULL_RETRY_S,
        ) from error


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().contiguous().reshape(-1)
    each = max(1, COPIED_BYTES // tensor.element_size())
    for begin in range(0, len(flat), each):
        part = flat[begin : begin + each].cpu().view(torch.uint8)
        _write_all(file, part.numpy().data)


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def upload_shards(store: ObjectStore, folder: str, spooled: Sequence[SpooledFile]) -> list[dict[str, Any]]:
    """Upload a rank's shards. Return what the manifest says about them. May be repeated."""
    named = []
    for one in spooled:
        # The file has no name of its own.
        store.upload_file(Path(f"/proc/self/fd/{one.file.fileno()}"), f"{folder}/{one.path}")
        named.append({"path": one.path, **digests_of(one.file)})
    return named


def tell_written(store: ObjectStore, folder: str, rank: int, named: Sequence[Mapping[str, Any]]) -> None:
    """Report to rank 0 that this rank's shards are durable."""
    store.put(_note(folder, rank), json.dumps({"files": named}).encode())


def await_written(store: ObjectStore, folder: str, ranks: int, ending: threading.Event) -> list[dict[str, Any]]:
    """Wait until every other rank has written its shards. Return what the manifest says about them.

    `ending` is set when the run ends: then ranks may be gone. Raises `Internal` for a rank that does not come.
    """
    named: list[dict[str, Any]] = []
    give_up_at = None
    for rank in range(1, ranks):
        while True:
            try:
                named += json.loads(store.get(_note(folder, rank)))["files"]
                break
            except ObjectMissing:
                pass
            if ending.is_set():
                give_up_at = give_up_at or time.monotonic() + WAIT_AT_THE_END_S
                if time.monotonic() > give_up_at:
                    raise Internal(f"rank {rank} has not written its shards of {folder}", reason="SHARD_MISSING")
            time.sleep(POLL_INTERVAL_S)
    return named


def forget_written(store: ObjectStore, folder: str, ranks: int) -> None:
    for rank in range(1, ranks):
        store.delete(_note(folder, rank))


def _note(folder: str, rank: int) -> str:
    return f"{folder}/written/{rank:05d}.json"


# --- Restoring a sharded model ---

logger = logging.getLogger(__name__)

# Rows for a device, or for memory that is not in the order of the file, are read into as much host memory at a time.
STAGED_BYTES = 64 * 2**20


class NotByRows(Exception):
    """The checkpoint cannot be read shard by shard, only whole."""


def restore_shards(
    store: ObjectStore,
    entry: CheckpointEntry,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    note_progress: Callable[[], None] = lambda: None,
) -> tuple[CheckpointContent, dict[str, Any]]:
    """Load this rank's rows of the checkpoint into the sharded model and its optimizer.

    Return the content and the rest of the state. No rank needs another one for it. Raises `NotByRows` before anything
    is loaded if the state does not lie by rows, and `DataLoss`.
    """
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    state_tensors, metadata = read_index(store, checkpoint.stored(OPTIMIZER))
    state = nested(json.loads(metadata[NEST]), state_tensors)
    plan = _optimizer_plan(model, optimizer, state["optimizer"])
    wanted = [*_weights_plan(store, checkpoint, model), *plan.wanted]
    read_into(store, wanted, note_progress)
    plan.put(optimizer)
    rest = {name: _read_all(store, value) for name, value in state.items() if name != "optimizer"}
    return checkpoint.content, rest


def _weights_plan(store: Readable, checkpoint: Checkpoint, model: nn.Module) -> Iterator[tuple[StoredTensor, Tensor]]:
    tensors, _ = read_index(store, checkpoint.stored(WEIGHTS))
    own = model.state_dict()
    if tensors.keys() != own.keys():
        raise NotByRows(f"the weights are not those of the model: {', '.join(sorted(tensors.keys() ^ own.keys()))}")
    for name, tensor in own.items():
        _check_same(name, tensors[name], tensor)
        yield tensors[name], tensor


class _OptimizerPlan:
    """The state to read, and where it goes."""

    def __init__(self) -> None:
        self.wanted: list[tuple[StoredTensor, Tensor]] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.update(self.state)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(values)


def _optimizer_plan(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> _OptimizerPlan:
    from torch.distributed.tensor import DTensor

    plan = _OptimizerPlan()
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    counted_on_device: set[str] = set()
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if sorted(names[id(param)] for param in group["params"]) != sorted(map(str, values["params"])):
            raise NotByRows("the optimizer's groups have other parameters")
        plan.groups.append({key: value for key, value in values.items() if key != "params"})
        if any(isinstance(value, StoredTensor) for value in plan.groups[-1].values()):
            raise NotByRows("a group of the optimizer has tensors of its own")
        if values.get("fused") or values.get("capturable"):
            counted_on_device.update(map(str, values["params"]))
    for name, values in saved["state"].items():
        parameter = parameters[name]
        state = plan.state[parameter] = {}
        for key, value in values.items():
            if not isinstance(value, StoredTensor):
                state[key] = value
                continue
            kind = TORCH_DTYPES[value.dtype]
            if isinstance(parameter, DTensor) and value.shape == tuple(parameter.shape):
                local = torch.empty_like(local_rows(parameter)[1], dtype=kind)
                state[key] = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                    run_check=False,
                )
            elif not value.shape:
                # As `Optimizer.load_state_dict`: the count of steps stays in host memory, unless a kernel reads it.
                is_in_host_memory = key == "step" and name not in counted_on_device
                state[key] = torch.empty((), dtype=kind, device="cpu" if is_in_host_memory else parameter.device)
            else:
                raise NotByRows(f"{key} of {name} has the shape {value.shape}")
            plan.wanted.append((value, state[key]))
    return plan


def read_into(
    store: Readable, wanted: Sequence[tuple[StoredTensor, Tensor]], note_progress: Callable[[], None] = lambda: None
) -> None:
    """Fill this rank's rows of each tensor."""
    direct: list[Wanted] = []
    staged: list[tuple[Wanted, Tensor, Tensor]] = []
    for stored, tensor in wanted:
        rows, own = local_rows(tensor)
        first = rows.start or 0
        if own.device.type == "cpu" and own.is_contiguous():
            direct.append(Wanted(stored, first, memory_of(own)))
        else:
            staged.append((Wanted(stored, first, memoryview(b"")), own, tensor))
    read_rows(store, direct, note_progress)
    while staged:
        batch: list[tuple[Wanted, Tensor, Tensor]] = []
        size = 0
        while staged and (not batch or size + staged[0][1].nbytes <= STAGED_BYTES):
            batch.append(staged.pop(0))
            size += batch[-1][1].nbytes
        # Without digests of blocks each call reads whole files.
        if not all(piece.file.blocks for one, _, _ in batch for piece in one.tensor.pieces):
            batch, staged = [*batch, *staged], []
        copies = [torch.empty(own.shape, dtype=own.dtype) for _, own, _ in batch]
        parts = zip(batch, copies, strict=True)
        read_rows(store, [Wanted(one.tensor, one.first, memory_of(copy)) for (one, _, _), copy in parts], note_progress)
        for (_, own, _), copy in zip(batch, copies, strict=True):
            with torch.no_grad():
                own.copy_(copy)


def _read_all(store: Readable, value: Any) -> Any:
    """Return a nested value with its tensors read. The schedule and the scaler have small ones."""
    if isinstance(value, StoredTensor):
        tensor = torch.empty(value.shape, dtype=TORCH_DTYPES[value.dtype])
        read_rows(store, [Wanted(value, 0, memory_of(tensor))])
        return tensor
    if isinstance(value, dict):
        return {key: _read_all(store, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_read_all(store, one) for one in value)
    return value


def _check_same(name: str, stored: StoredTensor, tensor: Tensor) -> None:
    if stored.shape != tuple(tensor.shape) or TORCH_DTYPES[stored.dtype] != tensor.dtype:
        raise NotByRows(f"{name} is {stored.dtype} {stored.shape} and not {tensor.dtype} {tuple(tensor.shape)}")
