"""Tasks that look at parts of a source find in it what one process finds that reads it from beginning to end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from weakref import WeakSet

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from data_service.domain.import_spec import CsvOptions
from data_service.formats import RowSource, interface, json, open_sources
from data_service.formats.casts import InferredType
from data_service.formats.interface import R, ScanUnit
from data_service.imports.passes import OrderedUnits
from data_service.parallel import Results
from data_service.storage.source_files import SourceFiles
from data_service.uploads.chunks import BlocksAhead
from shared.errors import DataLoss, InvalidArgument, MillraceError, Unavailable
from shared.storage import ObjectStore
from tests.support.import_sources import source_of
from tests.support.upload_calls import committed
from tests.support.upload_server import uploads_of

EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


class Tasks:
    """A `UnitRunner` whose work, units and results travel as they do between processes; counts the units by pass."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    def __call__(self, work: Callable[[ScanUnit], R], units: Sequence[ScanUnit]) -> Iterator[R]:
        self.passes.append(len(units))
        assert [unit.number for unit in units] == list(range(len(units)))
        sent_work = travel(work)
        for unit in travel(units):
            yield pickle.loads(pickle.dumps(sent_work(unit)))


def travel(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def rows_of(folder: Path, source: Any, tasks: Tasks | None, types: dict[str, str] | None = None) -> list[RowSource]:
    files = SourceFiles([PurePosixPath(folder)], None)
    return [one.rows for one in open_sources([source], files, types or {}, run_units=tasks)]


def described(rows: Sequence[RowSource]) -> list[Any]:
    """Return all that is found before rows are read: columns, numbers of rows, and the cuts."""
    parts = [[getattr(part, "_part", None) for part in one.parts()] for one in rows]
    return [[(one.schema, one.row_count, one.size_bytes) for one in rows], parts]


def outcome(read: Callable[[], list[RowSource]]) -> Any:
    try:
        return described(read())
    except InvalidArgument as error:
        return error.as_record()


def same_in_tasks(
    folder: Path,
    kind: str,
    contents: Sequence[bytes],
    block_bytes: int = 60,
    part_bytes: int = 150,
    types: dict[str, str] | None = None,
) -> tuple[Any, Tasks]:
    """Open the files in one process and in tasks; return what both find, and the tasks."""
    for index, content in enumerate(contents):
        (folder / f"{index:03d}.{kind}").write_bytes(content)
    source, tasks = source_of(f"{folder.as_uri()}/*.{kind}", kind), Tasks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "BLOCK_BYTES", block_bytes)
        patch.setattr(interface, "PART_BYTES", part_bytes)
        patch.setattr(interface, "LARGE_BYTES", 0)
        expected = outcome(lambda: rows_of(folder, source, None, types))
        assert outcome(lambda: rows_of(folder, source, tasks, types)) == expected
    return expected, tasks


# --- CSV ---

TEXTS = [
    "",
    "0",
    "7",
    "-12",
    "-0",
    "007",
    "+49",
    "0x1F",
    "9007199254740992",
    "9007199254740993",
    "9223372036854775808",
    "1.5",
    "-2.25e3",
    "0.10000000000000000555",
    "3.14159265358979323846",
    "1e400",
    "nan",
    "NA",
    "inf",
    "true",
    "FALSE",
    "2024-02-29",
    "2024-02-29T12:00:00",
    "2024-02-30",
    "2024-02-29T12:00:00Z",
    "word",
    "é",
    '"quoted, with a comma"',
    '"two\nlines"',
    '"a ""doubled"" quote"',
    ' " stray',
]
# Columns whose texts are nearly all of one kind, so that each type is found often.
KINDS = [
    ["0", "7", "-12", ""],
    ["7", "9007199254740992", "9007199254740993", "NA"],
    ["1.5", "7", "", "-2.25e3", "9007199254740993"],
    ["true", "FALSE", ""],
    ["2024-02-29", "2024-02-29T12:00:00", ""],
    ["", "NA"],
    TEXTS,
]


