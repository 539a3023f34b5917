"""A store that is full or silent when the service starts is an outage; one that cannot be used is refused."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from inference_service import frontend_tasks
from inference_service.frontend_tasks import StoreCheck
from shared.errors import MillraceError, ResourceExhausted, Unavailable
from shared.settings import StoreSettings
from shared.storage import ObjectStore
from shared.storage import probe as checked
from shared.storage.object_store import StoreRefused


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(url=tmp_path.as_uri())


def test_a_store_that_answers_is_checked_once(settings: StoreSettings) -> None:
    check = StoreCheck(settings)

    check.begin()

    assert check.passed


@pytest.mark.parametrize(
    "outage", [ResourceExhausted("the store is full", reason="STORE_FULL"), Unavailable("the store does not answer")]
)
def test_an_outage_does_not_keep_the_service_from_starting_and_the_check_goes_on(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outage: MillraceError
) -> None:
    monkeypatch.setattr(frontend_tasks, "FIRST_PAUSE_S", 0.001)
    asked = 0

    def probe(store: ObjectStore) -> None:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise outage
        checked(store)

    monkeypatch.setattr(frontend_tasks, "probe", probe)
    check = StoreCheck(settings)

    check.begin()
    passed = [check.passed]
    asyncio.run(asyncio.wait_for(check.finish(), 60))
    passed.append(check.passed)

    assert passed == [False, True]
    assert asked == 4
    assert outage.message in caplog.text


def test_a_store_that_says_nothing_is_not_waited_for(settings: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(frontend_tasks, "probe", lambda _: answers.wait())
    monkeypatch.setattr(frontend_tasks, "CHECKED_TIMEOUT_S", 0.01)
    check = StoreCheck(settings)

    check.begin()
    answers.set()

    assert not check.passed


def test_a_store_that_cannot_be_used_is_refused_at_once_and_later(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise StoreRefused("it does not honour put-if-absent")

    monkeypatch.setattr(frontend_tasks, "probe", refuse)
    monkeypatch.setattr(frontend_tasks, "FIRST_PAUSE_S", 0.001)

    with pytest.raises(StoreRefused):
        StoreCheck(settings).begin()
    with pytest.raises(StoreRefused):
        asyncio.run(asyncio.wait_for(StoreCheck(settings).finish(), 60))
