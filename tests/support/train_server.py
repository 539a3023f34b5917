"""The train service's own servicer over a store, in this process, and what a command says to it."""

from __future__ import annotations

import asyncio

from click.testing import CliRunner, Result
from grpc import aio

from millrace.train.v1 import train_service_pb2_grpc
from millrace_client.cli import millrace
from shared.code_bundle import CodeBundles
from shared.storage import ObjectStore
from tests.support.grpc_kit import running
from train_service.jobs.bundle_intake import BundleIntake
from train_service.jobs.lifecycle import Deletions
from train_service.jobs.program_check import ProgramCheck, refuse_own_code
from train_service.jobs.run_records import RunRecords
from train_service.jobs.training_jobs import TrainingJobs
from train_service.servicer import TrainServicer
from train_service.sweeps.lifecycle import SweepDeletions
from train_service.sweeps.sweeps import Sweeps


def commanded(store: ObjectStore, *arguments: str, own_code: bool = True, answer: str | None = None) -> Result:
    """What the command says; `own_code`: whether the service takes that of its callers."""

    def require_own_code() -> None:
        if not own_code:
            refuse_own_code()

    deletions = Deletions(store)
    jobs = TrainingJobs(store, deletions, programs=ProgramCheck(store, require_own_code))
    sweeps = Sweeps(store, jobs, SweepDeletions(store, deletions))
    intake = BundleIntake(CodeBundles(store), require_own_code)

    def register(server: aio.Server) -> list[str]:
        servicer = TrainServicer(jobs, RunRecords(store), sweeps, intake, ())
        train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)
        return ["millrace.train.v1.TrainService"]

    async def main() -> Result:
        async with asyncio.timeout(60), running(register) as kit:
            command = [*arguments, "--train-address", kit.address]
            return await asyncio.to_thread(CliRunner().invoke, millrace, command, answer)

    result = asyncio.run(main())
    assert "Traceback" not in result.output
    return result
