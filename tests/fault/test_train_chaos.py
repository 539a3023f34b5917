"""Two minutes in which anything that takes part in a run is struck, at moments and in an order that a seed gives.

    MILLRACE_CHAOS_SEED=7 pytest -m chaos -s tests/fault/test_train_chaos.py

The run ends with the weights of one that was left alone, and every row went into them once an epoch.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from shared.storage.object_store import ensure_bucket
from tests.support.faults import Faults
from tests.support.killable_s3 import KillableS3, killable_s3
from tests.support.numbered_rows import ROWS, STEPS_PER_EPOCH
from tests.support.process_states import child_running
from tests.support.ray_head import ray_head
from tests.support.s3_server import S3Program
from tests.support.training import State
from tests.support.waiting import wait_until
from tests.support.witnessed import (
    WORKER,
    Proof,
    WitnessedStack,
    account_of,
    witnessed_spec,
    witnessed_stack,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

CHAOS_S = 120.0
# Between two strikes; a restart may take longer, so that some fall on an attempt that starts.
PAUSES_S = (3.0, 12.0)
AWAY_S = (2.0, 6.0)
EPOCHS, WORKERS = 60, 2
FINAL = {State.STATE_SUCCEEDED, State.STATE_FAILED, State.STATE_CANCELLED}
DONE_TIMEOUT_S = 900.0


def seed() -> int:
    return int(os.environ.get("MILLRACE_CHAOS_SEED", "2026"))


class Chaos:
    """Each kind of strike returns what it did, or nothing where there is nothing of its kind just now."""

    def __init__(self, place: WitnessedStack, s3: KillableS3, stop: ExitStack, chance: random.Random) -> None:
        self._place = place
        self._s3 = s3
        self._stop = stop
        self._chance = chance
        self._under_way: list[threading.Thread] = []
        self.kinds: list[Callable[[], str]] = [
            self.worker_killed,
            self.attempt_killed,
            self.service_killed,
            self.reconciler_killed,
            self.store_away,
            self.worker_stopped_for_a_while,
            self.worker_stopped_for_ever,
        ]

    def order(self) -> Iterator[Callable[[], str]]:
        """Every kind once, and Ray's head once; then at random, but for the head, which takes half a minute."""
        once = [*self.kinds, self.ray_head_killed]
        self._chance.shuffle(once)
        yield from once
        while True:
            yield self._chance.choice(self.kinds)

    def over(self) -> None:
        """Return once all that comes back is back."""
        for thread in self._under_way:
            thread.join()

    def worker_killed(self) -> str:
        return self._strike(WORKER, signal.SIGKILL)

    def worker_stopped_for_ever(self) -> str:
        return self._strike(WORKER, signal.SIGSTOP)

    def attempt_killed(self) -> str:
        return self._strike("ray::AttemptActor.run", signal.SIGKILL)

    def worker_stopped_for_a_while(self) -> str:
        pids = self._place.head.processes(WORKER)
        if not pids:
            return ""
        pid, away_s = self._chance.choice(sorted(pids)), self._chance.uniform(*AWAY_S)
        _signal(pid, signal.SIGSTOP)
        timer = threading.Timer(away_s, _signal, args=(pid, signal.SIGCONT))
        timer.start()
        self._under_way.append(timer)
        return f"SIGSTOP {WORKER} for {away_s:.1f} s"

    def service_killed(self) -> str:
        self.over()  # it does not start without its store
        self._place.stack.service.kill()
        self._place.stack.service.start()
        return "SIGKILL train service, started again"

    def reconciler_killed(self) -> str:
        pid = child_running(self._place.stack.service.pid, "train_service.reconciler")
        return "SIGKILL reconciler" if pid and _signal(pid, signal.SIGKILL) else ""

    def store_away(self) -> str:
        self.over()
        away_s = self._chance.uniform(*AWAY_S)
        self._under_way.append(self._s3.kill_for(away_s))
        return f"SIGKILL {self._s3.name}, back after {away_s:.1f} s"

    def ray_head_killed(self) -> str:
        old = self._place.head
        old.kill()
        port = int(old.address.rpartition(":")[2])
        self._place.head = self._stop.enter_context(ray_head(num_cpus=4, port=port))
        return "SIGKILL all of Ray, and a new head"

    def _strike(self, title: str, fault: signal.Signals) -> str:
        pids = self._place.head.processes(title)
        if pids and _signal(self._chance.choice(sorted(pids)), fault):
            return f"{fault.name} {title}"
        return ""


def test_two_minutes_of_strikes_lose_and_repeat_no_row_and_change_no_bit(
    s3_program: S3Program, tmp_path: Path, faults: Faults
) -> None:
    chance = random.Random(seed())
    with killable_s3(s3_program, tmp_path / "s3") as s3, ExitStack() as stop:
        settings = s3.settings("s3://millrace/chaos")
        ensure_bucket(settings)
        place = stop.enter_context(witnessed_stack(settings, tmp_path))
        client, spec = place.stack.client, witnessed_spec(epochs=EPOCHS, workers=WORKERS, checkpoint_every_steps=10)
        job = client.create(spec)
        client.watch(job.name).until("checkpoint_committed")
        strikes = _strike_for(CHAOS_S, Chaos(place, s3, stop, chance), chance)
        for kind, count in Counter(_kind(struck) for struck in strikes).items():
            faults.add(kind, "training", f"s3-{s3.name}", count)
        assert client.get(job.name).state not in FINAL, "the run was done before all the strikes: give it more epochs"
        watch = client.watch(job.name, timeout_s=DONE_TIMEOUT_S)
        watch.rest()
        assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]

        calm = client.create(spec)
        wait_until(lambda: client.get(calm.name).state in FINAL, "the undisturbed run", DONE_TIMEOUT_S)
        proof = Proof(
            workers=WORKERS,
            strikes=strikes,
            disturbed=account_of(place, job.name),
            undisturbed=account_of(place, calm.name),
        )
        proof.publish("chaos", seed=seed(), struck=strikes, steps=EPOCHS * STEPS_PER_EPOCH)

        assert (proof.disturbed.missing_rows, proof.disturbed.repeated_rows) == (0, 0)
        assert proof.disturbed.reported == proof.undisturbed.reported == (ROWS * EPOCHS, 0, 0)
        assert proof.undisturbed.attempts == 1
        assert proof.disturbed.weights_sha256 == proof.undisturbed.weights_sha256


def _strike_for(seconds: float, chaos: Chaos, chance: random.Random) -> list[str]:
    strikes: list[str] = []
    order, began = chaos.order(), time.monotonic()
    print(f"\nseed {seed()}")
    while time.monotonic() - began < seconds:
        strike = next(order)
        time.sleep(chance.uniform(*PAUSES_S))  # the moment itself is what the seed gives
        while not (struck := strike()):
            time.sleep(0.1)  # nothing of its kind just now: an attempt is about to start
        strikes.append(f"{time.monotonic() - began:6.1f} s  {struck}")
        print(strikes[-1], flush=True)
    chaos.over()
    return strikes


def _kind(struck: str) -> str:
    """Without when it was, and for how long."""
    return re.sub(r",? (for|back after) [0-9.]+ s$", "", struck.partition(" s  ")[2])


def _signal(pid: int, number: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
