from __future__ import annotations

from typing import Any

import pytest

from data_service.datasets import Datasets
from data_service.deletion import Deletions
from data_service.domain.dataset import Dataset, Retention
from data_service.uploads.upload import mark_used, unmark
from data_service.uploads.uploads import Uploads
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import AlreadyExists, Conflict, FailedPrecondition, InvalidArgument, NotFound
from shared.jobs import JobRecord, Jobs
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits

NAME = "datasets/d"
VERSION = f"{NAME}/versions/v1"


@pytest.fixture
def datasets(store: ObjectStore) -> Datasets:
    return Datasets(store)


def create(datasets: Datasets, **fields: Any) -> Dataset:
    wanted = {"display_name": "D", "description": "", "request_id": "", "body_sha256": "", "validate_only": False}
    return datasets.create("d", **{**wanted, **fields})


def delete(datasets: Datasets, etag: str = "") -> list[str]:
    asked: list[str] = []
    datasets.delete(NAME, etag, check_uploads=lambda *_: None, delete_uploads=lambda name, _: asked.append(name))
    return asked


def test_an_update_changes_what_its_mask_names(datasets: Datasets) -> None:
    made = create(datasets)
    retention = Retention(keep_newest=3)
    after = datasets.update(NAME, made.etag, ["retention"], display_name="x", description="y", retention=retention)
    assert (after.display_name, after.description, after.retention) == ("D", "", retention)
    assert after.etag != made.etag
    assert datasets.get(NAME) == after


def test_without_a_mask_all_three_change(datasets: Datasets) -> None:
    create(datasets)
    after = datasets.update(NAME, "", [], display_name="x", description="y", retention=Retention(max_age_s=60))
    assert (after.display_name, after.description, after.retention.max_age_s) == ("x", "y", 60)


def test_an_update_that_changes_nothing_keeps_the_etag(datasets: Datasets) -> None:
    made = create(datasets)
    assert datasets.update(NAME, "", ["display_name"], display_name="D") == made


@pytest.mark.parametrize(
    ("mask", "values", "field"),
    [
        (["name"], {}, "update_mask.paths[0]"),
        (["display_name"], {"display_name": "n" * 64}, "dataset.display_name"),
        (["retention"], {"retention": Retention(keep_newest=-1)}, "dataset.retention.keep_newest"),
    ],
)
def test_a_wrong_update_is_refused_by_field(
    datasets: Datasets, mask: list[str], values: dict[str, Any], field: str
) -> None:
    made = create(datasets)
    with pytest.raises(InvalidArgument) as refused:
        datasets.update(NAME, "", mask, **values)
    assert refused.value.fields[0][0] == field
    assert datasets.get(NAME) == made


def test_another_etag_neither_updates_nor_deletes(datasets: Datasets) -> None:
    made = create(datasets)
    with pytest.raises(Conflict):
        datasets.update(NAME, "9", ["description"], description="y")
    with pytest.raises(Conflict):
        delete(datasets, "9")
    assert datasets.get(NAME) == made


def test_a_deleted_dataset_is_gone_with_its_uploads(datasets: Datasets) -> None:
    made = create(datasets)
    assert delete(datasets, made.etag) == [NAME]
    with pytest.raises(NotFound):
        datasets.get(NAME)
    with pytest.raises(NotFound):
        datasets.update(NAME, "", ["description"], description="y")
    with pytest.raises(NotFound):
        delete(datasets)
    assert datasets.list(0, "") == ([], "")
    assert (last := datasets.newest(NAME))
    assert last.deleted


def test_a_dataset_of_which_an_upload_is_read_stays(store: ObjectStore, datasets: Datasets) -> None:
    """By an import into another dataset."""
    made = create(datasets)
    uploads = Uploads(store, datasets, None)
    upload = uploads.start(NAME, "u", request_id="", body_sha256="")[0].record.name
    mark_used(store, upload, IMPORT_KIND, "reader", "datasets/other/versions/v1")
    with pytest.raises(FailedPrecondition, match="datasets/other/versions/v1"):
        datasets.delete(NAME, "", check_uploads=uploads.check_unused, delete_uploads=uploads.abort_all)
    assert datasets.get(NAME) == made

    unmark(store, upload, IMPORT_KIND, "reader")
    datasets.delete(NAME, "", check_uploads=uploads.check_unused, delete_uploads=uploads.abort_all)
    assert (last := datasets.newest(NAME))
    assert last.deleted
    with pytest.raises(NotFound):
        uploads.get(upload)


