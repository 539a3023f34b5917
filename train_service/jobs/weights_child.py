"""Reading and fitting files of sent weights.

The files are fitted to a model and written as that model's own.

This runs in the process that `entry_child` guards: an error or an exhausted limit ends only that process. Code runs
only for a model of the caller's own, whose bundle lies in `folder`, and builds the model. Files are read as data. For
torch's files, `weights_only` accepts tensors and plain values, and refuses everything that names code.

The service takes the answer of that process: its report, and the weights that it wrote. Code of the caller's own may
have put anything in place of both. So the service follows no link, waits for no pipe, takes no field that the child
does not write, and compares the tensors of the weights with those of the report. What the code says of its own weights,
it can still make up.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch

from shared.checkpoint.format import WEIGHTS
from shared.code_bundle_registry import adopt_code
from shared.errors import MillraceError, first_line
from shared.model_spec import ModelSpec
from shared.models import build_model
from train_service.checkpoints.tensor_files import ALIGNMENT, DTYPES

# --- The child ---

SAFETENSORS, TORCH, HUGGING_FACE = "SAFETENSORS", "TORCH", "HUGGING_FACE"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
# Usual keys of a state dict in a file that holds other values, too.
USUAL_KEYS = ("state_dict", "model_state_dict", "model")
# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
# The most entries of each list of the report, and the longest name.
MAX_LISTED = 1_000
MAX_NAME = 500
# The most names in a refusal.
MAX_SHOWN = 8
WIDENED = (torch.float16, torch.bfloat16)


class Unreadable(Exception):
    """The files cannot be read. The text says why, and the remedy."""


@dataclass(frozen=True)
class Source:
    """A tensor in a file, read when needed. `shape` and `dtype` are known before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass
