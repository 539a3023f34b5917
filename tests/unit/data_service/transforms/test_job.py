"""A transform as an attempt runs it, without Ray around it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import json_format
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from data_service.domain.splits import (
    ColumnSplit,
    HashSplit,
    Period,
    RatioSplit,
    Share,
    SplitRule,
    TimeSplit,
    divider,
)
from data_service.imports import job as import_job
from data_service.transforms import passes
from millrace.data.v1 import quality_pb2
from shared.dataset_version import load_version
from shared.dataset_version.manifest import tensor_array
from shared.jobs import JobRecord, JobState
from shared.storage import ObjectStore
from shared.transforms.pipeline import Pipeline
from shared.transforms.steps import images as decoding
from tests.support.transforming import FICKLE_FOLDER, SOURCE, commit_tables, rows_of, transform_here
from tests.support.watched_decodes import watched_decodes

HALVES = [Share(split="left", weight=1), Share(split="right", weight=1)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand rows are several parts."""
    monkeypatch.setattr(passes, "MIN_PART_BYTES", 4096)


@pytest.fixture
def source(store: ObjectStore) -> None:
    """6,000 rows for training and 1,000 for testing."""
    n = np.arange(7000)
    table = pa.table(
        {
            "n": n,
            "word": pa.array([None if i % 7 == 0 else f"w{i % 5}" for i in n]),
            "x": n / 10,
            "on": pa.array(n, pa.int32()).cast(pa.date32()),
        }
    )
    commit_tables(store, {"train": table.slice(0, 6000), "test": table.slice(6000)})


