"""What docs/how-to/canary.md does from a shell with a deployment that moves, on the real service and Ray Serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from millrace.inference.v1 import rollout_pb2
from millrace_client import connect
from millrace_client.cli import millrace
from tests.integration.inference_service.client import eventually
from tests.integration.inference_service.conftest import Stack
from tests.integration.inference_service.moving import IMAGE, JOB, moving, write_versions


@pytest.mark.long  # three versions are loaded
def test_a_shell_rolls_out_and_back_and_steers_a_canary(stack: Stack) -> None:
    def run_command(*arguments: str) -> Any:
        """The document that the command prints."""
        result = CliRunner().invoke(millrace, [*arguments, "--json", "--inference-address", stack.service.address])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def ready() -> set[str]:
        return {
            one["number"]
            for one in run_command("deployments", "show", "shell")["versions"]
            if one["state"] == "STATE_READY"
        }

    with (
        moving(stack.client, "shell", write_versions(stack.store)) as one,
        connect(inference=stack.service.address) as client,
    ):
        one.checkpoints |= {"2": "c2", "3": "c3"}
        run_command("rollout", "shell", f"{JOB}/checkpoints/c2", "--keep", "2", "--step", "100:0")
        assert one.ask() == "2"
        assert ready() == {"1", "2"}
        assert run_command("rollback", "shell")["rollout"]["state"] == "STATE_UNDONE"
        assert one.ask() == "1"

        run_command(
            "rollout",
            "shell",
            f"{JOB}/checkpoints/c3",
            "--keep",
            "all",
            "--step",
            "0:3600",
            "--step",
            "100:0",
            "--no-wait",
        )
        eventually(lambda: "3" in ready(), 180, "version 3 is loaded")
        run_command("deployments", "traffic", "shell", "--route", "x-canary=yes:3", "--shadow", "3=100")
        infer = client.inference.infer
        assert infer("shell", {"image": IMAGE}, headers={"x-canary": "yes"}).version == "3"
        assert (infer("shell", {"image": IMAGE}).version, one.ask()) == ("1", "1")
        rolled_back = run_command("rollback", "shell")["rollout"]["state"]
        assert rolled_back == rollout_pb2.Rollout.State.Name(rollout_pb2.Rollout.STATE_ROLLED_BACK)
        assert infer("shell", {"image": IMAGE}, headers={"x-canary": "yes"}).version == "1"
