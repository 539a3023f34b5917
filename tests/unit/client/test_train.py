"""Watching a job across broken streams, on a real server."""

from __future__ import annotations

import time
from typing import Any

import pytest

from millrace.train.v1 import code_bundle_pb2, resources_pb2, train_service_pb2_grpc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client import connect, errors
from millrace_client.calls import Caller
from millrace_client.train import IMPORTED_TIMEOUT_S
from tests.support import recorded_servicer
from tests.support.fake_servicers import BreakingStreams, UnknownJob
from tests.support.grpc_answers import serving
from tests.support.recorded_servicer import RecordedRun

Job = resources_pb2.TrainingJob


def register(servicer: Any) -> Any:
    return lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)


def test_a_watch_goes_on_after_the_last_event_seen_and_repeats_none() -> None:
    servicer = BreakingStreams(events=7, per_stream=3, final=Job.STATE_SUCCEEDED)
    with serving(register(servicer)) as address, connect(train=address) as millrace:
        updates = list(millrace.train.watch_training_job("trainingJobs/j"))
    assert [one.sequence for one in updates if isinstance(one, pb.TrainingEvent)] == [1, 2, 3, 4, 5, 6, 7]
    assert servicer.asked_after == [0, 3, 6]
    assert isinstance(updates[-1], Job)
    assert updates[-1].state == Job.STATE_SUCCEEDED


def test_a_watch_can_begin_in_the_middle() -> None:
    servicer = BreakingStreams(events=5, per_stream=9, final=Job.STATE_CANCELLED)
    with serving(register(servicer)) as address, connect(train=address) as millrace:
        updates = list(millrace.train.watch_training_job("trainingJobs/j", after_sequence=3))
    assert [one.sequence for one in updates if isinstance(one, pb.TrainingEvent)] == [4, 5]


def test_a_watch_gives_up_when_nobody_comes_back() -> None:
    servicer = BreakingStreams(events=5, per_stream=1, final=Job.STATE_SUCCEEDED)
    with connect(train="127.0.0.1:1") as nobody, pytest.raises(errors.Unavailable):
        list(nobody.train.watch_training_job("trainingJobs/j", reconnect_for_s=0.1))
    assert servicer.asked_after == []


def test_other_errors_end_a_watch_at_once() -> None:
    with (
        serving(register(UnknownJob())) as address,
        connect(train=address) as millrace,
        pytest.raises(errors.NotFound, match="trainingJobs/j"),
    ):
        list(millrace.train.watch_training_job("trainingJobs/j"))


@pytest.mark.parametrize("state", [Job.STATE_SUCCEEDED, Job.STATE_FAILED, Job.STATE_SUSPENDED], ids=Job.State.Name)
def test_all_events_of_a_job_at_rest_are_listed_however_long_they_take_to_come(state: Job.State) -> None:
    servicer = RecordedRun(state=state, pause_s=0.6)
    with serving(register(servicer)) as address, connect(train=address) as millrace:
        found = millrace.train.list_events("trainingJobs/j")
    assert [one.sequence for one in found] == [1, 2, 3, 4, 5, 6]


def test_the_events_of_a_job_at_work_are_those_so_far() -> None:
    servicer = RecordedRun(state=Job.STATE_RUNNING)
    with serving(register(servicer)) as address, connect(train=address) as millrace:
        found = millrace.train.list_events("trainingJobs/j")
    assert [one.sequence for one in found] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("state", [Job.STATE_SUCCEEDED, Job.STATE_RUNNING], ids=Job.State.Name)
def test_all_events_are_listed_though_the_clock_of_who_asks_is_slow(
    state: Job.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_servicer, "CREATED", int(time.time()) + 3600)
    with serving(register(RecordedRun(state=state))) as address, connect(train=address) as millrace:
        found = millrace.train.list_events("trainingJobs/j")
    assert [one.sequence for one in found] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("after", [0, 4])
def test_a_watch_of_a_suspended_job_has_its_events_and_ends(after: int) -> None:
    servicer = RecordedRun(state=Job.STATE_SUSPENDED)
    with serving(register(servicer)) as address, connect(train=address) as millrace:
        updates = list(millrace.train.watch_training_job("trainingJobs/j", after_sequence=after))
    assert [one.sequence for one in updates if isinstance(one, pb.TrainingEvent)] == [1, 2, 3, 4, 5, 6][after:]
    assert isinstance(updates[-1], Job)
    assert updates[-1].state == Job.STATE_SUSPENDED


@pytest.mark.parametrize(
    ("spec", "timeout_s"),
    [
        (resources_pb2.TrainingSpec(program=code_bundle_pb2.Program(entry="train:loop")), IMPORTED_TIMEOUT_S),
        (resources_pb2.TrainingSpec(model=resources_pb2.Model(entry="net:Net")), IMPORTED_TIMEOUT_S),
        (resources_pb2.TrainingSpec(model=resources_pb2.Model(builder="timm.resnet18")), None),
    ],
    ids=["program", "own model", "model"],
)
def test_a_job_with_own_code_waits_for_its_import(
    spec: resources_pb2.TrainingSpec, timeout_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []
    monkeypatch.setattr(Caller, "unary", lambda *_, timeout_s=None: asked.append(timeout_s))
    with connect(train="127.0.0.1:1") as client:
        client.train.create_training_job("job", spec, validate_only=True)
    assert asked == [timeout_s]
