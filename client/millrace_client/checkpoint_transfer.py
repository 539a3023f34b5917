"""Downloads of a checkpoint's files, joins of their shards, and imports of external weights.

Each downloaded file is compared with its digest, and the folder appears once all files are complete. Until then the
files lie beside it, in `.{name}.millrace-partial`: `files/` holds the verified files, `part-{sha256}` is the file in
transit. A download that was cut off, or whose process died, continues from there.

A job with `placement.parallel` FSDP saves a file for each rank. Each has the rows of that rank, and in its header the
metadata `shards`: for each tensor of which it has only some rows the first of them, and the shape of the whole.
`join_shards` makes one file of safetensors out of them, without holding a tensor in memory.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from millrace.train.v1 import checkpoint_import_pb2, resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.calls import DEFAULT_TIMEOUT_S, Caller, RetryBudget, new_request_id
from millrace_client.errors import DataLoss, MillraceError

# --- Downloads ---

# Arguments: bytes present so far, bytes of all files.
OnProgress = Callable[[int, int], None]
READ_BYTES = 1 << 20


def download(
    caller: Caller,
    stub: Any,
    name: str,
    directory: str | os.PathLike[str],
    on_progress: OnProgress | None = None,
) -> resources_pb2.Checkpoint:
    """See `TrainClient.download_checkpoint`."""
    target = Path(os.path.abspath(directory))  # noqa: PTH100 - a link is not followed: its name is what is replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(target.parent / f".{target.name}.millrace-partial") as partial:
        return _Download(caller, stub, name, target, partial, on_progress or (lambda _done, _all: None)).run()


@dataclass(frozen=True)
class _File:
    path: str
    size_bytes: int
    sha256: str


class _Download:
    """The download of one checkpoint into `target`, by way of `partial`, which only this process uses."""

    def __init__(
        self, caller: Caller, stub: Any, name: str, target: Path, partial: Path, on_progress: OnProgress
    ) -> None:
        self._caller = caller
        self._stub = stub
        self._request = pb.GetCheckpointRequest(name=name)
        self._target = target
        self._partial = partial
        self._files = partial / "files"
        self._on_progress = on_progress
        self._checkpoint: resources_pb2.Checkpoint | None = None
        self._size_bytes = 0
        # Files that are complete and verified, by path.
        self._done: dict[str, _File] = {}
        # All files that the manifest names, and the manifest itself; empty until the manifest has arrived.
        self._listed: dict[str, _File] = {}

    def run(self) -> resources_pb2.Checkpoint:
        # The service may not be running at all. Once it has answered, it gets longer to come back.
        allowed_s = self._caller.reconnect_for_s
        retry_budget = RetryBudget(DEFAULT_TIMEOUT_S if allowed_s is None else allowed_s)
        while True:
            try:
                is_over = self._call(retry_budget)
            except MillraceError as error:
                retry_budget.pause_after(error)
                continue
            if is_over:
                assert self._checkpoint is not None
                return self._checkpoint

    def _call(self, retry_budget: RetryBudget) -> bool:
        """Make one call, starting at the first missing file.

        Return False if another call has to continue.
        """
        if self._listed and self._listed.keys() == self._done.keys():
            return self._is_there_already() or self._put_in_place()
        responses = self._caller.stream(self._stub.GetCheckpoint, self._request)
        try:
            first = next(responses, None)
            if first is None or not first.HasField("header"):
                raise DataLoss("the service did not begin with a header: is it one that knows GetCheckpoint?")
            if self._checkpoint is None:
                retry_budget.allow()
                self._begin(first.header)
                if self._request.path:  # this process already has a part of it
                    return False
            file: _File | None = None
            with self._writing() as writing:
                for response in responses:
                    retry_budget.progressed()
                    if response.WhichOneof("content") == "file":
                        self._finish(file, writing)
                        file = _file_of(response.file)
                        if self._is_there_already():
                            return True
                        writing.begin(file, response.file.offset)
                    else:
                        writing.write(response.chunk)
                        self._on_progress(self._done_bytes() + writing.size_bytes, self._size_bytes)
                self._finish(file, writing)
        finally:
            responses.close()
        if missing := self._listed.keys() - self._done.keys():
            raise DataLoss(f"the service did not send {min(missing)}, which the manifest names")
        return self._is_there_already() or self._put_in_place()

    def _begin(self, header: pb.GetCheckpointResponse.Header) -> None:
        """Pin the download to this checkpoint, even if its name later means another one."""
        checkpoint = self._checkpoint = header.checkpoint
        self._size_bytes = header.size_bytes
        self._request = pb.GetCheckpointRequest(name=checkpoint.name, manifest_sha256=checkpoint.manifest_sha256)
        if self._target.exists() and not self._target.is_dir():
            raise _in_the_way(self._target, "is no folder; name another place")
        marker = self._partial / "manifest_sha256"
        if not marker.exists() or marker.read_text() != checkpoint.manifest_sha256:
            _empty(self._partial)  # the partial files belong to another checkpoint
            marker.write_text(checkpoint.manifest_sha256)
        self._files.mkdir(exist_ok=True)
        self._take_up()

    def _take_up(self) -> None:
        """Verify the files that an earlier process left, and request only the rest."""
        manifest = next((one for one in MANIFESTS if _digest(self._files / one) == self._sha256), None)
        if manifest is None or not self._sha256:
            return
        self._read_manifest(manifest)
        for file in self._listed.values():
            if _digest(self._files / file.path) == file.sha256:
                self._done[file.path] = file
        self._ask_on()

    def _ask_on(self) -> None:
        wanted = next((one for one in self._listed.values() if one.path not in self._done), None)
        if wanted is not None:
            part = self._part(wanted)
            size_bytes = part.stat().st_size if part.exists() else 0
            self._request.path, self._request.offset = wanted.path, min(size_bytes, wanted.size_bytes)

    @property
    def _sha256(self) -> str:
        assert self._checkpoint is not None
        return self._checkpoint.manifest_sha256

    def _read_manifest(self, path: str) -> None:
        data = (self._files / path).read_bytes()
        itself = _File(path, len(data), self._sha256)
        named = [_File(file["path"], file["size_bytes"], file["sha256"]) for file in json.loads(data)["files"]]
        self._listed = {one.path: one for one in (itself, *named)}
        for one in self._listed:
            _check_path(one)

    def _finish(self, file: _File | None, writing: _Writing) -> None:
        """Verify the file in transit, which has arrived in full, and move it to its place."""
        if file is None:
            return
        expected = self._listed.get(file.path) if self._listed else _File(file.path, file.size_bytes, self._sha256)
        digest = writing.end()
        if expected is None or digest != expected.sha256:
            self._part(file).unlink()
            raise DataLoss(
                f"{file.path} did not arrive as {self._request.name} names it: its SHA-256 is {digest}",
                metadata={"file": file.path},
                remedy="download it again; if that helps nothing, the stored file is damaged",
            )
        place = self._files / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        self._part(file).replace(place)
        self._done[file.path] = file
        if not self._listed:
            self._read_manifest(file.path)
        self._ask_on()

    def _is_there_already(self) -> bool:
        """Return whether the target holds exactly the files of this checkpoint.

        False while the manifest has not arrived. Raises `FileExistsError` if the target has other content.
        """
        if not self._listed or not self._target.exists() or not any(self._target.iterdir()):
            return False
        found = {one.relative_to(self._target).as_posix() for one in self._target.rglob("*") if not one.is_dir()}
        whole = found == self._listed.keys() and all(
            _digest(self._target / one.path) == one.sha256 for one in self._listed.values()
        )
        if not whole:
            raise _in_the_way(self._target, "has other content; name another folder, or remove it")
        return True

    def _put_in_place(self) -> bool:
        """Move the complete folder to the target. Return True, or raise."""
        for folder, _, _ in os.walk(self._files, topdown=False):
            _sync(Path(folder))
        try:
            self._files.rename(self._target)  # over an empty folder, too
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _in_the_way(self._target, "got other content meanwhile; name another folder") from None
            raise
        _sync(self._target.parent)
        return True

    def _done_bytes(self) -> int:
        return sum(one.size_bytes for one in self._done.values())

    def _part(self, file: _File) -> Path:
        return self._partial / f"part-{file.sha256}"

    @contextmanager
    def _writing(self) -> Iterator[_Writing]:
        writing = _Writing(self._part)
        try:
            yield writing
        finally:
            writing.close()


class _Writing:
    """The file in transit, and its digest so far."""

    def __init__(self, place: Callable[[_File], Path]) -> None:
        self._place = place
        self._handle: Any = None
        self._hash = hashlib.sha256()
        self._limit = 0
        self.size_bytes = 0

    def begin(self, file: _File, offset: int) -> None:
        path = self._place(file)
        self._hash = hashlib.sha256()
        if offset:
            self._hash = _hash(path, offset)
        self._handle = path.open("r+b" if offset else "wb")
        self._handle.seek(offset)
        self._handle.truncate()
        self.size_bytes, self._limit = offset, file.size_bytes

    def write(self, data: bytes) -> None:
        if self._handle is None or self.size_bytes + len(data) > self._limit:
            raise DataLoss("the service sent bytes that are of no file")
        self._handle.write(data)
        self._hash.update(data)
        self.size_bytes += len(data)

    def end(self) -> str:
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle, self.size_bytes = None, 0


# Manifest names of a model's and of a program's checkpoint.
MANIFESTS = ("manifest.json", "millrace-manifest.json")


@contextmanager
def _claimed(partial: Path) -> Iterator[Path]:
    """Lock the partial folder for this process alone.

    If the body fails, the files stay for the next try. They are removed only if the target has other content, because
    the download can then never be completed.
    """
    while True:
        partial.mkdir(exist_ok=True)
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process has just finished its download
            continue
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_the_way(partial, "is of a download that is at work; wait for its end") from None
            if not partial.exists() or not os.path.samestat(os.fstat(handle), partial.stat()):
                continue
            try:
                yield partial
            except FileExistsError:
                shutil.rmtree(partial)
                raise
            except BaseException:
                with suppress(OSError):  # keeps the downloaded files
                    partial.rmdir()
                raise
            shutil.rmtree(partial)
            return
        finally:
            os.close(handle)


def _file_of(message: pb.GetCheckpointResponse.File) -> _File:
    _check_path(message.path)
    return _File(message.path, message.size_bytes, message.sha256)


def _check_path(path: str) -> None:
    """Raise `DataLoss` for a path outside the folder, because the service may not be trustworthy."""
    pure = PurePosixPath(path)
    inside = path == "/".join(pure.parts) and ".." not in pure.parts
    if not path or not inside or "\\" in path or not path.isprintable():
        raise DataLoss(f"the checkpoint names a file {path!r}, which would lie outside of its folder")


def _digest(path: Path) -> str:
    """Return the file's SHA-256 in hex, or an empty text if it is no regular file."""
    if path.is_symlink() or not path.is_file():
        return ""
    digest: str = _hash(path, path.stat().st_size).hexdigest()
    return digest


