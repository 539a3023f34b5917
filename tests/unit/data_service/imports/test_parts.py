"""An import of several parts, whose order of completion changes nothing: rows, ids, digests and errors are as if one
process had read the parts one after the other."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service import version_attempt
from data_service.domain import bad_rows
from data_service.domain.import_spec import BadRows, Base, ColumnType, HoldOut, ImportSpec, Source
from data_service.formats import interface
from data_service.formats.parquet import MAX_BATCH_ROWS
from data_service.imports import job as import_job
from data_service.imports import plan
from data_service.imports.passes import Guarded, Pickled, WritePart, _PartFiles
from data_service.imports.plan import ImportPart
from data_service.parallel import P, Pool, Results, Work
from shared.dataset_version import VersionReader, load_version
from shared.dataset_version.manifest import QUARANTINE
from shared.dataset_version.version import IMPORT_KIND, read_attachment, read_report
from shared.errors import Cancelled, ResourceExhausted, Unavailable
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt
from shared.storage import ObjectStore
from shared.storage.object_store import STORE_FULL
from tests.support.hostile_files import arrow_that_claims, parquet_that_claims
from tests.support.transforming import run_here

DATASET = "datasets/d/versions"
ROWS = 40
FILES = 7
ALL = [0, 1, 2, 3, 4, 5, 6]


@pytest.fixture(autouse=True)
def _each_file_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALL_BYTES", 0)
    monkeypatch.setattr(plan, "MAX_PART_BYTES", 1)


class Parts:
    """A `PartRunner` that works on the parts in another order, and remembers them by pass."""

    def __init__(self, order: Callable[[Sequence[Any]], Iterable[Any]] = reversed) -> None:
        self._order = order
        self.passes: list[tuple[str, list[int]]] = []

    def __call__(
        self,
        context: AttemptContext,
        folder: str,
        work: Work[P],
        parts: Sequence[P],
        *,
        foreign_code: bool,
        pool: Pool | None = None,
    ) -> Results[P]:
        assert isinstance(work, Guarded)
        # Around the work is that which pickles the results of units, or which keeps those of parts.
        inner = work.work.work if isinstance(work.work, Pickled) else getattr(work.work, "_work", work.work)
        self.passes.append((type(inner).__name__, [part.number for part in parts]))
        ordered = list(reversed(list(self._order(parts))))  # `run_here` reverses them once more
        yield from run_here(context, folder, work, ordered, foreign_code=foreign_code, pool=pool)


def as_given(parts: Sequence[Any]) -> Sequence[Any]:
    return parts


def inside_out(parts: Sequence[Any]) -> Sequence[Any]:
    return [*parts[1::2], *reversed(parts[::2])]


def parquet(folder: Path, name: str, split: str, **columns: object) -> Source:
    pq.write_table(pa.table(columns), folder / name)
    return Source(split=split, format="parquet", uris={"parquet.uri": (folder / name).as_uri()})


def damaged(folder: Path, name: str) -> Source:
    """A file whose rows 1 and 2 are bad, and whose second row group cannot be read."""
    texts = [f"x{row}" if row in (1, 2) else str(280 + row) for row in range(2 * MAX_BATCH_ROWS)]
    pq.write_table(pa.table({"n": texts}), folder / name, row_group_size=MAX_BATCH_ROWS, use_dictionary=False)
    column = pq.read_metadata(folder / name).row_group(1).column(0)
    data = bytearray((folder / name).read_bytes())
    end, half = column.data_page_offset + column.total_compressed_size, column.total_compressed_size // 2
    data[end - half : end] = b"\xff" * half
    (folder / name).write_bytes(data)
    return Source(split="train", format="parquet", uris={"parquet.uri": (folder / name).as_uri()})


def run(store: ObjectStore, folder: Path, version: str, spec: ImportSpec, run_parts: Parts) -> JobRecord:
    """The job after its first attempt."""
    jobs, name, now = Jobs(store, IMPORT_KIND), f"{DATASET}/{version}", time.time()
    recorded = {"import": spec.as_record(), "import_roots": [str(folder)], "request_id": ""}
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=recorded, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(functools.partial(import_job.run_import, run_parts=run_parts), store, IMPORT_KIND, name, 1)
    return jobs.get(name, name)


def run_in_one_process(store: ObjectStore, folder: Path, version: str, spec: ImportSpec) -> JobRecord:
    """The job, whose parts the attempt itself has read one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_job._Opened, "in_tasks", False)
        runner = Parts()
        job = run(store, folder, version, spec, runner)
    assert runner.passes == []
    return job


