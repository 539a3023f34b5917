"""A `Tuner` of a script, as a sweep of the job's: made once, and followed to its end by whichever attempt is at work.

Its name and uid are pure functions of the job and of how many the script had before it, so the attempt after a lost one
finds the sweep that there is. Each trial is a training job that runs the same script with the trial's values, up to its
`Tuner.fit()`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shared.checkpoint import CheckpointRegistry
from shared.errors import AlreadyExists, Cancelled, InvalidArgument, MillraceError, error_from_record
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from train_service.domain import sweep
from train_service.domain.spec import Program, TrainingSpec
from train_service.domain.sweep import MAX_SWEEP_ID, PROGRAM_CONFIG, Asha, Domain, SweepSpec
from train_service.records.reporting import TRAIN_KIND
from train_service.store_retry import retry_on_outage

SWEEP_KIND = "sweep"
COLLECTION, TRAINING_JOBS = "sweeps", "trainingJobs"
POLL_INTERVAL_S = 1.0
# As of sweeps that clients make: nodes that come and go do not end it.
MAX_FAILURES = 100
DEFAULT_CONCURRENT = 4


class ScriptSweep:
    """Number `number`, from 1, of the attempt's script."""

    def __init__(self, context: AttemptContext, spec: TrainingSpec, program: Program, number: int) -> None:
        self._context = context
        self._spec = spec
        self._program = program
        job_id = context.job.name.rpartition("/")[2]
        suffix = "-sweep" if number == 1 else f"-sweep-{number}"
        self._id = f"{job_id[: MAX_SWEEP_ID - len(suffix)]}{suffix}"
        self._uid = uuid.uuid5(uuid.UUID(context.job.uid), f"sweep-{number}").hex
        self._jobs = Jobs(context.store, SWEEP_KIND)
        self.name = f"{COLLECTION}/{self._id}"

    def spec_of(
        self, constants: Mapping[str, Any], domains: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> SweepSpec:
        """Raises `InvalidArgument` for what no sweep can be."""
        asha = settings["asha"]
        policy = replace(self._spec.checkpoints, best_metric=settings["metric"], maximize=bool(settings["maximize"]))
        program = replace(self._program, config_json=json.dumps(dict(constants)))
        spec = SweepSpec(
            base=replace(self._spec, program=program, checkpoints=policy),
            parameters={
                f"{PROGRAM_CONFIG}{path}": Domain.from_config({"values": (), **domain})
                for path, domain in domains.items()
            },
            num_samples=settings["num_samples"],
            seed=self._spec.seed,
            max_concurrent_trials=settings["max_concurrent"] or DEFAULT_CONCURRENT,
            asha=Asha(**asha) if asha else None,
        )
        sweep.check(spec)
        return spec

    def ended(self, spec: SweepSpec) -> dict[str, Any]:
        """Makes it where it was not made, and waits for its end. `trials`: of each `name`, `config`, `error` and its
        `checkpoints`, oldest first. Raises what it failed for, and ends it where the job is cancelled."""
        record = retry_on_outage(lambda: self._made(spec), "the sweep of the script")
        try:
            while not record.state.final:
                time.sleep(POLL_INTERVAL_S)
                self._context.raise_if_stopped()
                record = retry_on_outage(lambda: self._jobs.get(self.name, self.name), "the sweep of the script")
        except Cancelled:
            if not self._context.is_suspending:
                retry_on_outage(lambda: self._jobs.cancel(self.name, self.name), "the end of the sweep")
            raise
        if record.state is not JobState.SUCCEEDED:
            raise self._failed(record)
        return {"trials": [self._trial(spec, number) for number in range(spec.trial_count)]}

    def _made(self, spec: SweepSpec) -> JobRecord:
        now = time.time()
        record = JobRecord(
            uid=self._uid,
            name=self.name,
            spec={"sweep": spec.as_config(), "request_id": ""},
            create_time=now,
            update_time=now,
            max_failures=MAX_FAILURES,
        )
        try:
            return self._jobs.create(self.name, record)
        except AlreadyExists:
            there = self._jobs.get(self.name, self.name)
            if there.uid != self._uid:
                raise
            return there

    def _failed(self, record: JobRecord) -> MillraceError:
        if record.error:
            return error_from_record(record.error)
        return InvalidArgument(f"{self.name}, the sweep of the script, is {record.state}")

    def _trial(self, spec: SweepSpec, number: int) -> dict[str, Any]:
        store, name = self._context.store, f"{TRAINING_JOBS}/{sweep.trial_id(self._id, number)}"
        job = retry_on_outage(lambda: Jobs(store, TRAIN_KIND).find(name), "a trial")
        entries = retry_on_outage(CheckpointRegistry(store, name).entries, "a trial's checkpoints")
        training = spec.training_of(spec.parameters_of(number))
        assert training.program is not None
        return {
            "name": name,
            "config": json.loads(training.program.config_json),
            "error": str(job.error["message"]) if job is not None and job.error else "",
            "checkpoints": [{"name": one.name, "metrics": one.metrics} for one in entries],
        }
