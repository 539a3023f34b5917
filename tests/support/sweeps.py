"""Sweeps as a foreign client asks for them: generated stubs."""

from __future__ import annotations

import uuid
from typing import Any

from google.protobuf import json_format

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import sweep_pb2 as sw
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.training import CREATED_TIMEOUT_S, DONE_TIMEOUT_S, TrainClient
from tests.support.waiting import wait_until

State = sw.Sweep.State
FINAL = (State.STATE_SUCCEEDED, State.STATE_FAILED, State.STATE_CANCELLED)


def sweep_spec(base: res.TrainingSpec, parameters: dict[str, Any], **fields: Any) -> sw.SweepSpec:
    """`parameters` as JSON has them: `{"seed": {"grid": {"values": [1, 2]}}}`."""
    spec = sw.SweepSpec(base=base, **fields)
    json_format.ParseDict({"parameters": parameters}, spec)
    return spec


def grid(*values: Any) -> dict[str, Any]:
    return {"grid": {"values": list(values)}}


def create(client: TrainClient, spec: sw.SweepSpec, sweep_id: str = "", **fields: Any) -> sw.Sweep:
    # As of the jobs of tests: see `training.OF_A_TESTS_JOB`.
    request = pb.CreateSweepRequest(sweep_id=sweep_id or f"j{uuid.uuid4().hex[:12]}", spec=spec, **fields)
    sweep: sw.Sweep = client.rpc.CreateSweep(request, timeout=CREATED_TIMEOUT_S)
    return sweep


def get(client: TrainClient, name: str) -> sw.Sweep:
    sweep: sw.Sweep = client.rpc.GetSweep(pb.GetSweepRequest(name=name), timeout=60)
    return sweep


def finished(client: TrainClient, name: str) -> sw.Sweep:
    """The sweep once it is final."""
    wait_until(lambda: get(client, name).state in FINAL, f"the end of {name}", timeout_s=DONE_TIMEOUT_S, interval_s=0.5)
    return get(client, name)
