"""A store that is away is waited for, and everybody can see that somebody waits."""

from __future__ import annotations

import pytest

from shared.errors import DataLoss, Unavailable
from train_service import patience
from train_service.patience import in_store_calls, patient


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "AGAIN_AFTER_S", 0.0)


def test_a_call_is_repeated_until_the_store_answers() -> None:
    tries = 0

    def call() -> str:
        nonlocal tries
        tries += 1
        assert in_store_calls()
        if tries < 4:
            raise Unavailable("no store")
        return "rows"

    assert patient(call, "a row group") == "rows"
    assert tries == 4
    assert not in_store_calls()


def test_patience_ends_and_other_errors_are_raised_at_once() -> None:
    def away() -> None:
        raise Unavailable("no store")

    def damaged() -> None:
        raise DataLoss("flipped")

    with pytest.raises(Unavailable):
        patient(away, "a row group", patience_s=0.01)
    with pytest.raises(DataLoss):
        patient(damaged, "a row group")
    assert not in_store_calls()
