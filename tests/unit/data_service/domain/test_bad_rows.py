from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_service.domain import bad_rows
from data_service.domain.bad_rows import BadRowLog, BadRowPolicy, excerpt
from shared.dataset_version.manifest import tensor_array
from shared.errors import InvalidArgument

KEEP_ASIDE = BadRowPolicy(quarantines=True)


def test_reasons_are_counted_with_their_first_examples(tmp_path: Path) -> None:
    with BadRowLog(tmp_path / "q", KEEP_ASIDE) as log:
        for line in range(7):
            log.add("file:///a.csv", f"line {line}", "ragged", "1,2")
        log.add("file:///a.csv", "line 9", "no number", "x", rows=20)
        log.close()
        first, second = log.to_json()
    assert (first["reason"], first["rowCount"]) == ("no number", 20)
    assert [one["place"] for one in second["examples"]] == [f"line {line}" for line in range(5)]
    assert log.row_count == 27
    lines = [json.loads(line) for line in (tmp_path / "q").read_text().splitlines()]
    assert len(lines) == 8
    assert lines[0] == {"source": "file:///a.csv", "place": "line 0", "excerpt": "1,2", "reason": "ragged", "rows": 1}


def test_the_first_bad_row_ends_it_unless_they_are_kept_aside(tmp_path: Path) -> None:
    with BadRowLog(tmp_path / "q", BadRowPolicy()) as log, pytest.raises(InvalidArgument, match="line 3: ragged"):
        log.add("file:///a.csv", "line 3", "ragged", "")


def test_more_than_allowed_end_it(tmp_path: Path) -> None:
    with BadRowLog(tmp_path / "q", BadRowPolicy(quarantines=True, max_rows=2)) as log:
        log.leave_out("s", "row 0", "a check", "")  # rows that checks leave out are not bad ones
        log.add("s", "row 1", "ragged", "")
        log.add("s", "row 2", "ragged", "")
        with pytest.raises(InvalidArgument, match="more than 2 bad rows") as caught:
            log.add("s", "row 3", "ragged", "")
    assert caught.value.specific_reason == "TOO_MANY_BAD_ROWS"


def test_reasons_beyond_a_hundred_are_counted_together(tmp_path: Path) -> None:
    with BadRowLog(tmp_path / "q", KEEP_ASIDE) as log:
        for index in range(150):
            log.add("s", f"row {index}", f"reason {index}", "")
        found = log.to_json()
    assert len(found) == 100
    assert (found[0]["reason"], found[0]["rowCount"]) == ("other reasons", 51)


def test_parts_merged_in_order_are_as_one_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_rows, "MAX_LINES", 8)
    rows = [("s", f"row {index}", f"reason {index % 3}", "é\u2028" * index) for index in range(20)]
    with BadRowLog(tmp_path / "whole", KEEP_ASIDE) as whole, BadRowLog(tmp_path / "merged", KEEP_ASIDE) as merged:
        for row in rows:
            whole.add(*row)
        for start in (0, 10):
            with BadRowLog(tmp_path / f"part{start}", KEEP_ASIDE) as part:
                for row in rows[start : start + 10]:
                    part.add(*row)
                merged.merge(pickle.loads(pickle.dumps(part.part())))
        whole.close()
        merged.close()
        assert merged.to_json() == whole.to_json()
    written = (tmp_path / "merged").read_bytes()
    assert written == (tmp_path / "whole").read_bytes()
    assert json.loads(written.decode().split("\n")[8])["note"] == "the first 8 are listed; 12 more are not"


def test_the_lines_of_a_part_are_bounded_in_bytes(tmp_path: Path) -> None:
    with BadRowLog(tmp_path / "merged", KEEP_ASIDE) as merged:
        for rows in (1, 7_000, 2):
            with BadRowLog(tmp_path / "part", KEEP_ASIDE) as log:
                for row in range(rows):
                    log.add("é" * 500, f"row {row}", "ragged", "é" * 500)
                part = log.part()
            assert sum(len(line.encode()) for line in part.lines) <= 8 << 20
            assert part.line_count == rows
            merged.merge(part)
        merged.close()
    *lines, note = map(json.loads, (tmp_path / "merged").read_text().splitlines())
    # Only the first rows are listed: none after one that is not.
    assert [line["place"] for line in lines] == ["row 0", *(f"row {row}" for row in range(len(lines) - 1))]
    assert 3_000 < len(lines) < 7_000
    assert note["note"] == f"the first {len(lines):,} are listed; {7_003 - len(lines):,} more are not"
    assert merged.row_count == 7_003


def test_long_names_of_sources_places_and_reasons_are_cut(tmp_path: Path) -> None:
    with BadRowLog(tmp_path / "q", KEEP_ASIDE) as log:
        for _ in range(3):
            log.add("file:///" + "a" * 900_000, "member " + "é" * 900_000, "column " + "c" * 900_000, "x")
        log.close()
        (reason,) = log.to_json()
    assert len(json.dumps(reason, ensure_ascii=False)) < 8_000
    assert reason["examples"][0]["place"].startswith("member éé")
    assert (tmp_path / "q").stat().st_size < 10_000


@pytest.mark.parametrize("policy", [BadRowPolicy(), BadRowPolicy(quarantines=True, max_rows=1)])
def test_long_names_are_cut_in_the_error(tmp_path: Path, policy: BadRowPolicy) -> None:
    with BadRowLog(tmp_path / "q", policy) as log, pytest.raises(InvalidArgument) as caught:
        log.add("file:///" + "a" * 900_000, "member " + "b" * 900_000, "column " + "c" * 900_000, "x", rows=2)
    assert len(json.dumps(caught.value.as_record())) < 4_000


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (pa.scalar(2**60, pa.timestamp("us")), "1152921504606846976"),
        (pa.scalar(5_000_000, pa.date32()), "15659-07-15"),
        (pa.scalar(5, pa.timestamp("us", "Nowhere/Land")), "tz=Nowhere/Land"),
    ],
    ids=["timestamp", "date", "time zone"],
)
def test_an_excerpt_shows_values_that_python_does_not_have(value: pa.Scalar, shown: str) -> None:
    table = pa.table({"at": pa.array([value]), "n": [7]})
    row = json.loads(excerpt(table, 0))
    assert shown in row["at"]
    assert row["n"] == 7


def test_an_excerpt_is_short_and_spells_out_no_pixels(tmp_path: Path) -> None:
    table = pa.table({"image": tensor_array(np.zeros((1, 28, 28), np.uint8)), "file": [b"abc"], "text": ["x" * 900]})
    text = excerpt(table, 0)
    assert text.startswith('{"file": "<3 bytes>", "text": "xxx')
    assert len(text) == 500
    with BadRowLog(tmp_path / "q", KEEP_ASIDE) as log:
        log.add("s", "row 1", "bad", "\udcff" * 600)
        (reason,) = log.to_json()
    assert len(reason["examples"][0]["excerpt"]) == 500
