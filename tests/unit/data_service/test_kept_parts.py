"""Records of finished parts: only those that were written for the same work, and are whole, count."""

from __future__ import annotations

import inspect
import os
import pickle
import pkgutil
from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import shared.transforms.steps
from data_service import version_attempt
from data_service.domain.checks import Check, NotNull
from data_service.transforms.passes import RESULTS
from data_service.version_attempt import (
    KeptPass,
    KeptWork,
    ResultFormat,
    Unusable,
    header_of,
    kept_results,
    no_files,
    take_over,
)
from shared.errors import Cancelled, Unavailable
from shared.storage import ObjectStore

FORMAT = ResultFormat(frozenset([f"{__name__}.Result", "data_service.domain.checks.*"]))
FOLDER, NEXT = "v/data/a00001-1", "v/data/a00002-2"


@dataclass(frozen=True)
class Numbered:
    number: int
    rows: tuple[int, int] = (0, 100)
    row_count: int = 100

    @property
    def where(self) -> str:
        return f"part {self.number}"


PARTS = [Numbered(number) for number in range(5)]


@dataclass
class Result:
    value: Any
    files: tuple[str, ...] = ()


def files_of(result: Result) -> list[str]:
    return list(result.files)


def kept_pass(**depends_on: Any) -> KeptPass:
    return KeptPass("write", {"source": "s", **depends_on}, FORMAT, files_of)


def keep(store: ObjectStore, parts: list[Numbered], folder: str = FOLDER, kept: KeptPass | None = None) -> list[int]:
    """Do the parts, each with one data file, and return the numbers of those that were worked on."""
    worked_on = []

    def work(part: Numbered) -> Result:
        worked_on.append(part.number)
        path = f"file-{part.number}"
        store.put(f"{folder}/{path}", b"data %d" % part.number)
        return Result(part.number, (path,))

    doing = KeptWork(work, kept or kept_pass(), folder, store.settings)
    assert [doing(part).value for part in parts] == [part.number for part in parts]
    return worked_on


def results(store: ObjectStore, folder: str = FOLDER, kept: KeptPass | None = None) -> dict[int, Any]:
    return {part.number: result.value for part, result in kept_results(store, folder, kept or kept_pass(), PARTS)}


def record(folder: str, number: int) -> str:
    return f"{folder}/kept/write/{number:07d}"


def test_kept_results_are_read_back_and_not_worked_on_again(store: ObjectStore) -> None:
    assert keep(store, PARTS[:3]) == [0, 1, 2]
    assert results(store) == {0: 0, 1: 1, 2: 2}
    assert keep(store, PARTS) == [3, 4], "as after the loss of a worker"


@pytest.mark.parametrize(
    "other",
    [
        {"kept": kept_pass(source="changed")},
        {"kept": replace(kept_pass(), name="fit")},
        {"folder": NEXT},
    ],
)
def test_results_of_other_work_are_not_taken(store: ObjectStore, other: dict[str, Any]) -> None:
    keep(store, PARTS)
    assert results(store, **other) == {}


def test_a_part_that_is_cut_in_another_way_is_another_part(store: ObjectStore) -> None:
    keep(store, PARTS)
    changed = [replace(PARTS[0], rows=(0, 99)), PARTS[1]]
    assert [part.number for part, _ in kept_results(store, FOLDER, kept_pass(), changed)] == [1]


