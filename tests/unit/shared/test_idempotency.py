"""`request_id`: whoever repeats a call gets the first answer, also when the first call failed half-way."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.data.v1 import data_service_pb2
from shared.errors import AlreadyExists, MillraceError, NotFound, Unavailable, already_exists
from shared.resource_log import body_digest, claimed, claimed_before
from shared.storage import ObjectExists, ObjectStore

ID = str(uuid.uuid4())


def request(request_id: str = "", display_name: str = "") -> data_service_pb2.CreateDatasetRequest:
    return data_service_pb2.CreateDatasetRequest(dataset_id="d", request_id=request_id, display_name=display_name)


def test_the_digest_is_of_the_body_and_not_of_the_request_id() -> None:
    assert body_digest(request(request_id=ID)) == body_digest(request(request_id=str(uuid.uuid4())))
    assert body_digest(request(request_id=ID)) == body_digest(request())
    assert body_digest(request()) != body_digest(request(display_name="other"))
    assert len(body_digest(request())) == 64


def test_taking_the_digest_leaves_the_request_as_it_was() -> None:
    given = request(request_id=ID)
    body_digest(given)

    assert given.request_id == ID


def test_a_repeated_call_learns_what_the_first_one_named(store: ObjectStore) -> None:
    with claimed(store, "data", ID, "body", "datasets/first") as first:
        assert (first.name, first.repeated) == ("datasets/first", False)
    with claimed(store, "data", ID, "body", "datasets/second") as second:
        assert (second.name, second.repeated) == ("datasets/first", True)


def test_the_claim_of_a_later_turn_names_another_and_the_first_one_stays(store: ObjectStore) -> None:
    for turn, name in ((1, "datasets/first"), (2, "datasets/second")):
        with claimed(store, "data", ID, "body", name, turn) as claim:
            assert not claim.repeated
    named = [claimed_before(store, "data", ID, "body", turn) for turn in (1, 2, 3)]
    assert named == ["datasets/first", "datasets/second", None]
    with pytest.raises(AlreadyExists):
        claimed_before(store, "data", ID, "other", 2)


def test_the_same_id_with_another_body_is_refused_with_its_first_use(store: ObjectStore) -> None:
    with claimed(store, "data", ID, "body", "datasets/first"):
        pass

    with pytest.raises(AlreadyExists, match="datasets/first") as refused, claimed(store, "data", ID, "other", "x"):
        raise AssertionError("must not run")

    assert refused.value.specific_reason == "REQUEST_ID_REUSED"
    assert refused.value.fields[0][0] == "request_id"
    with claimed(store, "data", ID, "body", "y") as still:  # the refusal did not free it
        assert still.repeated


def test_services_do_not_share_request_ids(store: ObjectStore) -> None:
    with claimed(store, "data", ID, "body", "a"):
        pass
    with claimed(store, "train", ID, "other", "b") as claim:
        assert not claim.repeated


def test_without_a_request_id_nothing_is_claimed(store: ObjectStore) -> None:
    for _ in range(2):
        with claimed(store, "data", "", "body", "a") as claim:
            assert not claim.repeated
    assert list(store.list()) == []


def test_a_refused_creation_frees_the_id_and_leaves_nothing(store: ObjectStore) -> None:
    with pytest.raises(NotFound), claimed(store, "data", ID, "body", "a"):
        raise NotFound("the dataset is not there")

    assert list(store.list()) == []
    with claimed(store, "data", ID, "another body", "b") as claim:
        assert not claim.repeated


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("odd"), KeyboardInterrupt()], ids=repr)
def test_a_creation_of_unknown_outcome_keeps_the_id(store: ObjectStore, error: BaseException) -> None:
    # It may have been made: a repeated call must find it by its name, and not be told that the name is taken.
    with pytest.raises(type(error)), claimed(store, "data", ID, "body", "datasets/v1"):
        raise error

    with claimed(store, "data", ID, "body", "datasets/v2") as again:
        assert (again.name, again.repeated) == ("datasets/v1", True)


def test_a_refused_repetition_does_not_free_the_first_calls_claim(store: ObjectStore) -> None:
    with claimed(store, "data", ID, "body", "a"):
        pass
    with pytest.raises(NotFound), claimed(store, "data", ID, "body", "a"):
        raise NotFound("deleted in between")

    with claimed(store, "data", ID, "body", "b") as claim:
        assert claim.name == "a"


def create(store: ObjectStore, name: str) -> str:
    """As a service does: the thing itself is made by put-if-absent, and knows its request."""
    with claimed(store, "data", ID, "body", name) as claim:
        try:
            store.put_if_absent(claim.name, ID.encode())
        except ObjectExists:
            if store.get(claim.name) != ID.encode():
                raise already_exists(claim.name) from None
        return claim.name


def test_duplicates_at_the_same_time_make_one_thing_and_all_learn_its_name(store: ObjectStore) -> None:
    barrier = threading.Barrier(8)

    def one(number: int) -> str:
        barrier.wait()
        return create(store, f"things/{number}")

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(one, range(8)))

    assert len(answers) == 1
    assert [info.key for info in store.list("things")] == list(answers)


class Released(ObjectStore):
    """A real store in which the claim that was met is gone when it is read: its owner was refused in between."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.once = True

    def get(self, key: str) -> bytes:
        if self.once:
            self.once = False
            self.delete(key)
        return super().get(key)


def test_a_claim_that_is_freed_while_it_is_read_is_claimed_anew(store: ObjectStore) -> None:
    with claimed(store, "data", ID, "other body", "a"):
        pass

    with claimed(Released(store), "data", ID, "body", "b") as claim:
        assert (claim.name, claim.repeated) == ("b", False)


def test_refusals_are_millrace_errors() -> None:
    assert issubclass(AlreadyExists, MillraceError)