def encoded(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def made(store: ObjectStore, job: JobRecord) -> dict[str, dict[str, list[Any]]]:
    assert job.state is JobState.SUCCEEDED, job.error
    return rows_of(store, job.name)


def refused(job: JobRecord, kind: str) -> str:
    assert job.state is JobState.FAILED, job
    assert job.error is not None
    assert job.error["kind"] == kind
    return str(job.error["message"])


def custom(function: str, *columns: str, **fields: Any) -> dict[str, Any]:
    return {"custom": {"function": f"tests.support.transforming:{function}", "columns": list(columns), **fields}}


def column(name: str, **step: Any) -> dict[str, Any]:
    return {"column": name, **step}


def test_a_tokenizer_is_learnt_of_the_training_split_in_parts_and_frozen_into_the_version(store: ObjectStore) -> None:
    train = [f"a good film of {i} minutes" for i in range(3000)] + [""]
    commit_tables(store, {"train": pa.table({"text": train}), "test": pa.table({"text": ["zzz zzz", "good"]})})
    step = column("text", tokenize={"vocabularySize": 290, "maxLength": 12})

    rows = made(store, transform_here(store, [step]))
    again = transform_here(store, [step])

    version = load_version(store, again.name)
    assert len(version.manifest.files) > 2
    assert [one.name for one in version.manifest.columns] == ["input_ids", "attention_mask"]
    (chain,) = version.manifest.transforms
    frozen = Pipeline.from_config(chain)
    tokenizer = Tokenizer.from_str(chain["steps"][0]["tokenize"]["tokenizer"])
    assert tokenizer.token_to_id("Ġfilm") is not None
    assert tokenizer.token_to_id("zz") is None
    for split, texts in {"train": train, "test": ["zzz zzz", "good"]}.items():
        expected = {name: one.tolist() for name, one in frozen({"text": pa.array(texts)}).items()}
        assert {name: rows[split][name] for name in expected} == expected
        assert {name: rows_of(store, again.name)[split][name] for name in expected} == expected


@pytest.mark.usefixtures("source")
def test_rows_keep_splits_order_and_get_consecutive_ids(store: ObjectStore) -> None:
    job = transform_here(store, [column("n", cast={"arrowType": "int32"})])
    rows = made(store, job)
    assert rows["train"]["n"] == list(range(6000))
    assert rows["test"]["n"] == list(range(6000, 7000))
    assert rows["train"]["_row_id"] + rows["test"]["_row_id"] == list(range(7000))
    manifest = load_version(store, job.name).manifest
    assert len(manifest.files) > 4
    assert len({file.path for file in manifest.files}) == len(manifest.files)


@pytest.mark.usefixtures("source")
def test_a_filter_drops_rows_and_closes_the_ids(store: ObjectStore) -> None:
    rows = made(store, transform_here(store, [{"filter": {"expression": "n % 3 == 0"}}, {"drop": {"columns": ["n"]}}]))
    assert rows["train"]["x"] == [i / 10 for i in range(0, 6000, 3)]
    assert rows["train"]["_row_id"] + rows["test"]["_row_id"] == list(range(2334))


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    "rule",
    [
        HashSplit(key_columns=["word"], shares=HALVES, seed=5),
        RatioSplit(shares=[Share(split="a", weight=3), Share(split="b", weight=1)], seed=5),
        TimeSplit(
            column="on",
            periods=[Period(split="old", before_ns=86_400_000_000_000 * 900), Period(split="new", before_ns=None)],
        ),
    ],
    ids=["hash", "ratio", "time"],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_rows_of_all_splits_are_divided_anew_before_any_step(
    store: ObjectStore, rule: SplitRule, filtered: bool
) -> None:
    steps: list[dict[str, Any]] = [{"drop": {"columns": ["word", "on"]}}]
    if filtered:
        steps.append({"filter": {"expression": "n % 2 == 0"}})
    rows = made(store, transform_here(store, steps, splits=rule))
    whole = pa.concat_tables([pa.table(split).drop(["_row_id"]) for split in rows_of(store, SOURCE).values()])
    assigned = divider(rule, 7000).assign(whole, np.arange(7000))
    for index, split in enumerate(assigned.splits):
        wanted = [n for n in np.flatnonzero(assigned.choice == index).tolist() if not filtered or n % 2 == 0]
        assert rows[split]["n"] == wanted
    ids = [row_id for split in rows.values() for row_id in split["_row_id"]]
    assert ids == list(range(len(ids)))


def test_a_column_names_the_splits_and_is_taken_away_from_there_on(store: ObjectStore) -> None:
    folds = [("train", "val", "test")[i % 3] for i in range(90)]
    commit_tables(store, {"all": pa.table({"n": range(90), "fold": folds})})
    job = transform_here(store, [{"rename": {"columns": {"n": "fold"}}}], splits=ColumnSplit(column="fold"))
    rows = made(store, job)
    assert list(rows) == ["test", "train", "val"]
    assert rows["val"]["fold"] == list(range(1, 90, 3))
    # What was done since ingest can be done again from the columns of then.
    manifest = load_version(store, job.name).manifest
    again = Pipeline.from_config(manifest.transforms[0])({"n": pa.array([4]), "fold": pa.array(["x"])})
    assert {name: values.to_pylist() for name, values in again.items()} == {"fold": [4]}


@pytest.mark.usefixtures("source")
def test_steps_learn_from_the_fit_split_alone_after_filters_and_the_split_rule(store: ObjectStore) -> None:
    steps = [
        {"filter": {"expression": "n < 3000"}},
        column("x", minMaxScale={}),
        column("x", standardize={}),
        column("word", fillNulls={"statistic": "STATISTIC_MODE"}),
        column("word", ordinalEncode={}),
    ]
    rule = TimeSplit(
        column="on",
        periods=[Period(split="fit", before_ns=86_400_000_000_000 * 1001), Period(split="rest", before_ns=None)],
    )
    job = transform_here(store, steps, splits=rule, fit_split="fit")
    rows = made(store, job)
    frozen = load_version(store, job.name).manifest.transforms[0]["steps"]
    assert (frozen[1]["minMaxScale"]["min"], frozen[1]["minMaxScale"]["max"]) == (0.0, 100.0)
    assert frozen[2]["standardize"]["mean"] == pytest.approx(0.5)
    assert max(rows["rest"]["x"]) == pytest.approx((299.9 / 100 - 0.5) / frozen[2]["standardize"]["deviation"])
    assert frozen[4]["ordinalEncode"]["categories"] == [f"w{i}" for i in range(5)]
    columns = {one.name: one for one in load_version(store, job.name).columns}
    assert columns["word"].value_names == [f"w{i}" for i in range(5)]


@pytest.mark.usefixtures("source")
def test_learned_values_decide_a_shape(store: ObjectStore) -> None:
    job = transform_here(store, [column("word", oneHotEncode={})])
    made(store, job)
    assert {one.name: one.shape for one in load_version(store, job.name).columns}["word"] == [5]


@pytest.mark.usefixtures("source")
def test_a_transformed_version_names_its_source(store: ObjectStore) -> None:
    first = transform_here(store, [column("x", standardize={})])
    source, version = load_version(store, SOURCE), load_version(store, first.name)
    assert [(one.version, one.manifest_sha256) for one in version.manifest.parents] == [
        (SOURCE, source.manifest_sha256)
    ]
    assert version.manifest.ingested == source.columns
    assert "mean" in version.manifest.transforms[0]["steps"][0]["standardize"]


@pytest.mark.usefixtures("source")
def test_equal_transforms_have_equal_digests(store: ObjectStore) -> None:
    rule = HashSplit(key_columns=["n"], shares=HALVES, seed=1)
    steps = [{"filter": {"expression": "n % 5 != 0"}}, column("x", standardize={})]
    checks = [{"column": "word", "action": "ACTION_QUARANTINE", "notNull": {}}]
    first, second = (transform_here(store, steps, splits=rule, fit_split="left", checks=checks) for _ in range(2))
    digest = load_version(store, first.name).manifest_sha256
    assert digest == load_version(store, second.name).manifest_sha256


@pytest.mark.usefixtures("source")
def test_quarantined_rows_are_left_out_and_kept_aside(store: ObjectStore) -> None:
    checks = [
        {"column": "word", "action": "ACTION_QUARANTINE", "notNull": {}},
        {"column": "n", "action": "ACTION_QUARANTINE", "range": {"max": 6900}},
    ]
    job = transform_here(store, [column("x", minMaxScale={})], checks=checks)
    rows = made(store, job)
    left_out = [n for n in range(7000) if n % 7 == 0 or n > 6900]
    assert rows["train"]["n"] + rows["test"]["n"] == [n for n in range(7000) if n not in set(left_out)]
    version = load_version(store, job.name)
    assert version.manifest.quarantined_row_count == len(left_out)
    lines = [json.loads(line) for line in store.get(f"{version.folder}/quarantine.jsonl").splitlines()]
    assert [line["place"] for line in lines] == [f"row {n}" for n in left_out]
    assert {line["source"] for line in lines} == {SOURCE}
    report = json_format.Parse(store.get(f"{version.folder}/report.json"), quality_pb2.QualityReport())
    assert [(one.violations, one.quarantined) for one in report.checks] == [(1000, 1000), (99, 85)]
    assert [one.row_count for one in report.columns if one.column == "n"] == [len(rows[s]["n"]) for s in rows]


@pytest.mark.usefixtures("source")
def test_of_rows_with_equal_values_the_first_stays(store: ObjectStore) -> None:
    steps = [{"filter": {"expression": "n > 10"}}]
    checks = [{"column": "word", "action": "ACTION_QUARANTINE", "unique": {}}]
    rule = HashSplit(key_columns=["n"], shares=HALVES, seed=1)
    rows = made(store, transform_here(store, steps, splits=rule, checks=checks))
    # 11, 12, 13, 15 and 19 are the first of their five words; nulls, every seventh row, do not count.
    kept = sorted(n for split in rows.values() for n in split["n"])
    assert kept == sorted([11, 12, 13, 15, 19, *range(14, 7000, 7)])


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("action", ["ACTION_QUARANTINE", "ACTION_FAIL"])
def test_keys_of_a_check_of_uniqueness_wait_on_the_disk(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Which rows are repeats does not depend on where the keys wait."""
    unique_check = {"column": "word", "action": action, "unique": {}}
    in_memory = transform_here(store, checks=[unique_check])
    monkeypatch.setattr(import_job, "SPILL_BYTES", 1000)
    read: list[NDArray[np.void]] = []
    fromfile = np.fromfile

    def noted(*arguments: Any) -> Any:
        read.append(fromfile(*arguments))
        return read[-1]

    monkeypatch.setattr(np, "fromfile", noted)
    spilled = transform_here(store, checks=[unique_check])
    # Nulls, every seventh row, have no key.
    assert sum(map(len, read)) == 6000
    if action == "ACTION_FAIL":
        assert refused(spilled, "FailedPrecondition") == refused(in_memory, "FailedPrecondition")
    else:
        assert made(store, spilled) == made(store, in_memory)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"column": "word", "notNull": {}}, f"checks[0]: in row 0 of {SOURCE}, word is null"),
        ({"column": "n", "range": {"max": 6500}}, f"in row 6501 of {SOURCE}"),
        ({"column": "word", "unique": {}}, f"in row 6 of {SOURCE}"),
        ({"rowCount": {"split": "test", "min": 2000}}, "test needs 2,000 rows"),
    ],
)
def test_a_check_that_fails_is_reported_with_its_first_row_and_nothing_is_made(
    store: ObjectStore, check: dict[str, Any], expected: str
) -> None:
    job = transform_here(store, [column("x", standardize={})], checks=[check])
    assert expected in refused(job, "FailedPrecondition")
    assert list(store.list(f"{job.name}/data")) == []


@pytest.mark.usefixtures("source")
def test_a_row_that_a_step_cannot_work_on_is_named(store: ObjectStore) -> None:
    steps = [{"filter": {"expression": "n != 17"}}, column("n", cast={"arrowType": "int8"})]
    message = refused(transform_here(store, steps), "InvalidArgument")
    assert message.startswith("transform.steps[1]: row ")
    row_id = int(message.split("row ")[1].split(":")[0])
    assert row_id > 127


@pytest.mark.usefixtures("source")
def test_the_row_on_which_a_custom_function_fails_is_found(store: ObjectStore) -> None:
    steps = [{"filter": {"expression": "n % 2 == 0"}}, custom("refuses", "n")]
    reported = refused(transform_here(store, steps), "InvalidArgument")
    assert (
        reported == "transform.steps[1]: row 1234: tests.support.transforming:refuses raised ValueError: no such luck"
    )


@pytest.mark.usefixtures("source")
def test_the_rows_with_which_a_custom_function_hangs_are_reported(store: ObjectStore) -> None:
    reported = refused(transform_here(store, [custom("hangs", "n", timeoutS=1.05)]), "InvalidArgument")
    rows = re.search(r"transform.steps\[0\]: rows (\d+) to (\d+): .* took longer than 1.05 s", reported)
    assert rows is not None
    assert int(rows[1]) <= 1234 <= int(rows[2])


@pytest.mark.usefixtures("source")
def test_a_custom_function_that_is_not_pure_is_found_out(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FICKLE_FOLDER, str(tmp_path))
    steps = [custom("fickle", "n"), {"filter": {"expression": "n < 3000 or n > 6000"}}]
    assert "must be pure" in refused(transform_here(store, steps), "FailedPrecondition")


@pytest.mark.usefixtures("source")
def test_a_rule_that_gives_a_split_nothing_fails(store: ObjectStore) -> None:
    rule = TimeSplit(column="on", periods=[Period(split="a", before_ns=0), Period(split="b", before_ns=None)])
    reported = refused(transform_here(store, splits=rule), "FailedPrecondition")
    assert "the split 'a' would have no rows: splits.time" in reported


@pytest.mark.usefixtures("source")
def test_a_source_that_was_made_again_is_refused(store: ObjectStore) -> None:
    job = transform_here(store, [column("x", standardize={})], source_sha256="0" * 64)
    assert "deleted and made again" in refused(job, "FailedPrecondition")


@pytest.mark.usefixtures("source")
def test_a_filter_that_leaves_nothing_of_a_split_fails(store: ObjectStore) -> None:
    job = transform_here(store, [{"filter": {"expression": "n < 6000"}}])
    assert "the split 'test' would have no rows" in refused(job, "FailedPrecondition")


def test_images_are_worked_on_a_few_at_a_time_and_come_out_as_from_the_pipeline(store: ObjectStore) -> None:
    images = np.random.default_rng(0).integers(0, 256, (700, 6, 5), np.uint8)
    table = pa.table({"image": tensor_array(images), "label": range(700)})
    commit_tables(store, {"train": table}, label=["zero", "one"])
    steps = [column("image", toFloat={}), column("image", normalize={"mean": [0.5], "std": [0.25]})]
    job = transform_here(store, steps)
    got = np.array(made(store, job)["train"]["image"], np.float32).reshape(700, 1, 6, 5)
    wanted = Pipeline.from_config({"steps": steps})({"image": images})["image"]
    assert np.array_equal(got, wanted)
    assert [one.value_names for one in load_version(store, job.name).columns] == [[], ["zero", "one"]]


@pytest.mark.usefixtures("source")
def test_progress_reports_the_phase_and_adds_up(store: ObjectStore) -> None:
    job = transform_here(store, [{"filter": {"expression": "n > 5"}}, column("x", standardize={})])
    progress = json.loads(store.get(f"{job.name}/progress.json"))
    assert (progress["phase"], progress["rows_done"], progress["rows_total"]) == ("WRITING", 7000, 7000)
    assert progress["rows_per_second"] > 0


def test_images_of_any_size_become_tensors(store: ObjectStore) -> None:
    generator = np.random.default_rng(0)
    images = [encoded(generator.integers(0, 256, (20 + i, 50 - i, 3), np.uint8)) for i in range(40)]
    commit_tables(store, {"train": pa.table({"image": images, "label": range(40)})})
    steps = [
        column("image", decodeImage={}),
        column("image", resize={"height": 8, "width": 6}),
        {"filter": {"expression": "label != 7"}},
    ]
    job = transform_here(store, steps)
    rows = made(store, job)["train"]
    alone = Pipeline.from_config({"steps": steps[:2]})({"image": pa.array(images[39:]), "label": pa.array([39])})
    assert len(rows["label"]) == 39
    assert np.array_equal(np.array(rows["image"][-1], np.uint8).reshape(8, 6, 3), alone["image"][0])


def test_no_more_pixels_than_the_bound_are_decoded_side_by_side_and_the_rows_are_the_same(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [100] * 12 + [300, 20, 30, 100]
    images = [encoded(np.full((side, 100, 3), place, np.uint8)) for place, side in enumerate(sides)]
    commit_tables(store, {"train": pa.table({"image": images, "x": np.arange(16.0), "n": range(16)})})
    decoded = watched_decodes(monkeypatch)
    steps = [
        column("x", standardize={}),
        {"rename": {"columns": {"image": "photo"}}},
        column("photo", decodeImage={}),
        column("photo", resize={"height": 4, "width": 3}),
        column("photo", toFloat={}),
        {"custom": {"function": "tests.support.transforming:doubles", "columns": ["n"]}},
    ]
    at_once = made(store, transform_here(store, steps))
    assert max(map(sum, decoded)) == sum(sides) * 100
    decoded.clear()
    monkeypatch.setattr(decoding, "PIXELS_AT_ONCE", 25_000)
    assert made(store, transform_here(store, steps)) == at_once
    assert list(map(sum, decoded)) == [*[20_000] * 6, 30_000, 15_000]  # one image alone may have more


def test_bytes_that_are_no_image_are_named_by_their_row(store: ObjectStore) -> None:
    commit_tables(store, {"train": pa.table({"image": [b"no image"] * 20})})
    steps = [column("image", decodeImage={}), column("image", resize={"height": 8, "width": 6})]
    assert refused(transform_here(store, steps), "InvalidArgument").startswith("transform.steps[0]: row 0: ")
