"""The train service's own servicer over a store, in this process, and what a command says to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from click.testing import CliRunner, Result
from grpc import aio

from millrace.train.v1 import train_service_pb2_grpc
from millrace_client import connect
from millrace_client.cli import millrace
from millrace_client.train import TrainClient
from shared.code_bundle_registry import CodeBundles
from shared.code_environment import code_environments
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.grpc_kit import running
from train_service.jobs.checkpoint_import import CheckpointImports
from train_service.jobs.deletion import Deletions
from train_service.jobs.own_code import BundleIntake, ProgramCheck
from train_service.jobs.run_records import CheckpointReader, RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.servicer import TrainServicer
from train_service.sweeps.sweeps import SweepDeletions, Sweeps

T = TypeVar("T")


def registered(store: ObjectStore, *, own_code: bool = True) -> Callable[[aio.Server], list[str]]:
    """What makes a server the train service on `store`; `own_code`: whether it takes that of its callers."""
    callers_code = OwnCode(is_trusted=own_code)
    deletions = Deletions(store)
    jobs = TrainingJobs(
        store, deletions, programs=ProgramCheck(store, callers_code, environments=code_environments(os.environ))
    )
    sweeps = Sweeps(store, jobs, SweepDeletions(store, deletions))
    intake = BundleIntake(CodeBundles(store), callers_code)

    def register(server: aio.Server) -> list[str]:
        checkpoints, imports = CheckpointReader(store), CheckpointImports(store, jobs, deletions)
        servicer = TrainServicer(jobs, RunRecords(store), sweeps, intake, checkpoints, imports, ())
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)
        return ["millrace.train.v1.TrainService"]

    return register


@asynccontextmanager
async def train_stub(store: ObjectStore) -> AsyncIterator[Any]:
    """A stub of a server on `store`."""
    async with running(registered(store)) as kit:
        yield train_service_pb2_grpc.TrainServiceStub(kit.channel)


def with_client(store: ObjectStore, work: Callable[[TrainClient], T], *, own_code: bool = True, **options: Any) -> T:
    """What `work` returns, called in a thread with the SDK's client of a server on `store`.

    `own_code`: whether the service takes that of its callers.
    """

    def call(address: str) -> T:
        with connect(train=address, reconnect_for_s=0, **options) as millrace:
            return work(millrace.train)

    async def main() -> T:
        async with asyncio.timeout(600), running(registered(store, own_code=own_code)) as kit:
            return await asyncio.to_thread(call, kit.address)

    return asyncio.run(main())


def commanded(store: ObjectStore, *arguments: str, own_code: bool = True, answer: str | None = None) -> Result:
    """What the command says; `own_code`: whether the service takes that of its callers."""

    async def main() -> Result:
        async with asyncio.timeout(600), running(registered(store, own_code=own_code)) as kit:
            command = [*arguments, "--train-address", kit.address]
            return await asyncio.to_thread(CliRunner().invoke, millrace, command, answer)

    result = asyncio.run(main())
    assert "Traceback" not in result.output
    return result