@st.composite
def csv_files(draw: st.DrawFn) -> list[bytes]:
    columns = [draw(st.sampled_from(KINDS)) for _ in range(draw(st.integers(1, 4)))]
    contents = []
    for _ in range(draw(st.integers(1, 3))):
        lines = [",".join(f"c{index}" for index in range(len(columns)))]
        for _ in range(draw(st.integers(0, 25))):
            lines.append(",".join(draw(st.sampled_from(texts)) for texts in columns))
            if draw(st.integers(0, 30)) == 0:
                lines.append(draw(st.sampled_from(["", "a,b,c,d,e,f", '"never closed', "\udcff"])))
        contents.append("\n".join([*lines, *draw(st.sampled_from([[], [""]]))]).encode("utf-8", "surrogateescape"))
    return contents


@given(contents=csv_files(), block_bytes=st.integers(30, 200), part_bytes=st.integers(60, 400))
@EXAMPLES
def test_tasks_find_the_columns_rows_and_cuts_of_csv(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], block_bytes: int, part_bytes: int
) -> None:
    same_in_tasks(tmp_path_factory.mktemp("csv"), "csv", contents, block_bytes, part_bytes)


@given(texts=st.lists(st.sampled_from(TEXTS[1:26]), max_size=40), cuts=st.lists(st.integers(0, 40)), order=st.randoms())
@EXAMPLES
def test_types_of_any_pieces_merge_in_any_order_to_the_type_of_the_whole(
    texts: list[str], cuts: list[int], order: Any
) -> None:
    whole = InferredType()
    whole.update(pa.array(texts, pa.string()))
    bounds = sorted({0, len(texts), *(cut for cut in cuts if cut < len(texts))})
    pieces = []
    for begin, end in pairwise(bounds):
        pieces.append(InferredType())
        pieces[-1].update(pa.array(texts[begin:end], pa.string()))
    pieces.append(InferredType())  # of a part without rows
    while len(pieces) > 1:
        one = pieces.pop(order.randrange(len(pieces)))
        pieces[order.randrange(len(pieces))].merge(one)
    assert pieces[0].type == whole.type


def test_a_large_file_is_cut_first_and_then_looked_at_in_parts(tmp_path: Path) -> None:
    small, large = b"a,b\n1,x\n", b"a,b\n" + b"1,2.5\n" * 200
    (described_rows, parts), tasks = same_in_tasks(tmp_path, "csv", [large, small, large])
    assert tasks.passes == [2, 1 + 2 * len(parts[0])]
    assert len(parts[0]) > 3
    assert [schema.types for schema, _, _ in described_rows] == [[pa.int64(), pa.string()]] * 3
    assert [row_count for _, row_count, _ in described_rows] == [200, 1, 200]


def test_a_file_that_cannot_be_divided_is_looked_at_by_one_task(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n" + "1\n" * 500, "utf-16")
    source = source_of((tmp_path / "a.csv").as_uri(), "csv", csv=CsvOptions(encoding="utf-16"))
    tasks = Tasks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "PART_BYTES", 100)
        patch.setattr(interface, "LARGE_BYTES", 0)
        assert described(rows_of(tmp_path, source, tasks)) == described(rows_of(tmp_path, source, None))
    assert tasks.passes == [1, 1]


def test_where_all_types_are_given_files_are_cut_and_no_value_is_looked_at(tmp_path: Path) -> None:
    contents = [b"a,b\n" + b"1,2.5\n" * 200, b"a,b\n1,2\n"]
    (described_rows, parts), tasks = same_in_tasks(tmp_path, "csv", contents, types={"a": "int8", "b": "double"})
    assert tasks.passes == [1]
    assert [row_count for _, row_count, _ in described_rows] == [200, None]
    assert len(parts[0]) > 3


def test_a_small_source_is_read_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a\n1\n")
    tasks = Tasks()
    rows_of(tmp_path, source_of((tmp_path / "a.csv").as_uri(), "csv"), tasks)
    assert tasks.passes == []


# --- Uploads ---

UPLOADED = {
    "csv": b"a,b\n" + b"".join(b'%d,"x\n%d"\n' % (n, n) for n in range(80)) + b"0.5,y\n",
    "json_lines": b"".join(b'{"a": %d}\n' % n for n in range(80)) + b'{"a": 0.5}\n',
}


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "BLOCK_BYTES", 60)
    monkeypatch.setattr(interface, "PART_BYTES", 150)
    monkeypatch.setattr(interface, "LARGE_BYTES", 400)


