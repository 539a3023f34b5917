"""The first rows of a version, whatever its columns are called and whatever Python cannot hold of them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from data_service.reading import preview
from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.cli.command import print_json
from millrace_client.cli.versions import print_preview
from millrace_client.report import profile_of, rows_of
from millrace_client.report.pages import page
from shared.dataset_version import VersionReader, load_version
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.support.transforming import SOURCE, commit_tables

YEAR_20000_S = 568_971_820_800


def answer_of(tmp_path: Path, **columns: object) -> data_service_pb2.PreviewVersionResponse:
    """As the data service answers for a version of these columns."""
    store = open_store(StoreSettings(url=(tmp_path / "store").as_uri()))
    commit_tables(store, {"train": pa.table(columns)})
    version = load_version(store, SOURCE)
    described = [resources_pb2.Column(name=one.name, arrow_type=one.arrow_type) for one in version.columns]
    return data_service_pb2.PreviewVersionResponse(
        arrow_ipc=preview(VersionReader(store, version), 3).arrow_ipc,
        version=resources_pb2.DatasetVersion(name=SOURCE, columns=described),
    )


def test_a_column_named_split_stands_beside_the_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(tmp_path, text=["a", "b"], split=["east", "west"])
    assert profile_of(answer).rows == [
        {"_split": "train", "text": "a", "split": "east"},
        {"_split": "train", "text": "b", "split": "west"},
    ]
    print_preview(answer)
    assert "west" in capsys.readouterr().out
    assert "west" in page(answer)
    print_json(rows_of(answer))
    assert json.loads(capsys.readouterr().out)[1]["split"] == "west"


def test_even_such_a_name_may_be_taken(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, split=[1], _split=[2])
    assert rows_of(answer) == [{"__split": "train", "split": 1, "_split": 2}]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (pa.array([YEAR_20000_S], pa.timestamp("s")), "20000-01-01 00:00:00"),
        (pa.array([YEAR_20000_S], pa.timestamp("s", "UTC")), "20000-01-01 00:00:00Z"),
        (pa.array([5_000_000], pa.date32()), "15659-07-15"),
        (pa.array([1_500_000], pa.timestamp("us", "Mars/Base")), "1970-01-01 00:00:01.500000Z"),
        (pa.array([YEAR_20000_S * 1000], pa.timestamp("ms", "Mars/Base")), "20000-01-01 00:00:00.000Z"),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_times_that_python_cannot_hold_are_shown(tmp_path: Path, values: pa.Array, text: str) -> None:
    (row,) = profile_of(answer_of(tmp_path, t=values, n=[1])).rows
    assert row == {"split": "train", "t": text, "n": "1"}


def test_one_such_value_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    days = pa.array([0, 5_000_000, None], pa.date32())
    assert [row["t"] for row in profile_of(answer_of(tmp_path, t=days)).rows] == ["1970-01-01", "15659-07-15", "null"]
