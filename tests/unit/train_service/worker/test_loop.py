"""One rank's run in this process, on a real store: it resumes where it was, and ends when it is asked to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import torch

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint, resolve
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from shared.errors import DataLoss, FailedPrecondition, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, lose_attempt
from shared.model_spec import ModelSpec
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from tests.unit.train_service.conftest import VERSION
from tests.unit.train_service.learners import CLASSES, NUMBERS, WIDTH, commit_table
from tests.unit.train_service.learners import VERSION as TABLE
from train_service.checkpoints.coverage_records import orphans
from train_service.domain.spec import FLOAT16, REGRESSION, EarlyStopping, OptimizerSpec, TrainingSpec
from train_service.jobs.run_records import RunRecords
from train_service.learning.ranks import Ranks
from train_service.records import metrics_log
from train_service.records.event_log import PREEMPT, SUSPEND, TRAIN_KIND, Event, EventKind, EventLog
from train_service.records.metrics_log import metrics_page
from train_service.worker import loop
from train_service.worker.heartbeat import HeartbeatSender
from train_service.worker.loop import LoopConfig, Run, Stopped, run_name

ALONE = Ranks(0, 1, torch.device("cpu"))
SPEC = TrainingSpec(
    dataset_version=VERSION,
    validation_split="validation",
    transform={"steps": [{"toFloat": {}}]},
    # Dropout and BatchNorm: noise and buffers are part of what must come back.
    model=ModelSpec(builder="torchvision.mnasnet0_5", in_channels=1, num_classes=10, kwargs={"dropout": 0.2}),
    optimizer=OptimizerSpec(learning_rate=0.001, schedule="COSINE_WITH_WARMUP"),
    epochs=2,
    global_batch_size=20,
    checkpoint_every_steps=2,
)
STEPS = 10


@pytest.fixture(autouse=True)
def small_version(store: ObjectStore) -> None:
    commit_version(store, VERSION, {"train": striped_digits(100), "validation": striped_digits(20, 1)})


def new_job(store: ObjectStore, name: str, spec: TrainingSpec | None = None) -> None:
    now, config = time.time(), {"training": spec.as_config()} if spec else {}
    job = JobRecord(uid=name.rpartition("/")[2], name=name, spec=config, create_time=now, update_time=now)
    Jobs(store, TRAIN_KIND).create(name, job)
    begin(store, name)


def begin(store: ObjectStore, name: str) -> None:
    jobs = Jobs(store, TRAIN_KIND)
    attempt = jobs.get(name, name).attempt + 1
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=attempt)


def lose_and_begin(store: ObjectStore, name: str) -> None:
    """The first attempt is lost, and the second begins."""
    jobs = Jobs(store, TRAIN_KIND)
    jobs.transition(name, lambda job: lose_attempt(job, Unavailable("lost"), time.time()), attempt=1)
    begin(store, name)


def run_of(store: ObjectStore, name: str, attempt: int = 1, spec: TrainingSpec = SPEC) -> Run:
    return Run(config_of(store, name, attempt, spec), ALONE)


def config_of(store: ObjectStore, name: str, attempt: int = 1, spec: TrainingSpec = SPEC) -> LoopConfig:
    return LoopConfig(store=store.settings, job_name=name, attempt=attempt, spec=spec)


def entries(store: ObjectStore, name: str) -> dict[int, CheckpointEntry]:
    return {entry.step: entry for entry in CheckpointRegistry(store, name).entries()}


def saved(store: ObjectStore, entry: CheckpointEntry) -> tuple[bytes, bytes]:
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    return checkpoint.read(WEIGHTS), checkpoint.read(OPTIMIZER)


def events(store: ObjectStore, name: str, kind: EventKind) -> list[Event]:
    return [event for event in EventLog(store, name).after(0) if event.kind is kind]


def until_event(store: ObjectStore, name: str, kind: EventKind, then: Callable[[], object]) -> threading.Thread:
    """Call `then` once the run has reported such an event."""

    def wait() -> None:
        while not events(store, name, kind):
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_run_resumed_at_any_checkpoint_ends_with_bit_for_bit_the_same_weights_and_state(store: ObjectStore) -> None:
    new_job(store, "trainingJobs/whole")
    run_of(store, "trainingJobs/whole").run()
    whole = entries(store, "trainingJobs/whole")
    assert sorted(whole) == [2, 4, 5, 6, 8, 10]
    # Records of consumed rows that were merged, and that no checkpoint names any more, are gone with the run's end.
    assert not orphans(store, "trainingJobs/whole", whole.values())

    for step in (4, 5):
        # As if the run had died just after this checkpoint.
        name = f"trainingJobs/from-{step}"
        new_job(store, name)
        registry = CheckpointRegistry(store, name)
        registry.commit(replace(whole[step], name=f"{name}/checkpoints/step-{step:08d}", attempt=1))
        lose_and_begin(store, name)
        run_of(store, name, attempt=2).run()

        resumed = entries(store, name)
        assert sorted(resumed) == [one for one in sorted(whole) if one >= step]
        for one in resumed:
            assert saved(store, resumed[one]) == saved(store, whole[one]), one
        (started,) = events(store, name, EventKind.ATTEMPT_STARTED)
        assert (started.payload["step"], started.attempt) == (step, 2)


def test_steps_that_the_loss_scaler_skips_are_counted_and_their_rows_are_not_consumed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So large that the gradients of the first steps overflow.
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**40, backoff_factor=2.0**-10)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    # A table: in float16 a CPU takes long for layers of images.
    commit_table(store)
    model = ModelSpec(builder="mlp", in_channels=WIDTH, num_classes=CLASSES, kwargs={"dropout": 0.2})
    rows, batch_rows = 700, 140
    spec = replace(
        SPEC,
        dataset_version=TABLE,
        input_column="x",
        transform={},
        model=model,
        precision=FLOAT16,
        global_batch_size=batch_rows,
        checkpoint_every_steps=1,
    )
    new_job(store, "trainingJobs/whole", spec)
    run_of(store, "trainingJobs/whole", spec=spec).run()
    whole = entries(store, "trainingJobs/whole")

    weights = {step: safetensors.torch.load(saved(store, entry)[0]) for step, entry in whole.items()}
    trained = [name for name in weights[1] if "running_" not in name and "num_batches" not in name]
    unchanged = {
        step for step in range(2, STEPS + 1) if all(weights[step][one].equal(weights[step - 1][one]) for one in trained)
    }
    points, _ = metrics_page(store, "trainingJobs/whole", 0, 100, "")
    reported = [int(point.values["skipped_steps"]) for point in points]
    skipped = {
        point.step
        for point, before in zip(points, [0, *reported], strict=False)
        if point.values["skipped_steps"] > before
    }
    assert skipped - {1} == unchanged
    assert 0 < len(skipped) == reported[-1] < STEPS

    def counted(name: str) -> list[tuple[int, int, int, int, int]]:
        found = [RunRecords(store).coverage(name, epoch, "") for epoch in range(2)]
        assert all(
            one.counts.seen_once + one.counts.missing + one.counts.repeated + one.counts.skipped == rows
            for one in found
        )
        return [
            (one.counts.seen_once, one.counts.missing, one.counts.repeated, one.counts.skipped, one.skipped_steps)
            for one in found
        ]

    of_epochs = [sum(1 for step in skipped if (step - 1) // 5 == epoch) for epoch in range(2)]
    expected = [(rows - batch_rows * steps, 0, 0, batch_rows * steps, steps) for steps in of_epochs]
    assert counted("trainingJobs/whole") == expected
    progress = events(store, "trainingJobs/whole", EventKind.PROGRESS)
    assert progress[-1].payload["skipped_steps"] == len(skipped)

    # As if the run had died just after the first skipped steps.
    new_job(store, "trainingJobs/again", spec)
    registry = CheckpointRegistry(store, "trainingJobs/again")
    registry.commit(replace(whole[2], name="trainingJobs/again/checkpoints/step-00000002", attempt=1))
    lose_and_begin(store, "trainingJobs/again")
    run_of(store, "trainingJobs/again", attempt=2, spec=spec).run()

    resumed = entries(store, "trainingJobs/again")
    assert saved(store, resumed[STEPS]) == saved(store, whole[STEPS])
    assert counted("trainingJobs/again") == expected
    points, _ = metrics_page(store, "trainingJobs/again", 0, 100, "")
    assert [int(point.values["skipped_steps"]) for point in points] == reported[2:]


def test_resuming_a_run_that_was_done_does_nothing_more(store: ObjectStore) -> None:
    new_job(store, "trainingJobs/a")
    run_of(store, "trainingJobs/a", spec=replace(SPEC, epochs=1)).run()
    before = entries(store, "trainingJobs/a")
    lose_and_begin(store, "trainingJobs/a")

    run_of(store, "trainingJobs/a", attempt=2, spec=replace(SPEC, epochs=1)).run()

    assert entries(store, "trainingJobs/a") == before


def test_a_cancelled_run_stops_and_every_checkpoint_it_committed_was_reported(store: ObjectStore) -> None:
    before = set(threading.enumerate())
    new_job(store, "trainingJobs/a")
    cancelling = until_event(
        store,
        "trainingJobs/a",
        EventKind.CHECKPOINT_COMMITTED,
        lambda: Jobs(store, TRAIN_KIND).cancel("trainingJobs/a", "trainingJobs/a"),
    )

    with pytest.raises(Stopped, match="cancelled"):
        run_of(store, "trainingJobs/a", spec=replace(SPEC, epochs=10_000, checkpoint_every_steps=1)).run()

    cancelling.join()
    reported = [event.payload["name"] for event in events(store, "trainingJobs/a", EventKind.CHECKPOINT_COMMITTED)]
    assert reported == [entry.name for entry in entries(store, "trainingJobs/a").values()]
    of_a_run = ("loader", "events", "requested-state", "metrics", "checkpoint", "pulse")
    begun = set(threading.enumerate()) - before
    assert [one.name for one in begun if one.name.startswith(of_a_run)] == []


def test_a_suspended_run_keeps_the_very_step_at_which_it_stopped(store: ObjectStore) -> None:
    name = "trainingJobs/a"
    new_job(store, name)
    suspending = until_event(
        store, name, EventKind.CHECKPOINT_COMMITTED, lambda: Jobs(store, TRAIN_KIND).suspend(name, name)
    )

    with pytest.raises(Stopped, match="suspended"):
        # Its only rule is the end of an epoch.
        run_of(store, name, spec=replace(SPEC, epochs=10_000, checkpoint_every_steps=0)).run()

    suspending.join()
    reported = [event.payload for event in events(store, name, EventKind.CHECKPOINT_COMMITTED)]
    assert reported[-1]["name"] == list(entries(store, name).values())[-1].name
    progress = [event.payload["step"] for event in events(store, name, EventKind.PROGRESS)]
    assert max(progress, default=0) <= reported[-1]["step"]
    # One after an epoch's last step has its metrics like any other.
    assert all(bool(one["metrics"]) == (one["step"] % 5 == 0) for one in reported)


@pytest.mark.parametrize("every_steps", [1, 3])
def test_when_a_checkpoint_is_committed_the_metrics_of_every_step_in_it_are_durable(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, every_steps: int
) -> None:
    """Whatever kills the run from then on, they are nowhere else."""
    monkeypatch.setattr(metrics_log, "FLUSH_EVERY_S", 3600.0)
    commit_table(store)
    name = "trainingJobs/a"
    new_job(store, name)
    commit = CheckpointRegistry.commit
    durable: dict[int, list[int]] = {}

    def note(registry: CheckpointRegistry, entry: CheckpointEntry) -> None:
        points, _ = metrics_page(store, name, 0, 1000, "")
        durable[entry.step] = [point.step for point in points if point.step <= entry.step and "loss" in point.values]
        if entry.metrics:
            assert points[entry.step - 1].values.keys() >= entry.metrics.keys()
        commit(registry, entry)

    monkeypatch.setattr(CheckpointRegistry, "commit", note)
    run_of(store, name, spec=replace(NUMBERS, global_batch_size=100, checkpoint_every_steps=every_steps)).run()

    assert len(durable) >= 5
    assert durable == {step: list(range(1, step + 1)) for step in durable}
    rates = [point.values["rows_per_second"] for point in metrics_page(store, name, 0, 1000, "")[0]]
    assert max(rates) < 1e6, "a step counts for as long as it took, not for how late its sums were taken up"


def test_an_attempts_own_request_stops_a_run_in_the_same_way(store: ObjectStore) -> None:
    name = "trainingJobs/a"
    new_job(store, name)
    heartbeat = HeartbeatSender(0)
    heartbeat.request = PREEMPT

    with pytest.raises(Stopped, match="taken away"):
        Run(config_of(store, name), ALONE, heartbeat).run()

    assert [entry.step for entry in entries(store, name).values()] == [
        2
    ]  # the sum of a step is taken up after the next
    assert heartbeat.total_steps == STEPS


def test_a_suspended_run_ends_only_once_its_checkpoint_is_durable(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, heartbeat, commit = "trainingJobs/a", HeartbeatSender(0), CheckpointRegistry.commit
    new_job(store, name)
    heartbeat.request = SUSPEND

    def overtaken(registry: CheckpointRegistry, entry: CheckpointEntry) -> None:
        CheckpointRegistry(store, name).fence(2)
        commit(registry, entry)

    monkeypatch.setattr(CheckpointRegistry, "commit", overtaken)
    # Who does not wait for the checkpoint takes the run for suspended.
    with pytest.raises(StaleAttempt):
        Run(config_of(store, name, spec=replace(SPEC, checkpoint_every_steps=0)), ALONE, heartbeat).run()

    assert entries(store, name) == {}


def test_an_attempt_that_was_overtaken_stops_and_commits_nothing_more(store: ObjectStore) -> None:
    name = "trainingJobs/a"
    new_job(store, name)

    def overtake() -> None:
        lose_and_begin(store, name)
        CheckpointRegistry(store, name).fence(2)
        fenced.append(len(entries(store, name)))

    fenced: list[int] = []
    overtaking = until_event(store, name, EventKind.CHECKPOINT_COMMITTED, overtake)

    with pytest.raises(Exception, match=r"taken over|fenced"):
        run_of(store, name, spec=replace(SPEC, epochs=10_000, checkpoint_every_steps=1)).run()

    overtaking.join()
    assert len(entries(store, name)) == fenced[0]


def test_a_rank_asks_for_no_other_ranks_tasks(store: ObjectStore) -> None:
    """Another's may have the last CPU and wait for this one's step: that is no fault of this one's tasks."""
    config = config_of(store, "trainingJobs/j")
    assert len({run_name(config, rank) for rank in range(12)}) == 12