def rows_of_upload(store: ObjectStore, name: str, kind: str, tasks: Tasks | None) -> list[RowSource]:
    files = SourceFiles([], None, store)
    return [one.rows for one in open_sources([source_of(name, kind)], files, {}, run_units=tasks)]


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("kind", UPLOADED)
def test_a_large_upload_is_scanned_in_tasks(store: ObjectStore, kind: str) -> None:
    name, tasks = committed(uploads_of(store), UPLOADED[kind], chunk_bytes=100), Tasks()
    expected = described(rows_of_upload(store, name, kind, None))
    assert described(rows_of_upload(store, name, kind, tasks)) == expected
    # The pass that finds the cuts runs here.
    (units,) = tasks.passes
    assert units > 3


def test_a_small_upload_is_scanned_by_one_process(store: ObjectStore) -> None:
    name, tasks = committed(uploads_of(store), UPLOADED["csv"]), Tasks()
    assert rows_of_upload(store, name, "csv", tasks)[0].row_count == 81
    assert tasks.passes == []


def change_last_chunk(store: ObjectStore, name: str) -> None:
    key = max(info.key for info in store.list(f"{name}/chunks"))
    store.put(key, store.get(key).replace(b"0.5", b"1.5"))


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("kind", UPLOADED)
def test_a_damaged_upload_is_refused_before_any_task(store: ObjectStore, kind: str) -> None:
    name, tasks = committed(uploads_of(store), UPLOADED[kind], chunk_bytes=len(UPLOADED[kind])), Tasks()
    change_last_chunk(store, name)
    with pytest.raises(DataLoss, match="not those that were committed"):
        rows_of_upload(store, name, kind, tasks)
    assert tasks.passes == []


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("kind", UPLOADED)
def test_an_upload_that_changes_once_it_was_verified_is_refused_by_a_task(store: ObjectStore, kind: str) -> None:
    name = committed(uploads_of(store), UPLOADED[kind], chunk_bytes=len(UPLOADED[kind]))

    class Changing(Tasks):
        def __call__(self, work: Callable[[ScanUnit], R], units: Sequence[ScanUnit]) -> Iterator[R]:
            change_last_chunk(store, name)
            yield from super().__call__(work, units)

    with pytest.raises(DataLoss, match="not those that were committed"):
        rows_of_upload(store, name, kind, Changing())


@pytest.mark.usefixtures("_small_parts")
def test_one_pass_over_an_upload_verifies_it_and_finds_its_cuts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = committed(uploads_of(store), UPLOADED["csv"], chunk_bytes=100)
    read: list[int] = []
    read_block = BlocksAhead.read

    def noted(self: BlocksAhead, blocks: Sequence[Any], index: int) -> Any:
        read.append(index)
        return read_block(self, blocks, index)

    monkeypatch.setattr(BlocksAhead, "read", noted)

    def no_tasks(work: object, units: object) -> Iterator[Any]:
        raise Unavailable(f"nothing does {work} on {units}")

    with pytest.raises(Unavailable):
        open_sources([source_of(name, "csv")], SourceFiles([], None, store), {}, run_units=no_tasks)
    # Once more for the names of the columns, as so few bytes are read together.
    assert sorted(read) == sorted([*range(8), *range(8)])


# --- JSON Lines ---

VALUES = st.sampled_from(
    [
        "null",
        "true",
        "7",
        "-3",
        "1.5",
        "9007199254740993",
        "9223372036854775808",
        '"word"',
        "[1, 2]",
        "[1.5, 2]",
        "[1, 2, 3]",
        "[1, null]",
        "[]",
        '{"x": 1}',
    ]
)
LINES = st.one_of(
    st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=4).map(
        lambda row: "{" + ", ".join(f'"{key}": {value}' for key, value in row.items()) + "}"
    ),
    st.sampled_from(["", "no JSON", "[1]", '{"": 1}', '{"a": ']),
)
JSON_FILES = st.lists(st.lists(LINES, max_size=60).map(lambda lines: "\n".join(lines).encode()), min_size=1, max_size=3)


