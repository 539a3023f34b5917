"""Starting the jobs that make versions: what is refused leaves nothing, and what is repeated is the same."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from data_service.datasets import SERVICE, Datasets, Versions, record_operation, withdraw_operation
from data_service.deletion import Deletions
from data_service.domain.import_spec import Base, ImportSpec, Source
from data_service.domain.transform_spec import TransformSpec
from data_service.version_jobs import VersionJobs
from shared.dataset_version.version import IMPORT_KIND, live_references
from shared.errors import AlreadyExists, Conflict, InvalidArgument, MillraceError, NotFound
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.transitions import request_delete
from shared.resource_log import claimed
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.versions import commit_version, striped_digits

PARENT = "datasets/d"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "store").as_uri()))


@pytest.fixture
def version_jobs(store: ObjectStore, tmp_path: Path) -> VersionJobs:
    """In a dataset with the versions v1 and v2."""
    jobs, datasets = Jobs(store, IMPORT_KIND), Datasets(store)
    datasets.create("d", display_name="", description="", request_id="", body_sha256="", validate_only=False)
    for version in ("v1", "v2"):
        commit_version(store, f"{PARENT}/versions/{version}", {"train": striped_digits(10)})
    roots = [PurePosixPath(tmp_path)]
    return VersionJobs(
        store, jobs, datasets, Versions(store, jobs, datasets), import_roots=roots, custom_allowed=frozenset()
    )


def start(
    version_jobs: VersionJobs, folder: Path, version_id: str, *, base: str = "", uri: str = "", request_id: str = ""
) -> JobRecord:
    source = Source(split="train", format="parquet", uris={"parquet.uri": uri or (folder / "a.parquet").as_uri()})
    following = Base(version=f"{PARENT}/versions/{base}", mode="append") if base else None
    spec = ImportSpec(sources=[source], hold_outs=[], base=following)
    return version_jobs.start_import(
        PARENT, version_id, spec, request_id=request_id, body_sha256="body", validate_only=False
    )


def end(store: ObjectStore, job: JobRecord) -> Deletions:
    """Which takes away what nobody may while the job lives."""
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(job.name, lambda newest: replace(newest, state=JobState.CANCELLED, update_time=time.time()))
    return Deletions(store, jobs)


def remove(store: ObjectStore, job: JobRecord) -> None:
    end(store, job).delete(job.name)


def remove_source(store: ObjectStore, job: JobRecord, version_id: str) -> None:
    end(store, job).delete(f"{PARENT}/versions/{version_id}")


def operations(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("operations")]


@pytest.mark.parametrize(
    ("version_id", "uri", "refusal"),
    [("v2", "", AlreadyExists), ("v9", f"{PARENT}/uploads/none", NotFound)],
    ids=["taken id", "no such upload"],
)
def test_a_refused_import_leaves_no_operation_and_no_claim(
    store: ObjectStore,
    version_jobs: VersionJobs,
    tmp_path: Path,
    version_id: str,
    uri: str,
    refusal: type[MillraceError],
) -> None:
    with pytest.raises(refusal):
        start(version_jobs, tmp_path, version_id, base="v1", uri=uri)

    assert operations(store) == []
    assert start(version_jobs, tmp_path, "v3", base="v1").name == f"{PARENT}/versions/v3"


def test_a_second_follower_is_refused_and_leaves_no_operation(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path
) -> None:
    start(version_jobs, tmp_path, "v3", base="v1")

    with pytest.raises(Conflict, match="v3 already follows"):
        start(version_jobs, tmp_path, "v4", base="v1")

    assert len(operations(store)) == 1


def test_an_automatic_id_that_was_taken_in_between_is_chosen_again_behind_the_same_base(
    version_jobs: VersionJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, given = version_jobs._next_id, iter(["v2"])
    monkeypatch.setattr(version_jobs, "_next_id", lambda parent: next(given, "") or chosen(parent))

    assert start(version_jobs, tmp_path, "", base="v2").name == f"{PARENT}/versions/v3"


def test_an_id_is_found_behind_the_last_number_that_counts(version_jobs: VersionJobs, tmp_path: Path) -> None:
    given = ["v999999999", "v20261123093000", "", ""]
    names = [start(version_jobs, tmp_path, one).name.rsplit("/", 1)[-1] for one in given]
    assert names == ["v999999999", "v20261123093000", "v3", "v4"]


def test_where_others_take_every_id_the_caller_is_asked_to_choose_one(
    version_jobs: VersionJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_jobs, "_next_id", lambda _: "v2")
    with pytest.raises(Conflict, match="version_id"):
        start(version_jobs, tmp_path, "")


@pytest.mark.parametrize("deleted_since", [False, True])
def test_a_claim_whose_id_another_took_gives_way_to_the_next_id(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path, deleted_since: bool
) -> None:
    """As a server leaves it that dies between the claim and the job."""
    request_id = str(uuid.uuid4())
    with claimed(store, SERVICE, request_id, "body", f"{PARENT}/versions/v3"):
        pass
    other = start(version_jobs, tmp_path, "")
    assert other.name == f"{PARENT}/versions/v3"
    if deleted_since:
        remove(store, other)

    def repeat(_: int) -> JobRecord:
        return start(version_jobs, tmp_path, "", base="v2", request_id=request_id)

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(repeat, range(4)))

    assert {job.name for job in made} == {f"{PARENT}/versions/v4"}
    assert start(version_jobs, tmp_path, "").name == f"{PARENT}/versions/v5"


def test_an_id_that_the_caller_chose_is_not_given_up_for_another(version_jobs: VersionJobs, tmp_path: Path) -> None:
    with pytest.raises(AlreadyExists, match="v2 exists already"):
        start(version_jobs, tmp_path, "v2", request_id=str(uuid.uuid4()))


def test_a_repeated_call_does_not_make_a_deleted_version_again(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path
) -> None:
    request_id = str(uuid.uuid4())
    first = start(version_jobs, tmp_path, "v3", request_id=request_id)
    remove(store, first)

    for taken_by_another in (False, True):
        if taken_by_another:
            start(version_jobs, tmp_path, "v3")
        with pytest.raises(NotFound, match="deleted since"):
            start(version_jobs, tmp_path, "v3", request_id=request_id)
    assert Jobs(store, IMPORT_KIND).get(first.name, "v3").uid != first.uid


@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize(
    ("checks", "field"),
    [
        ([{"column": "x", "pattern": {"regex": "("}}], "checks[0].pattern.regex"),
        ([{"column": "x", "notNull": {}}] * 101, "checks"),
    ],
    ids=["malformed", "too many"],
)
def test_wrong_checks_of_an_import_are_refused_at_once(
    store: ObjectStore,
    version_jobs: VersionJobs,
    tmp_path: Path,
    checks: list[dict[str, Any]],
    field: str,
    validate_only: bool,
) -> None:
    source = Source(split="train", format="parquet", uris={"parquet.uri": (tmp_path / "a.parquet").as_uri()})
    spec = ImportSpec(sources=[source], hold_outs=[], checks=checks)
    with pytest.raises(InvalidArgument) as refused:
        version_jobs.start_import(PARENT, "v3", spec, request_id="", body_sha256="body", validate_only=validate_only)
    assert refused.value.fields[0][0] == field
    assert operations(store) == []


def test_a_repeated_call_is_answered_with_the_job_that_the_first_made(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path
) -> None:
    request_id = str(uuid.uuid4())

    first = start(version_jobs, tmp_path, "", base="v2", request_id=request_id)
    again = start(version_jobs, tmp_path, "", base="v2", request_id=request_id)

    assert (again.name, again.uid) == (first.name, first.uid)
    assert len(operations(store)) == 1


def test_a_call_that_an_equal_one_overtook_is_answered_as_that_and_takes_nothing_from_it(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its own checks would be refused by now, as somebody tries to delete the base."""
    request_id, base, made = str(uuid.uuid4()), f"{PARENT}/versions/v2", list[JobRecord]()

    def after_the_other(*arguments: Any) -> None:
        monkeypatch.undo()
        record_operation(*arguments)
        made.append(start(version_jobs, tmp_path, "v3", base="v2", request_id=request_id))
        Jobs(store, IMPORT_KIND).transition(base, lambda newest: request_delete(newest, 1.0))

    monkeypatch.setattr("data_service.version_jobs.record_operation", after_the_other)

    assert start(version_jobs, tmp_path, "v3", base="v2", request_id=request_id) == made[0]
    assert len(operations(store)) == 1
    assert live_references(store, base, time.time()) == [made[0].name]


