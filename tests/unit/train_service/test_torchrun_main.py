"""The loop under torchrun and as a plain process, on a real store, without Ray and without services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, resolve
from shared.errors import AlreadyExists, FailedPrecondition
from shared.jobs import Jobs, JobState
from shared.jobs.reconciler import JobKind, Reconciler
from shared.jobs.transitions import succeed
from shared.model_spec import ModelSpec
from shared.settings import ServiceSettings, StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.own_models import code_of_this_process, own
from tests.support.service_process import store_environ
from tests.support.waiting import wait_until
from tests.unit.train_service.in_ranks import forked_process, in_ranks
from tests.unit.train_service.learners import CLASSES, VERSION, WIDTH, commit_table
from tests.unit.train_service.learners import SPEC as TABLE
from tests.unit.train_service.worker.test_loop import SPEC as IMAGES
from tests.unit.train_service.worker.test_loop import STEPS, config_of, entries, events, new_job, run_of, saved
from train_service import torchrun_main
from train_service.convert_specs import spec_from_proto, spec_to_proto
from train_service.domain.order import default_lanes
from train_service.domain.spec import CPU, GPU, Placement, TrainingSpec
from train_service.jobs.run_records import RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.learning.ranks import Ranks
from train_service.records.event_log import TRAIN_KIND, EventKind
from train_service.worker.loop import Run

JOB, OTHER = "trainingJobs/debug", "trainingJobs/other"
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m"]
PLAIN = [sys.executable, "-m"]
# torchrun's own ports are chosen by it; nothing listens beyond loopback.
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

# As many steps as of the images, on rows that each process learns in little time. The model draws noise in each step.
ROWS = 700
SPEC = replace(
    IMAGES,
    dataset_version=VERSION,
    input_column="x",
    transform={},
    model=ModelSpec(builder="mlp", in_channels=WIDTH, num_classes=CLASSES, kwargs={"dropout": 0.2}),
    global_batch_size=2 * ROWS // STEPS,
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def small_version(store: ObjectStore) -> None:
    commit_table(store)


def command(launcher: list[str], folder: Path, spec: TrainingSpec) -> list[str]:
    file = folder / "spec.json"
    file.write_text(json_format.MessageToJson(spec_to_proto(spec)))
    options = ["--local-addr=127.0.0.1"] if launcher is TORCHRUN else []
    return [launcher[0], *options, *launcher[1:], "train_service.torchrun_main", str(file), "--job", "debug"]


def environ(store: ObjectStore) -> dict[str, str]:
    return {**os.environ, **store_environ(store.settings), **LOOPBACK}


def ran(store: ObjectStore, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, env=environ(store), capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def ran_here(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[int, str]]:
    """Run a plain command in this process: its exit code, and all that it prints.

    For commands that train nothing: a process of its own imports torch first, which takes longer than all the rest.
    """
    monkeypatch.setattr(torchrun_main, "configure_logging", lambda *_: None)  # that of this process stays
    for name, value in store_environ(store.settings).items():
        monkeypatch.setenv(name, value)

    def run(arguments: list[str]) -> tuple[int, str]:
        assert arguments[: len(PLAIN)] == PLAIN
        capsys.readouterr()
        code = torchrun_main.main(arguments[len(PLAIN) + 1 :])
        return code, "".join(capsys.readouterr())

    return run


def rank_of_two(ranks: Ranks, settings: StoreSettings) -> None:
    Run(config_of(open_store(settings), OTHER, spec=SPEC), ranks).run()


def test_under_torchrun_a_run_ends_as_the_one_of_two_workers_and_is_an_ordinary_job(
    store: ObjectStore, file_store: StoreSettings, ran_here: Callable[[list[str]], tuple[int, str]], tmp_path: Path
) -> None:
    new_job(store, OTHER)
    (tmp_path / "ranks").mkdir()
    in_ranks(2, rank_of_two, tmp_path / "ranks", file_store)
    arguments = command(TORCHRUN, tmp_path, replace(SPEC, num_workers=2))

    first = ran(store, arguments)
    code, again = ran_here(command(PLAIN, tmp_path, replace(SPEC, num_workers=2)))

    assert first.returncode == 0, first.stderr
    assert "attempt 1 on 2 ranks, from the beginning" in first.stdout
    assert f"step {STEPS}/{STEPS}  loss " in first.stdout
    here, there = entries(store, JOB), entries(store, OTHER)
    assert sorted(here) == sorted(there)
    for step, entry in there.items():
        assert saved(store, here[step]) == saved(store, entry), step
    coverage = RunRecords(store).coverage(JOB, 1, "")
    assert (coverage.counts.seen_once, coverage.counts.missing, coverage.counts.repeated) == (ROWS, 0, 0)
    reported = TrainingJobs(store).get(JOB)
    assert (reported.record.state, reported.record.attempt) == (JobState.SUCCEEDED, 1)
    assert resolve(store, "name", JOB).name == reported.record.result["best_checkpoint"]
    # Once it is done there is nothing left to do.
    assert code == 0, again
    assert "debug is SUCCEEDED" in again
    assert len(events(store, JOB, EventKind.ATTEMPT_STARTED)) == 1


def run_command(environment: dict[str, str], arguments: list[str], stderr: Path) -> None:
    """Run the plain command in a forked process, which it ends; the process writes its errors to the file `stderr`."""
    # The process was forked from one that keeps the environment of the first test that needed it.
    os.environ.clear()
    os.environ.update(environment)
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(torchrun_main.main(arguments))


def stand_still(environment: dict[str, str], arguments: list[str], stderr: Path) -> None:
    """Run the plain command, which stands still once it has committed its second checkpoint.

    So it is killed in its middle.
    """
    commit = CheckpointRegistry.commit
    committed: list[CheckpointEntry] = []

    def commit_two(registry: CheckpointRegistry, entry: CheckpointEntry) -> None:
        if len(committed) == 2:
            time.sleep(600)
        committed.append(entry)
        commit(registry, entry)

    CheckpointRegistry.commit = commit_two  # type: ignore[method-assign,assignment]
    run_command(environment, arguments, stderr)


def test_a_killed_run_is_left_alone_by_reconcilers_and_resumed_by_the_same_command(
    store: ObjectStore, tmp_path: Path
) -> None:
    spec = replace(SPEC, epochs=6)
    new_job(store, OTHER)
    run_of(store, OTHER, spec=spec).run()
    Jobs(store, TRAIN_KIND).transition(OTHER, lambda job: succeed(job, {}, 1.0), attempt=1)
    arguments = command(PLAIN, tmp_path, spec)[len(PLAIN) + 1 :]
    stderr = tmp_path / "stderr"
    process = forked_process(stand_still, environ(store), arguments, stderr)
    wait_until(lambda: len(events(store, JOB, EventKind.CHECKPOINT_COMMITTED)) > 1, "checkpoints", timeout_s=400)
    process.kill()
    process.join(60)
    # A marker, as a wish to resume may leave one that came too late.
    jobs = Jobs(store, TRAIN_KIND)
    jobs._mark(JOB, jobs.get(JOB, JOB), 1)
    reconciler = Reconciler(
        ServiceSettings(listen="", store=store.settings), JobKind(name=TRAIN_KIND, entry="no:entry")
    )
    for _ in range(3):
        reconciler.reconcile()
    killed = jobs.get(JOB, JOB)

    resumed = forked_process(run_command, environ(store), arguments, stderr)
    resumed.join(600)

    assert (killed.state, killed.attempt, killed.failures) == (JobState.RUNNING, 1, 0)
    assert jobs.live() == []
    assert resumed.exitcode == 0, stderr.read_text(errors="replace")
    done = jobs.get(JOB, JOB)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)
    _, second = events(store, JOB, EventKind.ATTEMPT_STARTED)
    assert second.payload["step"] == 4
    last = STEPS * 3
    assert saved(store, entries(store, JOB)[last]) == saved(store, entries(store, OTHER)[last])
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"ingest": "RAY_DATA"}, "use INGEST_THREADS"),
        ({"train_split": "absent"}, "train_split"),
    ],
)
def test_torchrun_main_refuses_an_unsupported_spec_and_writes_nothing(
    store: ObjectStore,
    ran_here: Callable[[list[str]], tuple[int, str]],
    tmp_path: Path,
    change: dict[str, object],
    remedy: str,
) -> None:
    before = sorted(info.key for info in store.list())

    code, message = ran_here(command(PLAIN, tmp_path, replace(SPEC, **change)))  # type: ignore[arg-type]

    assert code == 2
    assert remedy in message
    assert sorted(info.key for info in store.list()) == before


def test_a_job_of_the_service_or_of_another_spec_is_not_taken_up(
    store: ObjectStore, ran_here: Callable[[list[str]], tuple[int, str]], tmp_path: Path
) -> None:
    TrainingJobs(store).create("debug", spec_from_proto(spec_to_proto(SPEC), ()), "", "", validate_only=False)

    code, of_the_service = ran_here(command(PLAIN, tmp_path, SPEC))
    other_code, of_another_spec = ran_here(command(PLAIN, tmp_path, replace(SPEC, seed=1)))

    assert (code, other_code) == (2, 2)
    assert "has a reconciler" in of_the_service
    assert "another spec" in of_another_spec
    assert Jobs(store, TRAIN_KIND).get(JOB, JOB).state is JobState.PENDING


def test_a_file_that_is_no_text_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    arguments = command(PLAIN, tmp_path, SPEC)
    (tmp_path / "spec.json").write_bytes(b"\xff\xfe{}")

    refused = ran(store, arguments)

    assert refused.returncode == 2
    assert "train_service.torchrun_main: " in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_error_of_another_rank_than_the_first_ends_the_attempt(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new_job(store, JOB)

    def broken(*_: object, **__: object) -> None:
        raise FailedPrecondition("the loss of step 3 is nan", reason="NON_FINITE_LOSS")

    monkeypatch.setattr(torchrun_main, "train_loop", broken)

    code = torchrun_main._follow(
        config_of(store, JOB), Ranks(1, 2, torch.device("cpu")), torchrun_main.Launch(), store.settings
    )

    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    (ended,) = events(store, JOB, EventKind.ATTEMPT_ENDED)
    assert code == 1
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error["reason"] == "NON_FINITE_LOSS"
    assert ended.payload["ranks"] == [1]
    assert "rank 1: the loss of step 3 is nan" in capsys.readouterr().err


def test_a_run_goes_on_though_the_checkpoint_that_it_began_from_is_gone(store: ObjectStore) -> None:
    new_job(store, OTHER)
    run_of(store, OTHER, spec=SPEC).run()
    spec = replace(SPEC, initial_checkpoint=entries(store, OTHER)[STEPS].name)
    begun = TrainingJobs(store).begin_external_attempt("debug", spec, torchrun_main.RUNNER, CPU)
    run_of(store, JOB, spec=TrainingSpec.from_config(begun.spec["training"])).run()
    for info in list(store.list(OTHER)):
        store.delete(info.key)

    again = TrainingJobs(store).begin_external_attempt("debug", spec, torchrun_main.RUNNER, CPU)

    assert (again.uid, again.attempt) == (begun.uid, 2)
    final = replace(spec, initial_checkpoint=f"{OTHER}/checkpoints/final")
    assert TrainingJobs(store).begin_external_attempt("debug", final, torchrun_main.RUNNER, CPU).attempt == 3
    for other in ("", f"{OTHER}/checkpoints/step-00000002", "trainingJobs/third/checkpoints/final"):
        with pytest.raises(AlreadyExists, match="another spec"):
            TrainingJobs(store).begin_external_attempt(
                "debug", replace(spec, initial_checkpoint=other), torchrun_main.RUNNER, CPU
            )


def test_a_run_that_began_with_the_lanes_of_an_earlier_release_goes_on_with_them(store: ObjectStore) -> None:
    spec = replace(SPEC, num_workers=5, lanes=24)
    begun = TrainingJobs(store).begin_external_attempt("debug", spec, torchrun_main.RUNNER, CPU)

    again = TrainingJobs(store).begin_external_attempt(
        "debug", replace(spec, lanes=default_lanes(5)), torchrun_main.RUNNER, CPU
    )

    assert (again.uid, again.attempt) == (begun.uid, 2)
    assert again.spec["training"]["lanes"] == 24
    with pytest.raises(AlreadyExists, match="another spec"):
        TrainingJobs(store).begin_external_attempt("debug", replace(spec, lanes=48), torchrun_main.RUNNER, CPU)


@pytest.mark.parametrize(
    ("placement", "cuda"), [({}, True), ({"gpus_per_worker": 0.0}, False), ({"backend": "gloo"}, False)]
)
def test_ranks_use_gpus_unless_the_specification_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any], cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    spec = replace(SPEC, num_workers=2, placement=Placement(**placement))

    assert torchrun_main._device(spec, torchrun_main.Launch(), "") == (GPU if cuda else CPU)
    if cuda:
        with pytest.raises(FailedPrecondition, match="which has 1 GPUs; start fewer ranks"):
            torchrun_main._device(spec, torchrun_main.Launch(rank=1, world_size=2, local_rank=1), "")


def test_a_run_stays_on_the_kind_of_device_that_it_began_on(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = torchrun_main.Launch()
    may_fall = replace(SPEC, placement=Placement(allow_cpu_fallback=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FailedPrecondition, match="the run began on GPUs, and torch finds none here"):
        torchrun_main._device(SPEC, alone, GPU)
    assert torchrun_main._device(may_fall, alone, GPU) == CPU

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert torchrun_main._device(SPEC, alone, CPU) == CPU
    assert torchrun_main._device(may_fall, alone, GPU) == GPU


def test_the_log_of_a_run_keeps_what_it_began_on(store: ObjectStore) -> None:
    jobs, spec = TrainingJobs(store), replace(SPEC, placement=Placement(allow_cpu_fallback=True))
    jobs.begin_external_attempt("debug", spec, torchrun_main.RUNNER, GPU)
    assert torchrun_main._device_of_run(store.settings, "debug") == GPU

    again = jobs.begin_external_attempt("debug", spec, torchrun_main.RUNNER, CPU)

    assert again.choices == {"device": GPU, "attempt_device": CPU, "device_before": GPU}
    assert torchrun_main._device_of_run(store.settings, "debug") == GPU


def test_no_ray_is_needed() -> None:
    code = "import sys, train_service.torchrun_main; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("checked_here")
def test_a_model_of_ones_own_code_is_checked_trained_and_known_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    spec = own(store, replace(TABLE, epochs=1, global_batch_size=70))
    alone = Ranks(0, 1, torch.device("cpu"))

    def run(spec: TrainingSpec) -> int:
        with code_of_this_process():  # as if each command had a process of its own
            return torchrun_main._run(alone, torchrun_main.Launch(), store.settings, "debug", spec)

    assert run(spec) == 0
    assert run(spec) == 0  # it is done, and the same
    assert run(replace(spec, epochs=2)) == 2

    assert entries(store, JOB)[10].code_bundle == spec.model.code_bundle


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TORCHRUN, PLAIN], ids=["torchrun", "plain"])
def test_a_model_that_fills_the_memory_ends_the_attempt_with_its_reason(
    store: ObjectStore, tmp_path: Path, launcher: list[str]
) -> None:
    workers = 2 if launcher is TORCHRUN else 1
    # A limit that each process is over from its first moment.
    placement = Placement(resources_per_worker={"memory": 1.0})
    spec = own(store, replace(TABLE, placement=placement, num_workers=workers, epochs=1000, max_failures=0))
    ended = ran(store, command(launcher, tmp_path, spec))

    assert ended.returncode != 0
    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    assert job.state is JobState.FAILED, ended.stdout + ended.stderr
    assert job.error is not None
    assert "of memory" in job.error["message"]
    assert "the limit of 0 MiB that placement.resources_per_worker[memory] sets" in job.error["message"]
    assert "of memory" in ended.stderr
    assert any("of memory" in one.payload["text"] for one in events(store, JOB, EventKind.ATTEMPT_ENDED))