@given(contents=JSON_FILES, block_bytes=st.integers(8, 200), part_bytes=st.integers(20, 400), lengths=st.integers(1, 9))
@EXAMPLES
def test_tasks_find_the_columns_rows_and_cuts_of_json_lines(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], block_bytes: int, part_bytes: int, lengths: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "MAX_LENGTHS", lengths)  # the order of the rows matters beyond it
        patch.setattr(json, "MAX_COLUMNS", 5)
        same_in_tasks(tmp_path_factory.mktemp("json"), "json_lines", contents, block_bytes, part_bytes)


def test_lists_of_too_many_lengths_have_the_type_that_their_first_ones_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "MAX_LENGTHS", 3)
    lines = ['{"a": [1]}'] * 20 + ['{"a": [1, 2]}'] * 5 + ['{"a": [1, 2, 3]}'] + ['{"a": [1, 2]}'] * 50
    ((described_rows, _), tasks) = same_in_tasks(tmp_path, "json_lines", ["\n".join(lines).encode()])
    assert described_rows[0][0].field("a").type.shape == [1], "the lists after the third length do not count"
    assert len(tasks.passes) == 2


def test_the_first_bad_line_of_all_parts_is_named(tmp_path: Path) -> None:
    contents = [b"[1]\n" * 100, b"no JSON\n" * 100]
    error, tasks = same_in_tasks(tmp_path, "json_lines", contents)
    assert "no line of it is a row; of line 1, it is no JSON object" in error["message"]
    assert "000.json_lines" in error["message"]
    assert tasks.passes[0] == 2


# --- The order of results ---


class Unordered:
    """A `PartRunner` whose units end in an order of the test's choice."""

    def __init__(self, order: Sequence[int], failing: dict[int, MillraceError]) -> None:
        self._order, self._failing = order, failing
        self.worked_on: list[int] = []

    def __call__(self, _context: Any, _folder: str, work: Any, units: Sequence[Any], **_: Any) -> Results[Any]:
        for number in self._order:
            self.worked_on.append(number)
            yield units[number], work(units[number])


def failing_work(failing: dict[int, MillraceError]) -> Callable[[ScanUnit], int]:
    def work(unit: ScanUnit) -> int:
        if unit.number in failing:
            raise failing[unit.number]
        return unit.number * 10

    return work


UNITS = [ScanUnit(number, None) for number in range(5)]  # type: ignore[arg-type]


def test_results_come_in_the_order_of_the_units() -> None:
    runner = Unordered([3, 0, 4, 1, 2], {})
    assert list(OrderedUnits(None, runner)(failing_work({}), UNITS)) == [0, 10, 20, 30, 40]  # type: ignore[arg-type]


def test_the_first_unit_that_fails_is_reported() -> None:
    failing: dict[int, MillraceError] = {3: InvalidArgument("third"), 1: InvalidArgument("first")}
    runner = Unordered([3, 0, 4, 1, 2], failing)
    results = OrderedUnits(None, runner)(failing_work(failing), UNITS)  # type: ignore[arg-type]
    assert next(results) == 0
    with pytest.raises(InvalidArgument, match="first"):
        next(results)
    assert runner.worked_on == [3, 0, 4, 1], "no task goes on for nothing"


class Found:
    """A result of a unit. `alive` are those in memory."""

    alive: ClassVar[WeakSet[Found]] = WeakSet()

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive.add(self)

    def __reduce__(self) -> tuple[type[Found], tuple[int]]:
        return Found, (self.number,)


def test_results_that_wait_for_an_earlier_one_are_kept_as_bytes() -> None:
    """Of a wide table with many units the objects take several times the memory."""
    runner = Unordered([3, 1, 4, 2, 0], {})
    results = OrderedUnits(None, runner)(lambda unit: Found(unit.number), UNITS)  # type: ignore[arg-type]
    assert next(results).number == 0
    assert runner.worked_on == [3, 1, 4, 2, 0]
    assert len(Found.alive) <= 1
    assert [found.number for found in results] == [1, 2, 3, 4]


def test_an_outage_ends_the_attempt_at_once() -> None:
    failing: dict[int, MillraceError] = {3: Unavailable("the store does not answer")}
    with pytest.raises(Unavailable):
        list(OrderedUnits(None, Unordered([3, 0], failing))(failing_work(failing), UNITS))  # type: ignore[arg-type]