def test_an_upload_that_is_read_only_now_goes_later_than_its_dataset(store: ObjectStore, datasets: Datasets) -> None:
    create(datasets)
    uploads = Uploads(store, datasets, None)
    upload = uploads.start(NAME, "u", request_id="", body_sha256="")[0].record.name

    def then_somebody_reads(dataset: str, uid: str) -> None:
        uploads.check_unused(dataset, uid)
        mark_used(store, upload, IMPORT_KIND, "reader", "datasets/other/versions/v1")

    datasets.delete(NAME, "", check_uploads=then_somebody_reads, delete_uploads=uploads.abort_all)
    assert (last := datasets.newest(NAME))
    assert last.deleted
    assert uploads.get(upload).record.name == upload


def test_a_deletion_leaves_the_uploads_of_the_dataset_that_was_made_anew_meanwhile(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last look at the versions takes so long that the client has given it up and begun again."""
    datasets, client = Datasets(store), Datasets(store)
    create(datasets)
    uploads = Uploads(store, client, None)
    polls = []

    def look_and_begin_anew(_: str) -> list[str]:
        polls.append("look")
        if len(polls) == 2:
            create(client)
            name = uploads.start(NAME, "u", request_id="", body_sha256="")[0].record.chunks_prefix
            store.put(f"{name}/{0:020d}", b"acknowledged")
        return []

    monkeypatch.setattr(datasets, "version_names", look_and_begin_anew)
    datasets.delete(NAME, "", check_uploads=uploads.check_unused, delete_uploads=uploads.abort_all)
    assert uploads.get(f"{NAME}/uploads/u").acknowledged_size == len(b"acknowledged")


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "made anew"])
def test_an_upload_started_while_its_dataset_is_deleted_is_refused_and_gone(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    datasets, client = Datasets(store), Datasets(store)
    create(client)
    uploads = Uploads(store, client, None)
    get = client.get

    def get_then_deleted(name: str, field: str = "name") -> Dataset:
        found = get(name, field)
        delete(datasets)
        if anew:
            create(datasets)
        return found

    monkeypatch.setattr(client, "get", get_then_deleted)
    with pytest.raises(NotFound):
        uploads.start(NAME, "u", request_id="", body_sha256="")
    with pytest.raises(NotFound):
        uploads.get(f"{NAME}/uploads/u")


def test_a_deletion_that_was_overtaken_leaves_the_dataset_that_was_made_anew(store: ObjectStore) -> None:
    datasets = Datasets(store)
    create(datasets)

    def make_anew(_name: str, _uid: str) -> None:
        delete(datasets)
        create(datasets)

    with pytest.raises(NotFound):
        datasets.delete(NAME, "", check_uploads=make_anew, delete_uploads=lambda *_: None)
    assert datasets.get(NAME)


def test_an_id_used_again_gets_another_uid(datasets: Datasets) -> None:
    made = create(datasets)
    delete(datasets)
    again = create(datasets, display_name="again")
    assert again.uid != made.uid
    assert datasets.get(NAME) == again
    with pytest.raises(AlreadyExists):
        create(datasets)


def test_a_dataset_with_versions_stays_until_they_are_deleted(store: ObjectStore, datasets: Datasets) -> None:
    made = create(datasets)
    commit_version(store, VERSION, {"train": striped_digits(10)})
    with pytest.raises(FailedPrecondition, match="v1") as refused:
        delete(datasets)
    assert refused.value.specific_reason == "DATASET_HAS_VERSIONS"
    assert datasets.get(NAME) == made
    Deletions(store, Jobs(store, IMPORT_KIND)).delete(VERSION)
    assert delete(datasets) == [NAME]


def test_a_version_made_while_the_dataset_is_deleted_brings_it_back(
    datasets: Datasets, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(datasets)
    polls = iter([[], [VERSION]])
    monkeypatch.setattr(datasets, "version_names", lambda _: next(polls))
    with pytest.raises(FailedPrecondition):
        delete(datasets)
    assert datasets.get(NAME).uid == made.uid


def test_the_maker_of_a_version_in_a_deleted_dataset_gets_an_error(datasets: Datasets) -> None:
    made = create(datasets)
    datasets.check_still_there(NAME, made.uid)
    delete(datasets)
    with pytest.raises(NotFound):
        datasets.check_still_there(NAME, made.uid)
    create(datasets)
    with pytest.raises(NotFound):
        datasets.check_still_there(NAME, made.uid)


def test_a_dataset_of_before_there_was_retention_is_read() -> None:
    state = Dataset(name=NAME, uid="u", display_name="", description="", create_time=1.0).as_state()
    del state["retention"], state["deleted"]
    assert Dataset.from_state(state).retention == Retention()


def test_version_names_are_those_that_exist(store: ObjectStore, datasets: Datasets) -> None:
    create(datasets)
    jobs = Jobs(store, IMPORT_KIND)
    for name in (VERSION, f"{NAME}/versions/v2"):
        jobs.create(name, JobRecord(uid=name[-2:], name=name, spec={}, create_time=0.0, update_time=0.0))
    assert datasets.version_names(NAME) == [VERSION, f"{NAME}/versions/v2"]
