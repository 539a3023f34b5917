"""Deployments in a real store, in a directory of the test's own."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from inference_service.deploy.deployments import Cluster, DeploymentManager, DeploymentOperations, Deployments
from inference_service.domain.deployment import (
    Deployment,
    State,
    with_failure,
    with_removal,
)
from shared.checkpoint import CheckpointRegistry, Ranking
from shared.checkpoint import references as checkpoint_references
from shared.checkpoint.references import references_of_job
from shared.dataset_version.version import live_references
from shared.errors import AlreadyExists, DataLoss, NotFound, Unavailable
from shared.storage import ObjectStore, open_store
from tests.support.versions import commit_version, striped_digits
from tests.unit.inference_service.wishes import JOB, creation

VERSION = "datasets/digits/versions/v1"


def loaded(manager: DeploymentManager) -> Deployment:
    """READY, as a replica has loaded it."""
    made = manager.create(creation())
    versions = tuple(replace(version, dataset_version=VERSION) for version in made.versions)
    return replace(made, state=State.READY, versions=versions)


def remove(deployments: Deployments, deployment: Deployment) -> None:
    deployments.delete(deployment.name, "", 2.0)
    deployments.transition(deployment.name, deployment.uid, lambda before: with_removal(before, 3.0))


def test_the_best_checkpoint_of_the_job_is_written_down(manager: DeploymentManager) -> None:
    (version,) = manager.create(creation()).versions
    assert (version.checkpoint, version.checkpoint_sha256) == (f"{JOB}/checkpoints/c1", "1" * 64)


def test_checking_only_writes_nothing(manager: DeploymentManager, store: ObjectStore) -> None:
    before = {info.key for info in store.list()}
    manager.create(creation(validate_only=True, request_id=str(uuid.uuid4())))
    assert {info.key for info in store.list()} == before


def test_a_refused_creation_writes_nothing(manager: DeploymentManager, store: ObjectStore) -> None:
    before = {info.key for info in store.list()}
    spec = replace(creation().spec, checkpoint="trainingJobs/nobody")
    with pytest.raises(NotFound):
        manager.create(creation(spec=spec, request_id=str(uuid.uuid4())))
    assert {info.key for info in store.list()} == before


def test_of_creations_at_the_same_time_one_wins(manager: DeploymentManager, deployments: Deployments) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def create() -> None:
        barrier.wait()
        try:
            outcomes.append(manager.create(creation()).uid)
        except AlreadyExists:
            outcomes.append("")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [uid for uid in outcomes if uid] == [deployments.get("deployments/digits").uid]


def test_a_repeated_request_does_not_make_anew_what_was_deleted_since(
    manager: DeploymentManager, deployments: Deployments
) -> None:
    """Also where another deployment has the name by now."""
    request_id = str(uuid.uuid4())
    first = manager.create(creation(request_id=request_id))
    assert manager.create(creation(request_id=request_id)) == first
    deployments.delete(first.name, "", 2.0)
    assert manager.create(creation(request_id=request_id)).uid == first.uid
    deployments.transition(first.name, first.uid, lambda before: with_removal(before, 3.0))
    with pytest.raises(NotFound, match="deleted since"):
        manager.create(creation(request_id=request_id))
    assert not deployments.exists(first.name)
    anothers = manager.create(creation())
    with pytest.raises(NotFound, match="deleted since"):
        manager.create(creation(request_id=request_id))
    assert deployments.get(first.name) == anothers


def test_a_call_overtaken_by_its_own_second_try_makes_nothing_anew_where_that_was_deleted(
    manager: DeploymentManager, deployments: Deployments, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = str(uuid.uuid4())
    exists = deployments.exists

    def overtaken(name: str) -> bool:
        found = exists(name)
        remove(deployments, manager.create(creation(request_id=request_id)))
        return found

    monkeypatch.setattr(deployments, "exists", overtaken)
    with pytest.raises(NotFound, match="deleted since"):
        manager.create(creation(request_id=request_id))
    monkeypatch.undo()
    with pytest.raises(NotFound, match="deleted since"):
        manager.create(creation(request_id=request_id))
    assert not deployments.exists("deployments/digits")
    assert len(checkpoint_references.markers(store, f"{JOB}/checkpoints/c1")) == 1  # of the one that was


def test_a_request_whose_first_call_died_half_way_is_done_by_the_second(
    manager: DeploymentManager, store: ObjectStore
) -> None:
    request_id = str(uuid.uuid4())
    first = manager.create(creation(request_id=request_id))
    store.delete_folder(f"{first.name}/log")  # as if it had died before the log was written
    again = manager.create(creation(request_id=request_id))
    assert again.name == first.name
    assert again.uid != first.uid


def test_an_id_is_free_again_once_its_deployment_is_gone(manager: DeploymentManager, deployments: Deployments) -> None:
    first = manager.create(creation())
    with pytest.raises(AlreadyExists):
        manager.create(creation())
    remove(deployments, first)
    assert deployments.all() == ([], {})
    assert manager.create(creation()).uid != first.uid


def test_a_transition_meant_for_an_earlier_namesake_changes_nothing(
    manager: DeploymentManager, deployments: Deployments
) -> None:
    first = manager.create(creation())
    remove(deployments, first)
    second = manager.create(creation())
    late = deployments.transition(first.name, first.uid, lambda before: with_failure(before, DataLoss("x"), 9.0))
    assert late is None
    assert deployments.get(second.name) == second


def test_pages_come_in_the_order_of_names(manager: DeploymentManager) -> None:
    for deployment_id in ("c", "a", "b"):
        manager.create(creation(deployment_id))
    first, token = manager.page(2, "")
    rest, end = manager.page(2, token)
    assert [one.model_name for one in (*first, *rest)] == ["a", "b", "c"]
    assert end == ""


def test_an_operation_follows_its_deployment(
    manager: DeploymentManager, deployments: Deployments, operations: DeploymentOperations
) -> None:
    deployment = manager.create(creation())
    assert operations.ids_after("", 10) == [deployment.operation.removeprefix("operations/")]
    assert not operations.get(deployment.operation).done
    deployments.transition(
        deployment.name, deployment.uid, lambda before: with_failure(before, DataLoss("a file is damaged"), 2.0)
    )
    failed = operations.get(deployment.operation)
    assert failed.done
    assert failed.error.message == "a file is damaged"


def test_cancelling_the_operation_of_a_loading_deployment_deletes_it(
    manager: DeploymentManager, deployments: Deployments, operations: DeploymentOperations
) -> None:
    deployment = manager.create(creation())
    operations.cancel(deployment.operation)
    assert deployments.get(deployment.name).state is State.DELETING
    assert operations.get(deployment.operation).error.message.endswith("deleted before it was ready")
    with pytest.raises(NotFound):
        operations.cancel("operations/import-1")


def test_a_deployments_dataset_version_is_kept_until_it_is_released(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    commit_version(store, VERSION, {"train": striped_digits(5)})
    ready = loaded(manager)

    deployments.mark_datasets(ready, ready.versions)
    deployments.mark_datasets(ready, ready.versions)  # as every start of the service does
    assert live_references(store, VERSION, time.time() + 10**9) == [ready.name]

    deployments.release(ready, ready.versions)
    deployments.release(ready, ready.versions)
    assert live_references(store, VERSION, time.time()) == []


def test_a_dataset_version_that_is_gone_keeps_no_deployment_from_being_served(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    ready = loaded(manager)
    deployments.mark_datasets(ready, ready.versions)

    assert list(store.list("datasets")) == []


LONG_AFTER = 1e12


def test_a_deployment_keeps_its_checkpoint_from_the_first_moment_until_it_is_released(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())
    assert references_of_job(store, JOB, LONG_AFTER) == {f"{JOB}/checkpoints/c1": [made.name]}
    (served, _) = CheckpointRegistry(store, JOB).entries()
    assert CheckpointRegistry(store, JOB).retire([served]) == []

    deployments.keep_checkpoints(made, made.versions)  # as every start of the service does
    deployments.release(made, made.versions)
    deployments.release(made, made.versions)

    assert references_of_job(store, JOB, LONG_AFTER) == {}
    assert CheckpointRegistry(store, JOB).retire([served]) == [served]


def test_a_deployment_that_is_gone_uses_nothing_even_if_it_was_never_released(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    made = manager.create(creation())
    deployments.delete(made.name, "", 2.0)
    assert references_of_job(store, JOB, LONG_AFTER)  # what is in flight is still answered
    deployments.transition(made.name, made.uid, lambda before: with_removal(before, 3.0))
    assert references_of_job(store, JOB, 0.0) == {}


def test_a_refused_or_repeated_creation_and_a_mere_check_leave_no_mark(
    store: ObjectStore, deployments: Deployments, manager: DeploymentManager
) -> None:
    request_id = str(uuid.uuid4())
    made = manager.create(creation(request_id=request_id))
    manager.create(creation(request_id=request_id))
    with pytest.raises(AlreadyExists):
        manager.create(creation())
    manager.create(creation("other", validate_only=True))

    assert len(checkpoint_references.markers(store, f"{JOB}/checkpoints/c1")) == 1
    deployments.release(made, made.versions)
    assert references_of_job(store, JOB, 0.0) == {}


def test_racing_creations_of_one_id_leave_the_mark_of_the_one_that_won(store: ObjectStore) -> None:
    made: list[Deployment] = []

    def create() -> None:
        own = open_store(store.settings)
        deployments = Deployments(own)
        with contextlib.suppress(AlreadyExists):
            manager = DeploymentManager(own, deployments, DeploymentOperations(own, deployments), Cluster(None))
            made.append(manager.create(creation()))

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = made
    assert [one.uid for one in checkpoint_references.markers(store, f"{JOB}/checkpoints/c1")] == [winner.uid]


def test_a_service_that_dies_before_the_deployment_is_made_keeps_the_checkpoint_for_a_while_only(
    store: ObjectStore, manager: DeploymentManager, deployments: Deployments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Deployment:
        raise KeyboardInterrupt

    monkeypatch.setattr(deployments, "create", dies)
    with pytest.raises(KeyboardInterrupt):
        manager.create(creation())

    assert references_of_job(store, JOB, time.time()) == {f"{JOB}/checkpoints/c1": ["deployments/digits"]}
    assert references_of_job(store, JOB, time.time() + 3600) == {}


def test_the_best_is_that_of_the_jobs_own_metric(store: ObjectStore, manager: DeploymentManager) -> None:
    CheckpointRegistry(store, JOB).fence(2, Ranking("validation_accuracy", maximize=False))

    assert manager.create(creation()).versions[0].checkpoint == f"{JOB}/checkpoints/c2"


def damage(store: ObjectStore, deployment: Deployment, data: bytes = b"{") -> None:
    """Its newest record is these bytes now."""
    store.put(max(info.key for info in store.list(f"{deployment.name}/log")), data)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b'{"number": 1}'])
def test_a_log_that_cannot_be_read_is_data_loss_and_hides_no_other(
    store: ObjectStore, manager: DeploymentManager, deployments: Deployments, data: bytes
) -> None:
    good, bad = manager.create(creation("a")), manager.create(creation("b"))
    damage(store, bad, data)

    found, unreadable = deployments.all()

    assert (found, [*unreadable]) == ([good], [bad.name])
    assert manager.page(10, "") == ([good], "")
    calls: list[Callable[[], object]] = [
        lambda: manager.get(bad.name),
        lambda: manager.follow(bad.name).read(),
        lambda: manager.delete(bad.name, ""),
        lambda: manager.create(creation("b")),
        lambda: deployments.transition(bad.name, bad.uid, lambda _: None),
        lambda: deployments.history(bad.name, bad.uid),
    ]
    for refused in calls:
        with pytest.raises(DataLoss, match=f"the log of {bad.name} cannot be read") as lost:
            refused()
        assert lost.value.metadata == {"resource": bad.name}


def test_unknown_fields_of_a_deployment_are_ignored_and_written_back(
    store: ObjectStore, manager: DeploymentManager
) -> None:
    made = manager.create(creation())
    key = max(info.key for info in store.list(f"{made.name}/log"))
    record = json.loads(store.get(key))
    for place in (record["state"], record["state"]["spec"], record["state"]["versions"][0]):
        place["colour"] = "red"
    store.put(key, json.dumps(record).encode())

    assert manager.get(made.name).etag == made.etag
    manager.delete(made.name, "")

    written = json.loads(store.get(max(info.key for info in store.list(f"{made.name}/log"))))["state"]
    assert written["state"] == "DELETING"
    assert [place["colour"] for place in (written, written["spec"], written["versions"][0])] == ["red"] * 3


def test_a_store_that_does_not_answer_is_no_log_that_cannot_be_read(
    store: ObjectStore, manager: DeploymentManager, deployments: Deployments, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.create(creation())

    def out(_: str) -> bytes:
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(store, "get", out)
    with pytest.raises(Unavailable):
        deployments.all()
    with pytest.raises(Unavailable):
        manager.page(10, "")
