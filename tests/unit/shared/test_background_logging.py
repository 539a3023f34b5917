"""Logging never waits for whoever reads the log, and loses nothing that is read in time."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import grpc
import pytest

from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc
from shared import logging_and_tracing
from shared.logging_and_tracing import BackgroundHandler
from tests.support.ports import free_ports

LINES = 2000


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """Its ends to read and to write."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def _log(handler: logging.Handler, number: int, text: str = "") -> None:
    handler.handle(logging.LogRecord("a.logger", logging.INFO, __file__, 1, "%d%s", (number, text), None))


def test_lines_that_are_read_arrive_whole_and_in_order(
    pipe: tuple[TextIO, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging_and_tracing, "FLUSH_TIMEOUT_S", 240.0)
    reader, writer = pipe
    found: list[str] = []
    reading = threading.Thread(target=lambda: found.extend(reader))
    reading.start()
    handler = BackgroundHandler(writer)

    for number in range(LINES):
        _log(handler, number)
    handler.flush()
    writer.close()
    reading.join()

    assert [line.strip() for line in found] == [str(number) for number in range(LINES)]


def test_lines_that_nobody_reads_make_nobody_wait_and_are_counted_once_they_are_read(
    pipe: tuple[TextIO, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging_and_tracing, "MAX_WAITING_BYTES", 300_000)
    monkeypatch.setattr(logging_and_tracing, "FLUSH_TIMEOUT_S", 0.01)
    reader, writer = pipe
    handler = BackgroundHandler(writer)

    for number in range(LINES):  # some 2 MB: with a handler that waits this would never end
        _log(handler, number, " " + "x" * 1000)
    handler.flush()  # nor does this

    found: list[int] = []
    dropped: list[int] = []
    for line in reader:
        # The writer may take lines again between two stretches of dropped ones, so it may say so twice.
        if match := re.match(r"(\d+) log lines were dropped", line):
            dropped.append(int(match[1]))
        else:
            found.append(int(line.split()[0]))
        if len(found) + sum(dropped) == LINES:
            break
    assert found == sorted(set(found))
    assert found[:200] == list(range(200))
    assert dropped


def test_a_reader_that_is_gone_ends_nobody(pipe: tuple[TextIO, TextIO]) -> None:
    reader, writer = pipe
    handler = BackgroundHandler(writer)
    reader.close()

    _log(handler, 1)
    handler.flush()
    _log(handler, 2)
    handler.flush()


def _run(code: str, *, flush_timeout_s: float = 240.0) -> subprocess.Popen[str]:
    """However long a busy machine takes over reading what it logs, unless another limit is given."""
    begin = "import logging, os, sys\nfrom shared import logging_and_tracing\n"
    begin += "from shared.logging_and_tracing import configure_logging, flush_logs\n"
    configure = f'logging_and_tracing.FLUSH_TIMEOUT_S = {flush_timeout_s}\nconfigure_logging("kit", "INFO")\n'
    configure += 'logger = logging.getLogger("a")\n'
    command = [sys.executable, "-c", begin + configure + code]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(3)", "flush_logs(); os._exit(0)", "raise RuntimeError"],
    ids=["end", "exit", "os._exit", "error"],
)
def test_the_last_log_lines_are_written_however_the_process_ends(ending: str) -> None:
    with _run(f"for number in range({LINES}): logger.info('%d', number)\n{ending}") as process:
        _, text = process.communicate(timeout=240)

    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["message"] for line in lines] == [str(number) for number in range(LINES)]


def test_a_process_whose_log_nobody_reads_ends() -> None:
    logs = f"for number in range({LINES}): logger.info('%d %s', number, 'x' * 1000)\nsys.exit(3)"
    with _run(logs, flush_timeout_s=0.5) as process:
        assert process.wait(240) == 3


def test_a_forked_child_logs_as_well() -> None:
    code = """
logger.info("before")
flush_logs()
child = os.fork()
if not child:
    logger.info("of the child")
    os._exit(0)
os.waitpid(child, 0)
logger.info("of the parent")
"""
    with _run(code) as process:
        _, text = process.communicate(timeout=240)

    assert [json.loads(line)["message"] for line in text.splitlines()] == ["before", "of the child", "of the parent"]


def test_a_server_whose_log_nobody_reads_goes_on_answering(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.kit_server", address, str(tmp_path)], stderr=subprocess.PIPE
    ) as process:
        try:
            with grpc.insecure_channel(address) as channel:
                get = data_service_pb2_grpc.DataServiceStub(channel).GetDataset
                for _ in range(1000):  # of some 200 bytes of log each
                    answer = get(data_service_pb2.GetDatasetRequest(name="n"), timeout=240, wait_for_ready=True)
            assert answer.name == "n"
        finally:
            process.kill()
            process.communicate(timeout=240)
