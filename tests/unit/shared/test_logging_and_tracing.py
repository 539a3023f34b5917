"""Log lines: one JSON object each, with the identity of the context that wrote it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import pytest

from shared.logging_and_tracing import JsonFormatter, hidden, identify, identity, log_outcome


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


def test_identify_adds_fields_to_later_lines_until_the_identity_ends() -> None:
    with identity(request_id="r1"):
        identify(model="digits", model_version="3")
        line = written()
        assert (line["request_id"], line["model"], line["model_version"]) == ("r1", "digits", "3")
    assert not {"request_id", "model", "model_version"} & written().keys()


def test_an_outcome_has_fields_to_filter_by(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a.logger")
    with caplog.at_level(logging.INFO), identity(request_id="r1"):
        log_outcome(logger, "/a.Service/Do", "NOT_FOUND", 0.0123456, "no such thing", id="a")
        (line,) = (json.loads(JsonFormatter("data").format(record)) for record in caplog.records)
    assert line["message"] == "/a.Service/Do NOT_FOUND 12.3 ms: no such thing"
    assert (line["status"], line["duration_ms"], line["id"], line["request_id"]) == ("NOT_FOUND", 12.346, "a", "r1")


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


def test_the_correlation_id_that_a_caller_receives_finds_the_line(caplog: pytest.LogCaptureFixture) -> None:
    reported = hidden(KeyError("odd"), logging.getLogger("a.logger"), "a batch failed")
    (record,) = caplog.records
    line = json.loads(JsonFormatter("data").format(record))
    assert line["correlation_id"] == reported.metadata["correlation_id"]
    assert "KeyError: 'odd'" in line["exception"]


def test_an_exception_is_on_the_same_line() -> None:
    try:
        raise ValueError("odd")
    except ValueError as error:
        line = written(exc_info=(ValueError, error, error.__traceback__))

    assert "ValueError: odd" in str(line["exception"])