def _hash(path: Path, size_bytes: int) -> Any:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size_bytes > 0 and (data := file.read(min(READ_BYTES, size_bytes))):
            digest.update(data)
            size_bytes -= len(data)
    return digest


def _empty(folder: Path) -> None:
    for one in folder.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _in_the_way(path: Path, what: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, what, str(path))


# --- Imports ---

CHUNK_BYTES = 1024 * 1024
# The timeout covers sending, reading by a child of the service, and writing to its store. BYTES_PER_S is the lowest
# rate to expect. On a busy machine the service waits 510 s, and a second for each 6.25 MiB, before it answers that the
# reading did not end.
BASE_S, BYTES_PER_S = 600.0, 5 * 1024**2
# Weight files of a Hugging Face folder; the first existing alternative is used. CONFIG describes them.
WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
)
CONFIG = "config.json"


def import_weights(
    caller: Caller,
    stub: Any,
    training_job_id: str,
    source: str | os.PathLike[str],
    spec: checkpoint_import_pb2.ImportSpec,
    *,
    validate_only: bool = False,
) -> checkpoint_import_pb2.ImportCheckpointResponse:
    """See `TrainClient.import_checkpoint`."""
    root, paths = _files_of(Path(source))
    files = [_described(root, path) for path in paths]
    header = checkpoint_import_pb2.ImportCheckpointRequest.Header(
        training_job_id=training_job_id,
        spec=spec,
        files=files,
        request_id=new_request_id(),
        validate_only=validate_only,
    )

    def requests() -> Iterator[checkpoint_import_pb2.ImportCheckpointRequest]:
        yield checkpoint_import_pb2.ImportCheckpointRequest(header=header)
        for path in paths:
            with path.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    yield checkpoint_import_pb2.ImportCheckpointRequest(chunk=data)

    timeout_s = BASE_S + sum(one.size_bytes for one in files) / BYTES_PER_S
    # The header has a request id, so the service recognises a repeated call.
    return caller.send(
        stub.ImportCheckpoint, requests, checkpoint_import_pb2.ImportCheckpointResponse, timeout_s=timeout_s
    )