def test_an_import_has_its_operation_though_an_equal_call_withdrew_it_while_it_was_made(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Jobs.create

    def after_the_other(jobs: Jobs, folder: str, job: JobRecord) -> JobRecord:
        withdraw_operation(store, job)
        return create(jobs, folder, job)

    monkeypatch.setattr(Jobs, "create", after_the_other)

    start(version_jobs, tmp_path, "v3", request_id=str(uuid.uuid4()))

    assert len(operations(store)) == 1


def test_a_repeated_call_is_answered_after_its_base_is_gone(
    store: ObjectStore, version_jobs: VersionJobs, tmp_path: Path
) -> None:
    request_id = str(uuid.uuid4())
    first = start(version_jobs, tmp_path, "v3", base="v2", request_id=request_id)
    remove_source(store, first, "v2")

    again = start(version_jobs, tmp_path, "v3", base="v2", request_id=request_id)
    assert (again.name, again.uid) == (first.name, first.uid)
    with pytest.raises(NotFound):
        start(version_jobs, tmp_path, "v4", base="v2", request_id=str(uuid.uuid4()))


def test_a_repeated_transform_is_answered_after_its_source_is_gone(
    store: ObjectStore, version_jobs: VersionJobs
) -> None:
    def transform(body: str = "body") -> JobRecord:
        spec = TransformSpec(source=f"{PARENT}/versions/v1", transform={"steps": [{"drop": {"columns": ["label"]}}]})
        return version_jobs.start_transform(
            PARENT, "v3", spec, request_id=request_id, body_sha256=body, validate_only=False
        )

    request_id = str(uuid.uuid4())
    first = transform()
    remove_source(store, first, "v1")

    again = transform()
    assert (again.name, again.uid) == (first.name, first.uid)
    with pytest.raises(AlreadyExists, match="another body"):
        transform("another body")