def numbers(store: ObjectStore, name: str) -> dict[str, list[tuple[int, int]]]:
    """The column `n` with its row ids, by split."""
    upload = VersionReader(store, load_version(store, name))
    found = {}
    for split in upload.version.manifest.splits:
        tables = [upload.read(group, ["n", "_row_id"]) for group in upload.row_groups(split.name)]
        columns = pa.concat_tables(tables).to_pydict()
        found[split.name] = list(zip(columns["n"], columns["_row_id"], strict=True))
    return found


def texts(file: int, bad: Iterable[int] = (), repeats: Iterable[int] = ()) -> list[str]:
    """Numbers of a file as texts; those of `bad` rows are none, and `repeats` are those of the file before."""
    return [f"x{row}" if row in set(bad) else str(ROWS * (file - (row in set(repeats))) + row) for row in range(ROWS)]


def sources(folder: Path, bad: Any = None, repeats: Any = None, last_split: str = "test") -> list[Source]:
    """Files of both splits by turns; `bad` and `repeats` name rows by the number of the file."""
    return [
        parquet(
            folder,
            f"{number}.parquet",
            "train" if number % 3 else last_split,
            n=texts(number, (bad or {}).get(number, ()), (repeats or {}).get(number, ())),
        )
        for number in range(FILES)
    ]


INT64 = [ColumnType(column="n", arrow_type="int64")]
QUARANTINE_ALL = BadRows(action="quarantine")
BAD = {1: [3], 2: [0, 39], 4: [7], 6: [1, 2]}
REPEATS = {1: [3], 2: [5, 6], 3: [0], 5: [11]}
UNIQUE = {"column": "n", "unique": {}, "action": "ACTION_QUARANTINE"}
BELOW = {"column": "n", "range": {"max": 250}, "action": "ACTION_QUARANTINE"}
# Leaves out the rows of the files 1, 2, 4 and 5, which are those of the split `train`.
OF_TEST = [{"integer": str(ROWS * file + row)} for file in (0, 3, 6) for row in range(ROWS)]
NO_TRAIN = {"column": "n", "oneOf": {"values": OF_TEST}, "action": "ACTION_QUARANTINE"}
HELD_OUT = [HoldOut(from_split="train", to_split="validation", fraction=0.2, seed=3)]


def spec_of(given: list[Source], **changes: Any) -> ImportSpec:
    return ImportSpec(
        **{"sources": given, "hold_outs": [], "column_types": INT64, "bad_rows": QUARANTINE_ALL, **changes}
    )


SPECS: dict[str, Callable[[Path], ImportSpec]] = {
    "all good": lambda folder: spec_of(sources(folder)),
    "bad rows": lambda folder: spec_of(sources(folder, BAD)),
    "checks": lambda folder: spec_of(sources(folder), checks=[BELOW]),
    "bad rows, checks": lambda folder: spec_of(sources(folder, BAD), checks=[BELOW]),
    "unique": lambda folder: spec_of(sources(folder, None, REPEATS), checks=[UNIQUE]),
    "unique of good rows": lambda folder: spec_of(sources(folder, BAD, REPEATS), checks=[UNIQUE, BELOW]),
    "hold-outs": lambda folder: spec_of(sources(folder), hold_outs=HELD_OUT),
    "hold-outs of all": lambda folder: spec_of(sources(folder, BAD, REPEATS), hold_outs=HELD_OUT, checks=[UNIQUE]),
}


@pytest.mark.parametrize("name", SPECS)
def test_parts_in_any_order_make_the_version_that_one_process_makes(
    store: ObjectStore, tmp_path: Path, name: str
) -> None:
    spec = SPECS[name](tmp_path)
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    assert (expected.state, expected.error) == (JobState.SUCCEEDED, None)
    for version, order in (("v2", reversed), ("v3", inside_out)):
        assert_same(store, run(store, tmp_path, version, spec, Parts(order)), expected)