def _files_of(source: Path) -> tuple[Path, Sequence[Path]]:
    """Return the folder that paths are relative to, and the files to send.

    Raises `FileNotFoundError` or `ValueError`.
    """
    if not source.is_dir():
        source.stat()
        return source.parent, [source]
    for patterns in WEIGHTS:
        if not (source / patterns[0]).is_file():
            continue
        found = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
        if (source / CONFIG).is_file():
            found.add(source / CONFIG)
        return source, sorted(found)
    names = ", ".join(patterns[0] for patterns in WEIGHTS)
    raise ValueError(f"{source} has none of {names}; name a file, or a folder that Hugging Face's libraries have saved")


def _described(root: Path, path: Path) -> checkpoint_import_pb2.ImportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return checkpoint_import_pb2.ImportedFile(
            path=path.relative_to(root).as_posix(), size_bytes=file.tell(), sha256=digest
        )


# --- Shards joined into one file ---

LENGTH_BYTES = 8
SHARDS = "shards"
COPIED_BYTES = 1 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def join_shards(directory: str | os.PathLike[str], target: str | os.PathLike[str], name: str = "model") -> Path:
    """Write the shards of `name` (`model` or `optimizer`) of a downloaded checkpoint as one file, and return its path.

    The file is the one that a single rank would have saved. `target` is written anew; it must not lie in `directory`
    if the checkpoint is to be recognised by a later download. Raises `FileNotFoundError` if there are no shards, and
    `DataLoss` if one is missing.
    """
    paths = sorted(Path(directory).glob(f"{name}-*-of-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{directory} has no shards of {name}: a checkpoint that is not sharded is one file")
    tensors: dict[str, _Tensor] = {}
    metadata: dict[str, str] = {}
    for number, path in enumerate(paths):
        header, start = _header(path)
        of_file: dict[str, str] = header.pop("__metadata__", {})
        shards: dict[str, Any] = json.loads(of_file.pop(SHARDS, "{}"))
        if not number:
            metadata = of_file
        for key, one in header.items():
            first, shape = shards.get(key, (0, one["shape"]))
            begin, end = one["data_offsets"]
            tensors.setdefault(key, _Tensor(one["dtype"], shape)).rows.append((first, path, start + begin, end - begin))
    partial = Path(f"{os.fspath(target)}.partial")
    with partial.open("wb") as joined:
        joined.write(_joined_header(tensors, metadata))
        for key in _order(tensors):
            _write(joined, key, tensors[key])
        joined.flush()
        os.fsync(joined.fileno())
    return partial.replace(target)


class _Tensor:
    def __init__(self, dtype: str, shape: list[int]) -> None:
        self.dtype = dtype
        self.shape = shape
        # First row, file, where its bytes begin and how many they are.
        self.rows: list[tuple[int, Path, int, int]] = []

    @property
    def size_bytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for one in self.shape:
            size *= one
        return size


def _order(tensors: dict[str, _Tensor]) -> list[str]:
    """Return the names in the order of the file. Wide elements come first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda key: (-ITEM_BYTES[tensors[key].dtype], key))


def _joined_header(tensors: dict[str, _Tensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for key in _order(tensors):
        tensor = tensors[key]
        end = at + tensor.size_bytes
        header[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def _write(joined: BinaryIO, key: str, tensor: _Tensor) -> None:
    if sum(size for _, _, _, size in tensor.rows) != tensor.size_bytes:
        raise DataLoss(f"rows of {key} are missing: a shard is not there", remedy="download the checkpoint again")
    for _, path, begin, size in sorted(tensor.rows, key=lambda rows: rows[0]):
        with path.open("rb") as shard:
            shard.seek(begin)
            left = size
            while left:
                piece = shard.read(min(left, COPIED_BYTES))
                joined.write(piece)
                left -= len(piece)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return header, LENGTH_BYTES + length
