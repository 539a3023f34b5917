"""Each check is the message that its name says, and every check of the contract has a function."""

from __future__ import annotations

import pytest

from millrace.data.v1 import quality_pb2
from millrace_client import checks

FAIL, QUARANTINE = quality_pb2.QualityCheck.ACTION_FAIL, quality_pb2.QualityCheck.ACTION_QUARANTINE

ALL = {
    "not_null": checks.not_null("c"),
    "unique": checks.unique("c"),
    "range": checks.in_range("c", least=1),
    "one_of": checks.one_of("c", ["a", 2, True]),
    "pattern": checks.matches("c", "x+"),
    "row_count": checks.row_count(split="train", least=5),
    "class_balance": checks.class_balance("c", min_share=0.1),
    "drift": checks.drift("c", 0.2),
}


def test_every_check_of_the_contract_has_a_function() -> None:
    oneof = quality_pb2.QualityCheck.DESCRIPTOR.oneofs_by_name["check"]
    assert {field.name for field in oneof.fields} == set(ALL)
    assert {name: check.WhichOneof("check") for name, check in ALL.items()} == {name: name for name in ALL}


def test_a_range_has_only_the_ends_that_were_given() -> None:
    check = ALL["range"].range
    assert (check.HasField("min"), check.HasField("max")) == (True, False)


def test_values_keep_their_kinds() -> None:
    assert [value.WhichOneof("kind") for value in ALL["one_of"].one_of.values] == ["text", "integer", "boolean"]


@pytest.mark.parametrize(("quarantine", "action"), [(False, FAIL), (True, QUARANTINE)])
def test_a_row_that_does_not_pass_fails_or_is_kept_aside(quarantine: bool, action: int) -> None:
    made = [
        checks.not_null("c", quarantine=quarantine),
        checks.unique("c", quarantine=quarantine),
        checks.in_range("c", most=2, quarantine=quarantine),
        checks.one_of("c", [1], quarantine=quarantine),
        checks.matches("c", "x", quarantine=quarantine),
    ]
    assert {check.action for check in made} == {action}
