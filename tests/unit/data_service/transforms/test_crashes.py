"""When a worker dies, the part that it was on is known, and whose fault it is."""

from __future__ import annotations

import pytest

from data_service.parallel import Begun, crash_error
from data_service.transforms.passes import PartitionRange
from shared.dataset_version import RowGroup
from shared.errors import FailedPrecondition, Unavailable
from shared.storage import ObjectStore

PARTS = {number: PartitionRange(number, "train", (RowGroup(0, number, 100 * number, 100),)) for number in range(4)}


def test_only_parts_whose_worker_died_are_left_marked(store: ObjectStore) -> None:
    begun = Begun("datasets/d/begun")
    with begun.working_on(store, PARTS[0]):
        assert dict(begun.tries(store)) == {0: 1}
    with pytest.raises(RuntimeError), begun.working_on(store, PARTS[1]):
        raise RuntimeError
    assert dict(begun.tries(store)) == {}


def test_a_part_that_was_begun_twice_is_to_blame(store: ObjectStore) -> None:
    begun = Begun("datasets/d/begun")
    dying = [begun.working_on(store, PARTS[number]) for number in (2, 3, 2)]
    for one in dying:
        one.__enter__()
    error = crash_error(begun.tries(store), PARTS, foreign_code=True)
    assert isinstance(error, FailedPrecondition)
    assert "on rows 200 to 299 of split 'train'" in error.message
    begun.forget(store)
    assert dict(begun.tries(store)) == {}


def test_without_foreign_code_the_cluster_is_to_blame_and_another_attempt_may_do() -> None:
    error = crash_error({1: 2}, PARTS, foreign_code=False)
    assert isinstance(error, Unavailable)
    assert error.metadata["parts"] == "rows 100 to 199 of split 'train'"
