"""Log lines: one JSON object each, with the identity of the context that wrote it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import pytest

from shared.telemetry import JsonFormatter, identity


def written(message: str = "hello", *arguments: object, **values: object) -> dict[str, object]:
    record = logging.LogRecord("a.logger", logging.WARNING, __file__, 1, message, arguments, None)
    record.__dict__.update(values)
    line = JsonFormatter("data").format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    return found


def test_a_line_says_when_who_and_what() -> None:
    line = written("%d rows", 3)

    assert (line["level"], line["service"], line["logger"], line["message"]) == (
        "WARNING",
        "data",
        "a.logger",
        "3 rows",
    )
    assert str(line["time"]).endswith("+00:00")


def test_hostile_text_stays_in_its_place() -> None:
    line = written('x"}\n{"level": "FORGED"')

    assert line["message"] == 'x"}\n{"level": "FORGED"'
    assert line["level"] == "WARNING"


def test_identity_nests_and_ends() -> None:
    with identity(request_id="r1", job="j1"):
        with identity(job="j2"):
            assert (written()["request_id"], written()["job"]) == ("r1", "j2")
        assert written()["job"] == "j1"
    assert "job" not in written()


def test_identity_ends_with_an_exception_too() -> None:
    with pytest.raises(KeyError), identity(job="j1"):
        raise KeyError
    assert "job" not in written()


def test_each_task_and_thread_has_its_own_identity() -> None:
    async def one(job: str) -> object:
        with identity(job=job):
            await asyncio.sleep(0.001)
            return (await asyncio.to_thread(written))["job"]

    async def all_of_them() -> list[object]:
        return list(await asyncio.gather(*(one(f"j{number}") for number in range(20))))

    assert asyncio.run(all_of_them()) == [f"j{number}" for number in range(20)]
    with identity(job="outer"):
        seen: list[dict[str, object]] = []
        thread = threading.Thread(target=lambda: seen.append(written()))
        thread.start()
        thread.join()
    assert "job" not in seen[0]


def test_an_exception_is_on_the_same_line() -> None:
    try:
        raise ValueError("odd")
    except ValueError as error:
        line = written(exc_info=(ValueError, error, error.__traceback__))

    assert "ValueError: odd" in str(line["exception"])