def assert_same(store: ObjectStore, found: JobRecord, expected: JobRecord) -> None:
    assert (found.state, found.error) == (JobState.SUCCEEDED, None)
    versions = [load_version(store, job.name) for job in (expected, found)]
    rows = numbers(store, found.name)
    assert rows == numbers(store, expected.name)
    assert read_report(store, versions[1]) == read_report(store, versions[0])
    quarantined = [read_attachment(store, version, QUARANTINE) for version in versions]
    assert quarantined[0] == quarantined[1]
    assert versions[1].manifest_sha256 == versions[0].manifest_sha256
    ids = [row_id for of_split in rows.values() for _, row_id in of_split]
    assert ids == list(range(len(ids)))
    named = {f"{versions[1].folder}/{file.path}" for file in versions[1].manifest.files}
    assert {info.key for info in store.list(versions[1].folder) if info.key.endswith(".parquet")} == named


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("all good", [("WritePart", [0, 1, 2, 3, 4, 5, 6])]),
        # Part 3 is the first after a bad row; nothing stands at another place before it.
        ("bad rows", [("WritePart", [0, 1, 2, 3, 4, 5, 6]), ("WritePart", [3, 4, 5, 6])]),
        ("hold-outs", [("CountPart", [0, 1, 2, 3, 4, 5, 6]), ("WritePart", [0, 1, 2, 3, 4, 5, 6])]),
        ("unique", [("CountPart", [0, 1, 2, 3, 4, 5, 6]), ("WritePart", [0, 1, 2, 3, 4, 5, 6])]),
    ],
)
def test_only_parts_that_came_to_stand_elsewhere_are_written_again(
    store: ObjectStore, tmp_path: Path, name: str, passes: list[tuple[str, list[int]]]
) -> None:
    runner = Parts()
    spec = SPECS[name](tmp_path)
    assert run(store, tmp_path, "v1", spec, runner).state is JobState.SUCCEEDED
    assert runner.passes == passes


