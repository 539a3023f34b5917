"""Errors travel: through a resource log as JSON, and through Ray by pickle."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import (
    KINDS,
    MAX_REPORTED_FIELDS,
    Internal,
    MillraceError,
    NotFound,
    already_exists,
    error_from_record,
    invalid_field,
    invalid_fields,
    not_found,
    shown,
)

TEXT = st.text(max_size=20)


def same(one: MillraceError, other: MillraceError) -> bool:
    return type(one) is type(other) and one.as_record() == other.as_record() and str(one) == str(other)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    message=TEXT,
    reason=st.none() | st.just("SOME_REASON"),
    metadata=st.dictionaries(TEXT, TEXT, max_size=3),
    fields=st.lists(st.tuples(TEXT, TEXT), max_size=3),
    retry_after_s=st.none() | st.floats(0, 1e6),
)
def test_an_error_survives_the_log_and_pickle(
    kind: str,
    message: str,
    reason: str | None,
    metadata: dict[str, str],
    fields: list[tuple[str, str]],
    retry_after_s: float | None,
) -> None:
    error = KINDS[kind](message, reason=reason, metadata=metadata, fields=fields, retry_after_s=retry_after_s)

    assert same(error_from_record(json.loads(json.dumps(error.as_record()))), error)
    assert same(pickle.loads(pickle.dumps(error)), error)
    assert error.fields == fields


def test_without_a_reason_of_its_own_an_error_has_that_of_its_kind() -> None:
    assert NotFound("gone").specific_reason == "NOT_FOUND"
    assert len({kind.reason for kind in KINDS.values()}) == len(KINDS)


def test_a_kind_of_another_release_is_read_as_internal() -> None:
    record = {**NotFound("gone", metadata={"resource": "x"}).as_record(), "kind": "FromTheFuture"}

    error = error_from_record(record)

    assert (type(error), error.message, error.metadata) == (Internal, "gone", {"resource": "x"})


def test_refused_fields_say_the_value_and_the_remedy() -> None:
    error = invalid_fields([("spec.epochs", 0, "use 1 to 10000"), ("name", "", "name it")])

    assert error.fields == [("spec.epochs", "0: use 1 to 10000"), ("name", "'': name it")]
    assert error.message == "spec.epochs: 0: use 1 to 10000; name: '': name it"
    assert (error.specific_reason, error.metadata) == ("INVALID_FIELD", {"field": "spec.epochs"})


@given(st.text() | st.binary() | st.lists(st.integers()))
def test_shown_values_are_short_and_without_line_breaks(value: object) -> None:
    assert len(shown(value)) <= 201
    assert "\n" not in shown(value)


def test_resources_are_named_in_message_and_metadata() -> None:
    for error in (not_found("datasets/d"), already_exists("datasets/d")):
        assert "datasets/d" in error.message
        assert error.metadata == {"resource": "datasets/d"}
    assert not_found("datasets/d", "list them").message == "datasets/d does not exist; list them"


@pytest.mark.parametrize("value", ["x" * 10**6, b"\x00" * 10**6], ids=["text", "bytes"])
def test_a_megabyte_is_not_repeated(value: object) -> None:
    assert len(str(invalid_field("f", value, "use less"))) < 300


def test_of_very_many_refused_fields_the_first_are_reported_and_how_many_there_are() -> None:
    error = invalid_fields((f"names[{place}]", "", "name it") for place in range(200_000))

    assert [field for field, _ in error.fields] == [f"names[{place}]" for place in range(MAX_REPORTED_FIELDS)]
    assert error.message.startswith(
        f"200000 fields are wrong, the first {MAX_REPORTED_FIELDS} are names[0]: '': name it; "
    )
    assert len(error.message) < 10_000