@pytest.mark.parametrize("version", ["millrace", "numpy", "pyarrow"])
def test_results_of_another_release_are_not_taken(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    keep(store, PARTS)
    versions = {**version_attempt._library_versions(), version: "9.9"}
    monkeypatch.setattr(version_attempt, "_library_versions", lambda: versions)
    assert results(store) == {}


@pytest.mark.parametrize("place", ["header", "digest", "result", "end"])
def test_an_altered_record_is_as_good_as_missing(store: ObjectStore, place: str) -> None:
    keep(store, PARTS)
    data = bytearray(store.get(record(FOLDER, 2)))
    if place == "end":
        del data[-1:]
    else:
        at = {"header": 0, "digest": data.index(b"depends_on") + 20, "result": len(data) - 2}[place]
        data[at] ^= 1
    store.put(record(FOLDER, 2), data)
    assert results(store) == {0: 0, 1: 1, 3: 3, 4: 4}
    assert keep(store, PARTS) == [2]


def test_a_result_of_unnamed_classes_is_not_kept_and_the_part_is_done(store: ObjectStore) -> None:
    unnamed: KeptWork[Numbered] = KeptWork(
        lambda part: part, replace(kept_pass(), files_of=no_files), FOLDER, store.settings
    )
    assert unnamed(PARTS[1]) == PARTS[1]
    assert list(store.list()) == []


def test_a_store_that_takes_no_record_stops_no_work(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("away")

    monkeypatch.setattr("shared.storage.ObjectStore.put", refuse)
    work: KeptWork[Numbered] = KeptWork(lambda _: Result(7), kept_pass(), FOLDER, store.settings)
    assert work(PARTS[0]).value == 7


# --- the next attempt -------------------------------------------------------------------------------------------


def test_the_next_attempt_has_copies_of_records_and_files(store: ObjectStore) -> None:
    keep(store, PARTS[:3])
    assert take_over(store, [FOLDER], NEXT, lambda: None) == 3
    store.delete_folder(FOLDER)
    assert results(store, NEXT) == {0: 0, 1: 1, 2: 2}
    assert store.get(f"{NEXT}/file-2") == b"data 2"
    assert keep(store, PARTS, NEXT) == [3, 4]


def test_of_several_lost_attempts_each_part_is_taken_once(store: ObjectStore) -> None:
    keep(store, PARTS[:3])
    keep(store, PARTS[2:4], NEXT)
    kept = header_of(store.get(record(NEXT, 2)))
    assert take_over(store, [NEXT, FOLDER], "v/data/a00003-3", lambda: None) == 4
    assert results(store, "v/data/a00003-3") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert header_of(store.get(record("v/data/a00003-3", 2))) == kept


def test_a_part_whose_file_is_gone_is_not_taken_over(store: ObjectStore) -> None:
    keep(store, PARTS[:3])
    store.delete(f"{FOLDER}/file-1")
    assert take_over(store, [FOLDER], NEXT, lambda: None) == 2
    assert results(store, NEXT) == {0: 0, 2: 2}


def test_a_request_to_stop_ends_the_copies(store: ObjectStore) -> None:
    keep(store, PARTS)

    def stop() -> None:
        raise Cancelled("stop")

    with pytest.raises(Cancelled):
        take_over(store, [FOLDER], NEXT, stop)
    assert list(store.list(NEXT)) == []


def test_more_parts_than_requests_at_once_are_all_taken_over(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_attempt, "REQUESTS", 2)
    keep(store, PARTS)
    assert take_over(store, [FOLDER], NEXT, lambda: None) == len(PARTS)
    assert len(results(store, NEXT)) == len(PARTS)
    version_attempt.forget(store, NEXT)
    assert [info.key for info in store.list(f"{NEXT}/kept")] == []


@pytest.mark.parametrize("path", ["../../other/file", "/etc/passwd", "a//b", ""])
def test_a_record_names_no_file_outside_of_its_folder(store: ObjectStore, path: str) -> None:
    keep(store, PARTS[:1])
    store.put("v/other/file", b"not this attempt's")
    data = store.get(record(FOLDER, 0)).replace(b'"file-0"', b'"%s"' % path.encode())
    store.put(record(FOLDER, 0), data)
    assert take_over(store, [FOLDER], NEXT, lambda: None) == 0
    assert list(store.list(NEXT)) == []


# --- results ----------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    {"a": [1, 2.5, None, "ü", b"\x00"], "b": (True, frozenset([1]))},
    Counter({"x": 2}),
    Check(column="x", condition=NotNull(), quarantines=True),
    pa.float64(),
    pa.timestamp("us", "Europe/Vienna"),
    pa.list_(pa.struct([("a", pa.int8())])),
    pa.fixed_shape_tensor(pa.uint8(), [2, 3]),
    pa.schema([pa.field("a", pa.int64(), nullable=False)]),
    pa.array([1, None, 3]),
    pa.array([], pa.string()),
    pa.chunked_array([["a"], ["b", None]]),
    pa.table({"a": [1], "b": ["x"]}),
    np.float32(1.5),
    np.dtype("<i4"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = FORMAT.loads(FORMAT.dumps(Result(value))).value
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.zeros(0, np.uint64), np.array(["a", "bc"])])
def test_arrays_come_back_as_they_were(array: Any) -> None:
    back = FORMAT.loads(FORMAT.dumps(Result(array))).value
    np.testing.assert_array_equal(back, array, strict=True)
    back[:0] = 0  # and can be written to


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "hostile",
    [
        Calls(os.mkdir, "made"),
        Calls(eval, "1"),
        Calls(getattr, "a", "upper"),
        Calls(import_module, "os"),
        KeptWork,
        Calls(version_attempt.restore, "os", b""),
        Calls(version_attempt.restore, "array", pickle.dumps(7)),
        # A function of an allowed module, and one of an allowed class.
        Calls(inspect.unwrap(import_module("data_service.domain.checks").parse_checks), []),
        Calls(Check.reason, None),
    ],
    ids=["mkdir", "eval", "getattr", "import", "class", "restore", "restore a pickle", "function", "method"],
)
def test_a_record_calls_no_function(hostile: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unusable):
        FORMAT.loads(pickle.dumps(hostile))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"", b"no pickle", pickle.dumps(7)[:-1], b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
def test_a_part_that_is_no_pickle_is_unusable(data: bytes) -> None:
    with pytest.raises(Unusable):
        FORMAT.loads(data)


def test_all_accumulators_of_steps_can_be_kept() -> None:
    found = []
    for module in pkgutil.iter_modules(shared.transforms.steps.__path__):
        name = f"{shared.transforms.steps.__name__}.{module.name}"
        classes = inspect.getmembers(import_module(name), inspect.isclass)
        found += [
            (name, one)
            for one, kind in classes
            if kind.__module__ == name and hasattr(kind, "fitted_step") and not getattr(kind, "_is_protocol", False)
        ]
    assert len(found) >= 6
    assert [one for one in found if not RESULTS.allows(*one)] == []