def test_a_table_of_numbers_is_learnt_and_its_checkpoint_says_so(store: ObjectStore) -> None:
    commit_table(store)
    spec = replace(NUMBERS, epochs=3, global_batch_size=50, accumulation_steps=2, max_gradient_norm=100.0)
    spec = replace(spec, optimizer=OptimizerSpec(learning_rate=0.03))
    new_job(store, "trainingJobs/a")
    run_of(store, "trainingJobs/a", spec=spec).run()

    last = max(entries(store, "trainingJobs/a").items())[1]
    assert set(last.metrics) == {"validation_loss", "validation_mae", "validation_r2"}
    assert last.metrics["validation_r2"] > 0.5
    content = load_checkpoint(store, last.folder, last.manifest_sha256).content
    assert (content.model.task, content.model.builder) == (REGRESSION, "mlp")
    assert content.nan_counts == {}, "the version has no report that would tell"
    measured = events(store, "trainingJobs/a", EventKind.VALIDATED)[-1].payload
    assert measured["metrics"] == {name: last.metrics[f"validation_{name}"] for name in ("mae", "r2")}
    assert measured["loss"] == last.metrics["validation_loss"]
    assert "accuracy" not in measured, "of numbers there is none"


def test_a_damaged_report_of_the_version_ends_no_run_and_its_checkpoints_say_nothing_of_nan(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> dict[str, int]:
        raise DataLoss("report.json is not what was committed")

    monkeypatch.setattr(loop, "ingested_nan_counts", damaged)
    commit_table(store)
    new_job(store, "trainingJobs/a")
    run_of(store, "trainingJobs/a", spec=replace(NUMBERS, epochs=1, global_batch_size=50)).run()

    last = max(entries(store, "trainingJobs/a").items())[1]
    assert load_checkpoint(store, last.folder, last.manifest_sha256).content.nan_counts is None


def test_a_run_that_gets_no_better_ends_early_and_once_for_all(store: ObjectStore) -> None:
    """The label cannot be told from noise by a model that hardly learns."""
    stopping = EarlyStopping(metric="validation_accuracy", maximize=True, patience=2, min_delta=0.9)
    spec = replace(SPEC, epochs=50, early_stopping=stopping, checkpoint_every_steps=0)
    name = "trainingJobs/a"
    new_job(store, name)
    run_of(store, name, spec=spec).run()

    done = entries(store, name)
    assert sorted(entry.epoch for entry in done.values()) == [1, 2, 3]
    lose_and_begin(store, name)
    run_of(store, name, attempt=2, spec=spec).run()
    assert entries(store, name) == done
    # Killed after the second epoch, it ends after the third as well.
    again = "trainingJobs/b"
    new_job(store, again)
    registry = CheckpointRegistry(store, again)
    for step in sorted(done)[:2]:
        registry.commit(replace(done[step], name=f"{again}/checkpoints/step-{step:08d}", attempt=1))
    lose_and_begin(store, again)
    run_of(store, again, attempt=2, spec=spec).run()
    assert {step: saved(store, entry) for step, entry in entries(store, again).items()} == {
        step: saved(store, entry) for step, entry in done.items()
    }


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_good_checkpoint(store: ObjectStore) -> None:
    optimizer = OptimizerSpec(name="SGD", learning_rate=1e30)  # the second step diverges, or one soon after
    spec = replace(SPEC, optimizer=optimizer, epochs=50, checkpoint_every_steps=1)
    new_job(store, "trainingJobs/a")

    with pytest.raises(FailedPrecondition) as ended:
        run_of(store, "trainingJobs/a", spec=spec).run()

    assert ended.value.specific_reason in ("NON_FINITE_LOSS", "NON_FINITE_WEIGHTS")
    left = entries(store, "trainingJobs/a")
    assert left
    for entry in left.values():
        weights = safetensors.torch.load(saved(store, entry)[0])
        assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_of_two_attempts_that_run_at_once_the_later_goes_on_and_every_checkpoint_is_whole(store: ObjectStore) -> None:
    name = "trainingJobs/a"
    new_job(store, name)
    spec = replace(SPEC, epochs=10_000, checkpoint_every_steps=1, checkpoints=replace(SPEC.checkpoints, keep_newest=3))
    stopped: list[BaseException] = []

    def first() -> None:
        try:
            run_of(store, name, spec=spec).run()
        except (Stopped, StaleAttempt) as error:
            stopped.append(error)

    zombie = threading.Thread(target=first, daemon=True)
    zombie.start()
    wait_until(lambda: len(entries(store, name)) > 1, "checkpoints of the first attempt")
    lose_and_begin(store, name)
    enough = threading.Thread(target=cancel_after_checkpoints_of, args=(store, name, 2), daemon=True)
    enough.start()
    with pytest.raises(Stopped, match="cancelled"):
        run_of(store, name, attempt=2, spec=spec).run()
    zombie.join(240)

    assert len(stopped) == 1
    left = entries(store, name)
    assert max(left.values(), key=lambda one: one.step).attempt == 2
    assert len(left) <= 4  # the newest three and the best
    for one in left.values():
        load_checkpoint(store, one.folder, one.manifest_sha256).verify()


def cancel_after_checkpoints_of(store: ObjectStore, name: str, attempt: int) -> None:
    def three() -> bool:
        return sum(one.attempt == attempt for one in events(store, name, EventKind.CHECKPOINT_COMMITTED)) >= 3

    wait_until(three, "checkpoints of the later attempt")
    Jobs(store, TRAIN_KIND).cancel(name, name)


def test_a_checkpoint_is_taken_when_so_many_seconds_have_gone_and_the_last_step_has_the_final_one(
    store: ObjectStore,
) -> None:
    name = "trainingJobs/a"
    new_job(store, name)
    policy = replace(SPEC.checkpoints, every_s=1e-6)
    run_of(store, name, spec=replace(SPEC, checkpoint_every_steps=0, checkpoints=policy)).run()

    saved_at = entries(store, name)
    assert max(saved_at) == STEPS
    assert {5, STEPS} < set(saved_at)
    assert [step for step, entry in saved_at.items() if entry.final] == [STEPS]
    assert resolve(store, "f", f"{name}/checkpoints/final").step == STEPS


def test_the_last_progress_is_the_last_step(store: ObjectStore) -> None:
    new_job(store, "trainingJobs/a")
    run_of(store, "trainingJobs/a").run()

    last = events(store, "trainingJobs/a", EventKind.PROGRESS)[-1].payload
    assert (last["step"], last["total_steps"], last["epoch"], last["seconds_left"]) == (STEPS, STEPS, 1, 0)
    measured = events(store, "trainingJobs/a", EventKind.VALIDATED)
    assert [(one.payload["step"], one.payload["row_count"]) for one in measured] == [(5, 20), (10, 20)]
