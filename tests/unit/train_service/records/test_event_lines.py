"""Events as lines for people."""

from __future__ import annotations

from train_service.records.event_log import Event, EventKind, line_of


def validated(**payload: object) -> str:
    return line_of(Event(1, 0.0, 1, EventKind.VALIDATED, {"step": 5, "epoch": 1, "row_count": 8, **payload}))


def test_a_validation_is_reported_with_what_was_measured() -> None:
    assert validated(loss=0.5, accuracy=0.25, metrics={"f1": 0.125}) == (
        "validated after epoch 2: loss 0.5000  accuracy 0.2500  f1 0.1250"
    )


def test_of_numbers_no_accuracy_is_reported() -> None:
    assert validated(loss=0.5, metrics={"mae": 1.5}) == "validated after epoch 2: loss 0.5000  mae 1.5000"