def test_files_of_moved_parts_are_deleted_several_at_once(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, two_are_deleted = ObjectStore.delete, threading.Barrier(2)

    def delete_with_another(self: ObjectStore, key: str) -> None:
        if key.endswith(".parquet"):
            two_are_deleted.wait(60)
        delete(self, key)

    monkeypatch.setattr(ObjectStore, "delete", delete_with_another)
    job = run(store, tmp_path, "v1", SPECS["bad rows"](tmp_path), Parts())
    assert (job.state, job.error) == (JobState.SUCCEEDED, None)
    named = {file.path for file in load_version(store, job.name).manifest.files}
    stored = {info.key.rsplit("/", 1)[-1] for info in store.list(job.name)}
    assert {name for name in stored if name.endswith(".parquet")} == named


def test_a_job_that_is_to_stop_deletes_no_more_files_of_moved_parts(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, raise_if_stopped = ObjectStore.delete, AttemptContext.raise_if_stopped
    deleted: list[str] = []
    deleted_until_stop: list[int] = []

    def delete_and_remember(self: ObjectStore, key: str) -> None:
        if key.endswith(".parquet"):
            deleted.append(key)
        delete(self, key)

    def stop_after_first_file(self: AttemptContext, *, fresh: bool = False) -> None:
        if deleted:
            deleted_until_stop.append(len(deleted))
            raise Cancelled("the job is to stop")
        raise_if_stopped(self, fresh=fresh)

    monkeypatch.setattr(version_attempt, "REQUESTS", 1)
    monkeypatch.setattr(ObjectStore, "delete", delete_and_remember)
    monkeypatch.setattr(AttemptContext, "raise_if_stopped", stop_after_first_file)
    job = run(store, tmp_path, "v1", SPECS["bad rows"](tmp_path), Parts())
    assert job.state is not JobState.SUCCEEDED
    # The files of four parts have moved. One more may be in progress.
    assert deleted_until_stop[0] <= 2


def test_parts_whose_sources_do_not_say_how_many_rows_they_have_are_counted_first(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImportPart, "expected_rows", None)
    runner = Parts()
    job = run(store, tmp_path, "v1", SPECS["bad rows"](tmp_path), runner)
    assert [name for name, _ in runner.passes] == ["CountPart", "WritePart"]
    expected = run_in_one_process(store, tmp_path, "v2", SPECS["bad rows"](tmp_path))
    assert numbers(store, job.name) == numbers(store, expected.name)


@pytest.fixture
def _two_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources of the parts 1 and 4 do not say how many rows they have."""
    known = ImportPart.expected_rows.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        ImportPart, "expected_rows", property(lambda part: None if part.number in (1, 4) else known(part))
    )


@pytest.mark.usefixtures("_two_unknown")
@pytest.mark.parametrize(
    ("bad", "again"), [({}, None), ({2: [0, 39], 3: [1]}, None), ({1: [3], 2: [0]}, [4, 5, 6]), (BAD, [3, 4, 5, 6])]
)
def test_only_parts_of_unknown_row_counts_are_counted_first(
    store: ObjectStore, tmp_path: Path, bad: dict[int, list[int]], again: list[int] | None
) -> None:
    spec = spec_of(sources(tmp_path, bad))
    runner = Parts()
    found = run(store, tmp_path, "v1", spec, runner)
    assert found.error is None
    passes = [("CountPart", [1, 4]), ("WritePart", ALL)]
    assert runner.passes == passes + ([("WritePart", again)] if again else [])
    expected = run_in_one_process(store, tmp_path, "v2", spec)
    manifests = [load_version(store, job.name).manifest_sha256 for job in (expected, found)]
    assert manifests[0] == manifests[1]


@pytest.mark.usefixtures("_two_unknown")
def test_a_part_that_cannot_be_counted_fails_where_it_is_written(store: ObjectStore, tmp_path: Path) -> None:
    class Deleting(Parts):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            (tmp_path / "2.parquet").unlink(missing_ok=True)  # part 4
            return super().__call__(*arguments, **options)

    runner = Deleting()
    job = run(store, tmp_path, "v1", spec_of(sources(tmp_path)), runner)
    assert runner.passes == [("CountPart", [1, 4]), ("WritePart", ALL)]
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert "2.parquet" in job.error["message"]


def failing(check: dict[str, Any]) -> dict[str, Any]:
    return {**check, "action": "ACTION_FAIL"}


REFUSED: dict[str, Callable[[Path], ImportSpec]] = {
    "bad rows": lambda folder: spec_of(sources(folder, BAD), bad_rows=BadRows()),
    "too many bad rows": lambda folder: spec_of(
        sources(folder, BAD), bad_rows=BadRows(action="quarantine", max_rows=3)
    ),
    "too many in one part": lambda folder: spec_of(
        sources(folder, {**BAD, 5: range(20)}), bad_rows=BadRows(action="quarantine", max_rows=6)
    ),
    "a check": lambda folder: spec_of(sources(folder), checks=[failing({**BELOW, "range": {"max": 100}})]),
    "a check after bad rows": lambda folder: spec_of(sources(folder, BAD), checks=[failing(BELOW)]),
    "unique": lambda folder: spec_of(sources(folder, BAD, REPEATS), checks=[failing(UNIQUE)]),
    "a check with hold-outs": lambda folder: spec_of(
        sources(folder, BAD), hold_outs=HELD_OUT, checks=[failing({**BELOW, "range": {"max": 100}})]
    ),
    "too many with hold-outs": lambda folder: spec_of(
        sources(folder, BAD), hold_outs=HELD_OUT, bad_rows=BadRows(action="quarantine", max_rows=4)
    ),
    "too many beside unique": lambda folder: spec_of(
        sources(folder, BAD, REPEATS), checks=[UNIQUE], bad_rows=BadRows(action="quarantine", max_rows=2)
    ),
    "too many bad rows before damage": lambda folder: spec_of(
        [*sources(folder, BAD), damaged(folder, "damaged.parquet")], bad_rows=BadRows(action="quarantine", max_rows=7)
    ),
    "damage before too many bad rows": lambda folder: spec_of(
        [*sources(folder, BAD), damaged(folder, "damaged.parquet")], bad_rows=BadRows(action="quarantine", max_rows=9)
    ),
    "a check before damage beside unique": lambda folder: spec_of(
        [*sources(folder), damaged(folder, "damaged.parquet")],
        hold_outs=HELD_OUT,
        checks=[failing({**BELOW, "range": {"max": 290}}), UNIQUE],
    ),
    "a check before a split without rows": lambda folder: spec_of(
        sources(folder), hold_outs=HELD_OUT, checks=[NO_TRAIN, failing(BELOW), UNIQUE]
    ),
    "bad rows before a split without rows": lambda folder: spec_of(
        sources(folder, {3: [5]}), hold_outs=HELD_OUT, bad_rows=BadRows(), checks=[NO_TRAIN, UNIQUE]
    ),
    "too many before a split without rows": lambda folder: spec_of(
        sources(folder, {0: [5], 6: [0, 1, 2]}),
        hold_outs=HELD_OUT,
        bad_rows=BadRows(action="quarantine", max_rows=3),
        checks=[NO_TRAIN, UNIQUE],
    ),
    "unique before a split without rows": lambda folder: spec_of(
        [*sources(folder), parquet(folder, "last.parquet", "test", n=texts(3))],
        hold_outs=HELD_OUT,
        checks=[NO_TRAIN, failing(UNIQUE)],
    ),
    "unique before bad rows": lambda folder: spec_of(
        sources(folder, {5: [1]}, {2: [5]}), hold_outs=HELD_OUT, bad_rows=BadRows(), checks=[failing(UNIQUE)]
    ),
    "a split without rows beside unique": lambda folder: spec_of(
        sources(folder), hold_outs=HELD_OUT, checks=[NO_TRAIN, UNIQUE]
    ),
    "no row is left": lambda folder: spec_of(
        sources(folder), checks=[{"column": "n", "range": {"min": 90, "max": 100}, "action": "ACTION_QUARANTINE"}]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_part_that_fails_is_the_one_that_is_reported(store: ObjectStore, tmp_path: Path, name: str) -> None:
    spec = REFUSED[name](tmp_path)
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    found = run(store, tmp_path, "v2", spec, Parts())
    assert expected.state is JobState.FAILED
    assert (found.state, found.error) == (JobState.FAILED, expected.error)
    assert [info.key for info in store.list(f"{found.name}/data")] == []


@pytest.mark.usefixtures("_two_unknown")
@pytest.mark.parametrize("name", REFUSED)
def test_the_first_failure_is_reported_if_some_row_counts_are_unknown(
    store: ObjectStore, tmp_path: Path, name: str
) -> None:
    spec = REFUSED[name](tmp_path)
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    found = run(store, tmp_path, "v2", spec, Parts())
    assert expected.state is JobState.FAILED
    assert (found.state, found.error) == (JobState.FAILED, expected.error)


@pytest.mark.parametrize("claimed", [(2**63 - 1, 2**63 - 1), (2**63 - 1, ROWS), (-1, -1)])
def test_a_footer_with_an_impossible_number_of_rows_fails_the_import_as_in_one_process(
    store: ObjectStore, tmp_path: Path, claimed: tuple[int, int]
) -> None:
    spec = spec_of([parquet(tmp_path, f"{number}.parquet", "train", n=range(ROWS)) for number in range(3)])
    (tmp_path / "1.parquet").write_bytes(parquet_that_claims(*claimed, ROWS))
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    found = run(store, tmp_path, "v2", spec, Parts())
    assert expected.error is not None
    assert expected.error["reason"] == "CORRUPT_SOURCE"
    assert (found.state, found.error) == (JobState.FAILED, expected.error)


@pytest.mark.parametrize("column_type", [pa.null(), pa.int64()])
def test_an_arrow_file_with_an_impossible_number_of_rows_fails_the_import_as_in_one_process(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column_type: pa.DataType
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 1)
    (tmp_path / "1.arrow").write_bytes(arrow_that_claims(2**62, 3, column_type))
    hostile = Source(split="train", format="arrow", uris={"arrow.uri": (tmp_path / "1.arrow").as_uri()})
    spec = spec_of([parquet(tmp_path, "0.parquet", "train", n=range(ROWS)), hostile])
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    found = run(store, tmp_path, "v2", spec, Parts())
    assert expected.error is not None
    assert (expected.error["kind"], expected.error["reason"]) == ("InvalidArgument", "CORRUPT_SOURCE")
    assert "1.arrow" in expected.error["message"]
    assert (found.state, found.error) == (JobState.FAILED, expected.error)


@pytest.mark.parametrize("name", ["bad rows", "hold-outs"])
def test_a_source_that_changes_between_two_passes_fails_the_import(
    store: ObjectStore, tmp_path: Path, name: str
) -> None:
    class Changing(Parts):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            if self.passes:
                parquet(tmp_path, "5.parquet", "train", n=["1", "2"])
            return super().__call__(*arguments, **options)

    job = run(store, tmp_path, "v1", SPECS[name](tmp_path), Changing())
    assert job.error is not None
    assert (job.error["kind"], job.error["reason"]) == ("InvalidArgument", "SOURCE_CHANGED")


@pytest.mark.parametrize("is_damaged", [False, True], ids=["deleted", "damaged"])
def test_a_part_that_fails_when_it_is_written_again_fails_the_import(
    store: ObjectStore, tmp_path: Path, is_damaged: bool
) -> None:
    class Breaking(Parts):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            if self.passes:
                file = tmp_path / "4.parquet"  # part 5
                if is_damaged:
                    file.write_bytes(bytes(file.stat().st_size))
                else:
                    file.unlink()
            return super().__call__(*arguments, **options)

    for version, order in (("v1", reversed), ("v2", as_given)):
        runner = Breaking(order)
        job = run(store, tmp_path, version, SPECS["bad rows"](tmp_path), runner)
        assert [numbers for _, numbers in runner.passes] == [ALL, [3, 4, 5, 6]]
        assert job.state is JobState.FAILED
        assert job.error is not None
        assert "4.parquet" in job.error["message"]
        assert [info.key for info in store.list(f"{job.name}/data")] == []


def test_more_rows_than_at_first_fail_the_import_where_size_and_time_show_no_change(
    store: ObjectStore, tmp_path: Path
) -> None:
    path = tmp_path / "n.csv"
    path.write_text("n\n1234567\n")

    class Changing(Parts):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            found = path.stat()
            path.write_text("n\n1\n2\n3\n4\n")
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
            assert path.stat().st_size == found.st_size
            return super().__call__(*arguments, **options)

    given = [
        Source(split="train", format="csv", uris={"csv.uri": path.as_uri()}),
        parquet(tmp_path, "0.parquet", "train", n=range(ROWS)),
    ]
    runner = Changing()
    job = run(store, tmp_path, "v1", spec_of(given, column_types=[]), runner)
    assert runner.passes == [("WritePart", [0, 1])]
    assert job.error is not None
    assert (job.error["kind"], job.error["reason"]) == ("InvalidArgument", "SOURCE_CHANGED")


def test_an_outage_in_one_part_ends_the_attempt_and_not_the_job(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WritePart.__call__

    def write_or_fail(self: WritePart, part: ImportPart) -> Any:
        if part.number == 4:
            raise Unavailable("the store does not answer")
        return write(self, part)

    monkeypatch.setattr(WritePart, "__call__", write_or_fail)
    job = run(store, tmp_path, "v1", SPECS["all good"](tmp_path), Parts(as_given))
    assert job.state is JobState.RECOVERING
    assert job.error is not None
    assert job.error["message"] == "the store does not answer"


@pytest.mark.parametrize("in_tasks", [True, False])
def test_an_import_whose_files_lack_rows_fails_at_once_and_leaves_nothing(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_tasks: bool
) -> None:
    close = _PartFiles.close
    monkeypatch.setattr(_PartFiles, "close", lambda files: [replace(one, row_count=1) for one in close(files)])
    spec = SPECS["all good"](tmp_path)
    job = run(store, tmp_path, "v1", spec, Parts()) if in_tasks else run_in_one_process(store, tmp_path, "v1", spec)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert (job.error["kind"], job.error["reason"]) == ("DataLoss", "FILES_INCOMPLETE")
    assert "do not have each of its rows once" in job.error["message"]
    assert [info.key for info in store.list(f"{job.name}/data")] == []


@pytest.mark.parametrize("name", ["unique", "hold-outs of all"])
def test_keys_that_go_to_the_disk_make_the_version_that_one_process_makes(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(import_job, "SPILL_BYTES", 1000)
    spec = SPECS[name](tmp_path)
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    found = run(store, tmp_path, "v2", spec, Parts(inside_out))
    assert (found.state, found.error) == (JobState.SUCCEEDED, None)
    versions = [load_version(store, job.name) for job in (expected, found)]
    assert versions[1].manifest_sha256 == versions[0].manifest_sha256


@pytest.mark.parametrize("kind", ["csv", "json_lines"])
def test_columns_that_tasks_infer_make_the_version_that_one_process_makes(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(interface, "PART_BYTES", 300)
    monkeypatch.setattr(interface, "BLOCK_BYTES", 100)
    for file in range(3):
        last = 2.5 if file == 1 else 7
        rows = [{"n": 280 + row, "d": last if row == 99 else row, "s": None} for row in range(100)]
        lines = ["n,d,s", *(f"{row['n']},{row['d']}," for row in rows)] if kind == "csv" else map(json.dumps, rows)
        (tmp_path / f"{file}.{kind}").write_text("\n".join(lines) + "\n")
    given = Source(split="train", format=kind, uris={f"{kind}.uri": f"{tmp_path.as_uri()}/*.{kind}"})
    spec = spec_of([given], column_types=[])
    expected, runner = run(store, tmp_path, "v1", spec, Parts()), Parts()
    monkeypatch.setattr(interface, "LARGE_BYTES", 0)
    job = run(store, tmp_path, "v2", spec, runner)
    assert [name for name, _ in runner.passes] == ["ScanInChild", "ScanInChild", "WritePart"]
    assert len(runner.passes[1][1]) > 6
    assert job.result is not None
    assert expected.result is not None
    made, same = (load_version(store, f"{DATASET}/{version}") for version in ("v2", "v1"))
    assert made.columns == same.columns
    assert [column.arrow_type for column in made.columns] == ["int64", "double", "string"]
    assert numbers(store, made.name) == numbers(store, same.name)
    assert [file.sha256 for file in made.manifest.files] == [file.sha256 for file in same.manifest.files]


class Losing(Parts):
    """Loses the attempt in one of its passes, after two parts of it."""

    def __init__(self, lost_in: int) -> None:
        super().__init__()
        self._lost_in = lost_in

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        for done, (part, result) in enumerate(super().__call__(*arguments, **options)):
            if len(self.passes) == self._lost_in and done == 2:
                raise Unavailable("the node is gone")
            yield part, result


def run_again(store: ObjectStore, name: str, run_parts: Parts) -> JobRecord:
    """The job after its second attempt."""
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=2)
    run_attempt(functools.partial(import_job.run_import, run_parts=run_parts), store, IMPORT_KIND, name, 2)
    return jobs.get(name, name)


@pytest.mark.parametrize(
    ("name", "lost_in", "passes"),
    [
        # Parts come in reverse order, and the third of a pass is done as the attempt is lost.
        ("all good", 1, [("WritePart", [0, 1, 2, 3])]),
        ("bad rows", 1, [("WritePart", [0, 1, 2, 3]), ("WritePart", [3, 4, 5, 6])]),
        ("bad rows", 2, [("WritePart", [3])]),
        ("hold-outs of all", 1, [("CountPart", [0, 1, 2, 3]), ("WritePart", ALL)]),
        ("hold-outs of all", 2, [("WritePart", [0, 1, 2, 3])]),
    ],
)
def test_an_attempt_goes_on_with_the_parts_that_a_lost_one_has_finished(
    store: ObjectStore, tmp_path: Path, name: str, lost_in: int, passes: list[tuple[str, list[int]]]
) -> None:
    spec = SPECS[name](tmp_path)
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    lost = run(store, tmp_path, "v2", spec, Losing(lost_in))
    assert lost.state is JobState.RECOVERING
    runner = Parts()
    found = run_again(store, lost.name, runner)
    assert (found.state, found.error) == (JobState.SUCCEEDED, None)
    assert runner.passes == passes
    versions = [load_version(store, job.name) for job in (expected, found)]
    assert numbers(store, found.name) == numbers(store, expected.name)
    assert versions[1].manifest_sha256 == versions[0].manifest_sha256
    named = {f"{versions[1].folder}/{file.path}" for file in versions[1].manifest.files}
    assert {info.key for info in store.list(f"{found.name}/data") if info.key.endswith(".parquet")} == named
    assert not [info.key for info in store.list(f"{found.name}/data") if "/kept/" in info.key]


def test_a_store_with_no_room_for_copies_is_swept_and_the_import_goes_on(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = run(store, tmp_path, "v1", SPECS["all good"](tmp_path), Losing(1))
    (before,) = store.folders(f"{lost.name}/data")
    copied: list[str] = []
    copy = ObjectStore.copy

    def copy_a_few(self: ObjectStore, source: str, target: str) -> None:
        if len(copied) == 3:
            raise ResourceExhausted("the object store is full", reason=STORE_FULL)
        copied.append(target)
        copy(self, source, target)

    monkeypatch.setattr(version_attempt, "REQUESTS", 1)
    monkeypatch.setattr(ObjectStore, "copy", copy_a_few)
    runner = Parts()
    found = run_again(store, lost.name, runner)
    assert (found.state, found.error) == (JobState.SUCCEEDED, None)
    assert len(copied) == 3
    assert runner.passes == [("WritePart", ALL)]
    (after,) = store.folders(f"{lost.name}/data")
    assert after != before
    named = {
        f"{load_version(store, found.name).folder}/{file.path}"
        for file in load_version(store, found.name).manifest.files
    }
    assert {info.key for info in store.list(f"{found.name}/data") if info.key.endswith(".parquet")} == named


def test_a_part_whose_file_changed_is_not_taken_over(store: ObjectStore, tmp_path: Path) -> None:
    lost = run(store, tmp_path, "v1", SPECS["all good"](tmp_path), Losing(1))
    parquet(tmp_path, "4.parquet", "train", n=texts(4)[::2])  # part 5
    runner = Parts()
    found = run_again(store, lost.name, runner)
    assert found.state is JobState.SUCCEEDED
    # Fewer rows in part 5 move part 6, too.
    assert runner.passes == [("WritePart", [0, 1, 2, 3, 5, 6])]
    assert len(numbers(store, found.name)["train"]) == 4 * ROWS - ROWS // 2


def test_a_part_whose_file_was_replaced_by_one_of_the_same_size_is_not_taken_over(
    store: ObjectStore, tmp_path: Path
) -> None:
    lost = run(store, tmp_path, "v1", SPECS["all good"](tmp_path), Losing(1))
    os.utime(tmp_path / "4.parquet", ns=(0, 0))  # part 5
    runner = Parts()
    found = run_again(store, lost.name, runner)
    assert found.state is JobState.SUCCEEDED
    assert runner.passes == [("WritePart", [0, 1, 2, 3, 5])]


def test_rows_of_a_base_are_parts_too(store: ObjectStore, tmp_path: Path) -> None:
    # A version has one successor, so each import appends to a base of its own.
    first, same = (run_in_one_process(store, tmp_path, name, SPECS["bad rows"](tmp_path)) for name in ("v1", "w1"))
    spec = spec_of(sources(tmp_path, last_split="more"), base=Base(version=first.name, mode="append"))
    expected = run_in_one_process(store, tmp_path, "v2", spec)
    runner = Parts()
    found = run(store, tmp_path, "w2", replace(spec, base=Base(version=same.name, mode="append")), runner)
    assert found.error is None
    assert len(runner.passes[0][1]) > FILES
    assert numbers(store, found.name) == numbers(store, expected.name)
    files = [[file.sha256 for file in load_version(store, job.name).manifest.files] for job in (expected, found)]
    assert files[0] == files[1]
    before, after = numbers(store, first.name), numbers(store, found.name)
    assert list(after) == ["test", "train", "more"]
    assert [n for n, _ in after["train"][: len(before["train"])]] == [n for n, _ in before["train"]]


def test_small_files_share_a_part_and_a_small_import_has_one_for_each_split(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS["all good"](tmp_path)
    size = (tmp_path / "1.parquet").stat().st_size
    monkeypatch.setattr(plan, "MAX_PART_BYTES", 2 * size + 100)
    runner = Parts(as_given)
    run(store, tmp_path, "v1", spec, runner)
    assert runner.passes == [("WritePart", [0, 1, 2, 3])]
    monkeypatch.setattr(plan, "SMALL_BYTES", 100 * size)
    runner = Parts(as_given)
    run(store, tmp_path, "v2", spec, runner)
    assert runner.passes == []
    version = load_version(store, f"{DATASET}/v2")
    assert [file.path for file in version.manifest.files] == ["test-00000.parquet", "train-00000.parquet"]
    assert numbers(store, version.name) == numbers(store, f"{DATASET}/v1")


@pytest.mark.parametrize("order", [reversed, inside_out, as_given])
def test_lines_of_rows_that_will_not_be_listed_are_not_kept(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[Sequence[Any]], Iterable[Any]]
) -> None:
    monkeypatch.setattr(bad_rows, "MAX_LINES", 3)
    spec = SPECS["bad rows"](tmp_path)
    expected = run_in_one_process(store, tmp_path, "v1", spec)
    merge, lines = bad_rows.BadRowLog.merge, []

    def merge_and_remember(self: bad_rows.BadRowLog, part: bad_rows.BadRowPart) -> None:
        lines.append(len(part.lines))
        merge(self, part)

    monkeypatch.setattr(bad_rows.BadRowLog, "merge", merge_and_remember)
    found = run(store, tmp_path, "v2", spec, Parts(order))
    # The first two parts with bad rows have three of them.
    assert lines == [2, 1, 0, 0]
    versions = [load_version(store, job.name) for job in (expected, found)]
    assert read_report(store, versions[1]) == read_report(store, versions[0])
    assert versions[1].manifest_sha256 == versions[0].manifest_sha256


def test_the_report_lists_bad_rows_of_all_parts_in_the_order_of_the_rows(store: ObjectStore, tmp_path: Path) -> None:
    job = run(store, tmp_path, "v1", SPECS["bad rows"](tmp_path), Parts())
    version = load_version(store, job.name)
    data = read_attachment(store, version, QUARANTINE)
    assert data is not None
    places = [(Path(line["source"]).name, line["place"]) for line in map(json.loads, data.splitlines())]
    assert places == [
        ("6.parquet", "row 2"),
        ("6.parquet", "row 3"),
        ("1.parquet", "row 4"),
        ("2.parquet", "row 1"),
        ("2.parquet", "row 40"),
        ("4.parquet", "row 8"),
    ]
