"""A dataset's retention comes back as it was set."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from data_service.convert import dataset_message, retention_from
from data_service.domain.dataset import MAX_AGE_S, Dataset, check_retention
from millrace.data.v1 import resources_pb2
from shared.errors import InvalidArgument


@pytest.mark.parametrize(
    "age",
    [
        Duration(nanos=999_999_600),
        Duration(nanos=999_999_999),
        Duration(nanos=1),
        Duration(seconds=86_400, nanos=123_456_789),
        Duration(seconds=31_536_000, nanos=100_000_000),
        Duration(seconds=MAX_AGE_S),
    ],
    ids=str,
)
def test_an_age_comes_back_to_the_nanosecond(age: Duration) -> None:
    asked = resources_pb2.Retention(max_age=age)
    kept = Dataset(name="datasets/d", uid="u", display_name="", description="", create_time=1.0)
    retention = retention_from(asked)
    check_retention(retention)
    message = dataset_message(Dataset(**{**kept.__dict__, "retention": retention}))
    assert message.retention == asked
    assert 0 <= message.retention.max_age.nanos < 10**9


@pytest.mark.parametrize("seconds", [-1, MAX_AGE_S + 1, 2**63 - 1])
def test_an_age_that_is_no_duration_is_refused(seconds: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_retention(retention_from(resources_pb2.Retention(max_age=Duration(seconds=seconds))))
    assert [field for field, _ in refused.value.fields] == ["retention.max_age"]