class Report:
    """The content of `millrace.train.v1.ImportReport`, with the same names."""

    format: str = ""
    key: str = ""
    fitted: list[dict[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    missing_allowed: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    misfits: list[dict[str, str]] = field(default_factory=list)
    non_finite: list[dict[str, Any]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        lists = {name: value for name, value in asdict(self).items() if isinstance(value, list)}
        counts = {f"{name}_count": len(value) for name, value in lists.items()}
        first = {name: [_bounded(one) for one in value[:MAX_LISTED]] for name, value in lists.items()}
        return {"format": self.format, "key": self.key, **first, **counts}


def read_weights(asked: Mapping[str, Any]) -> str:
    """Fit the files in `files` to `model`.

    `files` is a folder. Return what is wrong with the files, or an empty string. If the files can be read, writes
    `report`. If no tensor is missing without permission, unexpected, or of another shape, also writes `output`, a
    safetensors file of all the model's tensors.
    """
    torch.set_num_threads(1)
    try:
        if folder := asked.get("folder"):
            adopt_code(asked["model"]["code_bundle"], Path(folder))
        return _read(asked)
    except Unreadable as error:
        return str(error)
    except MillraceError as error:
        return error.message
    except RecursionError:
        return "the files nest too deeply to be read"
    except MemoryError:
        return "the files take more memory to be read than they may"


def _read(asked: Mapping[str, Any]) -> str:
    report = Report()
    names = asked["names"]
    found = _sources(Path(asked["files"]), names["key"], report)
    renamed = _renamed(found, names, report)
    model, tied = _model(asked["model"], on="meta")
    taken = _fit(model, renamed, report)
    missing = [name for name in model if name not in taken]
    for name in [one for one in missing if any(twin in taken for twin in tied.get(one, ()))]:
        taken[name] = taken[next(twin for twin in tied[name] if twin in taken)]
        missing.remove(name)
    allowed = _patterns("names.allow_missing", names["allow_missing"])
    report.missing = missing
    report.missing_allowed = [name for name in missing if any(one.fullmatch(name) for one in allowed)]
    _find_non_finite(taken, found, report)
    Path(asked["report"]).write_text(json.dumps(report.as_json()))
    fits = not (len(report.missing) > len(report.missing_allowed) or report.unexpected or report.misfits)
    if fits and report.fitted and (asked["allow_non_finite"] or not report.non_finite):
        fresh = _model(asked["model"], on="cpu")[0] if missing else {}
        _write(Path(asked["output"]), model, {name: found[source] for name, source in taken.items()}, fresh)
    return ""


def _model(config: Mapping[str, Any], *, on: str) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Return the model's tensors by name. The second value lists, for each name, the other names of the same tensor."""
    torch.manual_seed(0)
    with torch.device(on):
        state = build_model(ModelSpec.from_config(config), "spec.model").state_dict(keep_vars=True)
    same: dict[int, list[str]] = {}
    for name, one in state.items():
        same.setdefault(id(one), []).append(name)
    tied = {name: [other for other in group if other != name] for group in same.values() for name in group}
    return {name: one.detach() for name, one in state.items()}, tied


def _fit(
    model: Mapping[str, torch.Tensor], renamed: Mapping[str, tuple[str, Source]], report: Report
) -> dict[str, str]:
    """Return the file's names of the fitting tensors. The keys are their names in the model."""
    taken = {}
    for target, (name, source) in renamed.items():
        wanted = model.get(target)
        if wanted is None:
            report.unexpected.append(name)
        elif source.shape != tuple(wanted.shape) or not _holds(wanted.dtype, source.dtype):
            shapes = {
                "in_file": _describe(source.dtype, source.shape),
                "in_model": _describe(wanted.dtype, wanted.shape),
            }
            report.misfits.append({"source": name, "target": target, **shapes})
        else:
            widened = "" if source.dtype == wanted.dtype else _plain(source.dtype)
            report.fitted.append({"source": name, "target": target, "widened_from": widened})
            taken[target] = name
    return taken


def _holds(wanted: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether one type holds another exactly. `wanted` must represent every number of `dtype`."""
    return dtype == wanted or (wanted == torch.float32 and dtype in WIDENED)


def _find_non_finite(taken: Mapping[str, str], found: Mapping[str, Source], report: Report) -> None:
    for name in dict.fromkeys(taken.values()):
        if found[name].dtype.is_floating_point:
            tensor = found[name].read()
            count = tensor.numel() - int(torch.isfinite(tensor).sum())
            if count:
                report.non_finite.append({"source": name, "count": count})


def _renamed(found: Mapping[str, Source], names: Mapping[str, Any], report: Report) -> dict[str, tuple[str, Source]]:
    """Return the file's tensors by the model's names. Each comes with its name in the file."""
    drop = _patterns("names.drop", names["drop"])
    renames = [_rename(place, one) for place, one in enumerate(names["renames"])]
    renamed: dict[str, tuple[str, Source]] = {}
    for name, source in found.items():
        if any(one.fullmatch(name) for one in drop):
            report.dropped.append(name)
            continue
        target = name
        for rename in renames:
            target = rename(target)
        if target in renamed:
            first = renamed[target][0]
            raise Unreadable(f"names.renames make {target!r} of both {first!r} and {name!r}; drop one of them")
        renamed[target] = (name, source)
    return renamed


def _rename(place: int, one: Mapping[str, str]) -> Callable[[str], str]:
    path, replacement = f"names.renames[{place}]", one["replacement"]
    if prefix := one["prefix"]:
        return lambda name: replacement + name[len(prefix) :] if name.startswith(prefix) else name
    (pattern,) = _patterns(f"{path}.pattern", [one["pattern"]])

    def rename(name: str) -> str:
        try:
            return pattern.sub(replacement, name)
        except (re.error, IndexError) as error:
            raise Unreadable(f"{path}.replacement: {replacement!r} does not fit the pattern: {error}") from None

    return rename


def _patterns(path: str, texts: list[str]) -> list[re.Pattern[str]]:
    patterns = []
    for text in texts:
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            raise Unreadable(f"{path}: {text!r} is no regular expression: {error}") from None
    return patterns


def _sources(folder: Path, key: str, report: Report) -> dict[str, Source]:
    paths = {one.relative_to(folder).as_posix(): one for one in sorted(folder.rglob("*")) if one.is_file()}
    weights = {name: path for name, path in paths.items() if path.suffix in (".safetensors", *TORCH_SUFFIXES)}
    index = next((paths[one] for one in INDEXES if one in paths), None)
    if len(paths) == 1 and weights:
        ((name, path),) = weights.items()
        report.format = SAFETENSORS if path.suffix == ".safetensors" else TORCH
        return _of_file(name, path, key, report)
    report.format = HUGGING_FACE
    if index is not None:
        return _of_shards(index, weights, key, report)
    for one in WHOLE:
        if one in weights:
            return _of_file(one, weights[one], key, report)
    wanted = f"a .safetensors file, a torch file ({', '.join(TORCH_SUFFIXES)}), or a folder with {' or '.join(WHOLE)}"
    raise Unreadable(f"there are no weights among {', '.join(list(paths)[:MAX_SHOWN])}; send {wanted}")


def _of_file(name: str, path: Path, key: str, report: Report) -> dict[str, Source]:
    if path.suffix == ".safetensors":
        if key:
            raise Unreadable(f"names.key: {key!r}: {name} is a safetensors file, which holds tensors alone")
        return _of_safetensors(name, path)
    return _of_torch(name, path, key, report)


def _of_shards(index: Path, weights: Mapping[str, Path], key: str, report: Report) -> dict[str, Source]:
    try:
        shard_of = json.loads(index.read_bytes())["weight_map"]
        wanted = {str(name): str(shard) for name, shard in shard_of.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreadable(f"{index.name} has no weight_map of names and files") from None
    found: dict[str, Source] = {}
    for shard in dict.fromkeys(wanted.values()):
        if shard not in weights:
            raise Unreadable(f"{index.name} names {short(shard)}, which was not sent")
        for name, source in _of_file(shard, weights[shard], key, report).items():
            if name in found:
                raise Unreadable(f"{short(name)} is in two of the files; it is not clear which one counts")
            found[name] = source
    lost = [name for name in wanted if name not in found]
    if lost:
        raise Unreadable(f"{index.name} names {short(lost[0])} and says that it is in {wanted[lost[0]]}: it is not")
    return found


def _of_safetensors(name: str, path: Path) -> dict[str, Source]:
    read_header(name, path)
    try:
        handle: Any = safetensors.safe_open(str(path), framework="pt")
        found = {}
        for key in handle.keys():  # noqa: SIM118 - it is no dict
            part = handle.get_slice(key)
            dtype = _dtype_of(name, key, part.get_dtype())
            found[key] = Source(tuple(part.get_shape()), dtype, partial(handle.get_tensor, key))
        return found
    except safetensors.SafetensorError as error:
        raise Unreadable(f"{name} is damaged: {first_line(error)}; write it again") from None


def read_header(name: str, path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file. Raises `Unreadable`.

    It finds faults that the library reports less plainly or accepts, such as repeated names.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            most = min(MAX_HEADER_BYTES, max(size - LENGTH_BYTES, 0))
            raise Unreadable(
                f"{name} is no safetensors file, or is cut off: its header would have {length:,} bytes, and may have "
                f"{most:,}"
            )
        encoded = file.read(length)
    try:
        header: dict[str, Any] = json.loads(encoded, object_pairs_hook=_unique(name))
        ends = [int(one["data_offsets"][1]) for key, one in header.items() if key != "__metadata__"]
    except Unreadable:
        raise
    except (ValueError, OverflowError, KeyError, TypeError, IndexError, AttributeError):
        raise Unreadable(f"{name} has a header that is none of safetensors; write the file again") from None
    end = LENGTH_BYTES + length + max(ends, default=0)
    if end > size:
        raise Unreadable(f"{name} is cut off: it has {size:,} of {end:,} bytes; send the whole file")
    return header


def _unique(name: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        whole = dict(pairs)
        if len(whole) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise Unreadable(f"{name} names {short(twice)} twice; it is not clear which one counts")
        return whole

    return hook


def _of_torch(name: str, path: Path, key: str, report: Report) -> dict[str, Source]:
    try:
        # Files of torch before 1.6 are not zip archives and cannot be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # torch has an exception of its own for each kind of damage
        text = str(error)
        if "weights_only" in text.lower() or "Unsupported global" in text or "WeightsUnpickler" in text:
            raise Unreadable(
                f"{name} holds more than tensors and plain values ({_code_named(text)}), and none of its code is run; "
                "save the state dict alone: torch.save(model.state_dict(), …)"
            ) from None
        raise Unreadable(f"{name} is no file of torch.save, or is damaged: {first_line(error)[:MAX_NAME]}") from None
    state, report.key = _state_dict(name, loaded, key)
    found = {}
    for one, value in state.items():
        if not isinstance(one, str) or not isinstance(value, torch.Tensor):
            report.others.append(short(str(one)))
        elif value.layout != torch.strided or value.is_quantized or value.is_meta or value.dtype not in DTYPES:
            raise Unreadable(f"{name}: {short(one)} is {value.dtype}, {value.layout}: send plain dense tensors")
        else:
            found[one] = Source(tuple(value.shape), value.dtype, value.detach)
    return found


def _code_named(text: str) -> str:
    match = re.search(r"GLOBAL ([\w.]+)", text)
    return f"it names {match[1]}" if match else "a pickle of objects"


def _state_dict(name: str, loaded: Any, key: str) -> tuple[Mapping[Any, Any], str]:
    if key:
        for part in key.split("."):
            if not isinstance(loaded, Mapping) or part not in loaded:
                there = ", ".join(map(str, list(loaded)[:MAX_SHOWN])) if isinstance(loaded, Mapping) else "no names"
                raise Unreadable(f"names.key: {key!r}: {name} has no {part!r} there; it has {short(there)}")
            loaded = loaded[part]
    if not isinstance(loaded, Mapping):
        kind = type(loaded).__name__
        raise Unreadable(f"{name} holds a {kind} instead of a state dict; name the place of one in names.key")
    if key or any(isinstance(one, torch.Tensor) for one in loaded.values()):
        return loaded, key
    usual = [one for one in USUAL_KEYS if isinstance(loaded.get(one), Mapping)]
    if len(usual) == 1:
        return loaded[usual[0]], usual[0]
    there = short(", ".join(map(str, list(loaded)[:MAX_SHOWN])))
    raise Unreadable(f"{name} holds no tensors at its top, but {there}; name the state dict among them in names.key")


def _write(
    path: Path,
    model: Mapping[str, torch.Tensor],
    sources: Mapping[str, Source],
    fresh: Mapping[str, torch.Tensor],
) -> None:
    """Write a safetensors file of the model's tensors.

    The tensors are written one after the other, and only one is in memory at a time.
    """
    # Wide elements come first, so that each tensor is aligned. Sorting by name makes the order reproducible.
    ordered = sorted(model, key=lambda name: (-model[name].element_size(), name))
    header: dict[str, Any] = {}
    at = 0
    for name in ordered:
        one = model[name]
        if one.dtype not in DTYPES:
            raise Unreadable(f"the model's {name} is {one.dtype}, which no checkpoint can hold")
        size = math.prod(one.shape) * one.element_size()
        header[name] = {"dtype": DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        for name in ordered:
            tensor = sources[name].read() if name in sources else fresh[name]
            for piece in _bytes_of(tensor.to(model[name].dtype)):
                file.write(piece)


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _dtype_of(name: str, key: str, code: str) -> torch.dtype:
    for dtype, known in DTYPES.items():
        if known == code:
            return dtype
    raise Unreadable(f"{name}: {short(key)} is {code}, of which there are no models; convert it")


def _describe(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> str:
    return f"{_plain(dtype)} {tuple(shape)}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bounded(one: Any) -> Any:
    if isinstance(one, str):
        return short(one)
    return {key: short(value) if isinstance(value, str) else value for key, value in one.items()}


def short(text: str) -> str:
    """Return a name as reports and errors have it: shortened, and without halves of surrogate pairs."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "…"


# --- The answer of the child ---

REPORT = "report.json"
MAX_REPORT_BYTES = 16 * 1024**2
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def take_report(work: Path) -> dict[str, Any]:
    """Return the report in the child's folder. Raises `ValueError` for one that the child does not write."""
    with open_plain(work / REPORT) as file:
        return _parse_report(file.read(MAX_REPORT_BYTES))


def take_weights(work: Path, report: Mapping[str, Any], weights: Path) -> None:
    """Move the child's weights to `weights`. Raises `ValueError` unless they have the tensors that the report names."""
    with open_plain(work / WEIGHTS):
        try:
            names = set(read_header(WEIGHTS, work / WEIGHTS)) - {"__metadata__"}
        except Unreadable as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError(f"{WEIGHTS} has a header that nests too deeply") from None
    # The report names the first tensors alone, and shortens long names. Tied tensors are in the weights by all their
    # names, and in the report by one.
    reported = {*(one["target"] for one in report["fitted"]), *report["missing"]}
    absent = reported - {short(name) for name in names}
    if absent or len(names) < report["fitted_count"] + report["missing_count"]:
        raise ValueError(f"{WEIGHTS} has {len(names):,} tensors, which are not those of the report")
    (work / WEIGHTS).rename(weights)


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file that a caller's code may have made. Never follows a link and never waits for a pipe.

    Raises `ValueError` unless it is a plain file with this one name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise ValueError(f"{path.name} is no plain file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _parse_report(encoded: bytes) -> dict[str, Any]:
    try:
        report = json.loads(encoded)
    except RecursionError:
        raise ValueError("the report nests too deeply") from None
    lists = [item.name for item in fields(Report) if item.name not in ("format", "key")]
    if not isinstance(report, dict) or report.keys() != {"format", "key", *lists, *(f"{name}_count" for name in lists)}:
        raise ValueError("the report has other fields than a report")
    if not _is_text(report["format"]) or not _is_text(report["key"]):
        raise ValueError("the report's format or key is no text")
    for name in lists:
        count, entries = report[f"{name}_count"], report[name]
        if not _is_count(count, MAX_INT32) or not isinstance(entries, list) or len(entries) != min(count, MAX_LISTED):
            raise ValueError(f"the report's list {name} is not as long as its count")
        if not all(_is_entry(entry, ENTRIES.get(name)) for entry in entries):
            raise ValueError(f"the report's list {name} has other entries")
    return report


def _is_text(value: Any) -> bool:
    # A message cannot have a half of a surrogate pair.
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _is_count(value: Any, most: int = MAX_INT64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_entry(entry: Any, kinds: Mapping[str, Callable[[Any], bool]] | None) -> bool:
    if kinds is None:
        return _is_text(entry)
    return isinstance(entry, dict) and entry.keys() == kinds.keys() and all(kinds[key](entry[key]) for key in kinds)


# Entries of the report's lists, as in `ImportReport`. Those of the other lists are names.
ENTRIES: dict[str, Mapping[str, Callable[[Any], bool]]] = {
    "fitted": {"source": _is_text, "target": _is_text, "widened_from": _is_text},
    "misfits": {"source": _is_text, "target": _is_text, "in_file": _is_text, "in_model": _is_text},
    "non_finite": {"source": _is_text, "count": _is_count},
}
