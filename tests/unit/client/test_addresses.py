"""The one precedence of addresses: argument, environment, running stack, default."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from millrace_client.calls import resolve
from millrace_client.stack.record import Process, Record, write_record


@pytest.fixture
def record() -> Record:
    me = Process.from_pid(os.getpid())
    assert me is not None
    return Record(
        state="ready",
        supervisor=me,
        addresses={"data": "127.0.0.1:7001", "train": "127.0.0.1:7002", "inference": "127.0.0.1:7003"},
        store="file:///nowhere",
        ray_address="127.0.0.1:7000",
        dashboard="",
        import_roots=(),
        ray_folder="",
    )


def test_without_anything_the_default_ports_on_loopback(tmp_path: Path) -> None:
    found = resolve(environ={"MILLRACE_HOME": str(tmp_path)})
    assert (found.data, found.train, found.inference) == ("127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:50053")
    assert set(found.origins.values()) == {"default"}


def test_each_service_takes_the_first_of_argument_environment_and_stack(tmp_path: Path, record: Record) -> None:
    write_record(tmp_path, record)
    environ = {
        "MILLRACE_HOME": str(tmp_path),
        "MILLRACE_DATA_ADDRESS": "data.example:1",
        "MILLRACE_TRAIN_ADDRESS": "train.example:2",
    }
    found = resolve(data="argument.example:9", environ=environ)
    assert (found.data, found.train, found.inference) == ("argument.example:9", "train.example:2", "127.0.0.1:7003")
    assert dict(found.origins) == {"data": "argument", "train": "environment", "inference": "stack"}


def test_a_stack_whose_supervisor_is_dead_names_nothing(tmp_path: Path, record: Record) -> None:
    later = replace(record, supervisor=Process(record.supervisor.pid, record.supervisor.start_ticks + 1))
    write_record(tmp_path, later)
    assert resolve(environ={"MILLRACE_HOME": str(tmp_path)}).origins["data"] == "default"


def test_the_home_is_dot_millrace_in_the_working_directory(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".millrace").mkdir()
    write_record(tmp_path / ".millrace", record)
    monkeypatch.chdir(tmp_path)
    assert resolve(environ={}).origins["data"] == "stack"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "ready"}'])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    assert resolve(environ={"MILLRACE_HOME": str(tmp_path)}).origins["data"] == "default"
