"""Two frontend processes on one port, without Ray: who starts them, starts them again, and ends them.

What they answer with models, and under load, is in tests/fault/test_inference_frontends.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace_client import connect, errors
from shared.settings import StoreSettings
from tests.integration.inference_service.client import Client, environment, eventually
from tests.support.frontends_of import frontends_of
from tests.support.ports import free_ports

TIMEOUT_S = 180.0
TOKEN = "a-token-of-the-tests"


@contextmanager
def service(folder: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A service of two frontends that waits for a Ray which never comes, and demands a token."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    environ = environment(StoreSettings(url=(folder / "store").as_uri()), f"127.0.0.1:{free_ports(1)[0]}")
    with (folder / "service.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inference_service"],
            env={
                **os.environ,
                **environ,
                "MILLRACE_LISTEN": address,
                "MILLRACE_FRONTENDS": "2",
                "MILLRACE_TOKEN_FILE": str(token_file),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def answers(address: str) -> bool:
    """Whether somebody there reads the store, for those who bring the token and nobody else."""
    with connect(inference=address, token=TOKEN, reconnect_for_s=0) as client:
        try:
            client.deployments.get_deployment("deployments/nobody")
        except errors.NotFound:
            pass
        except errors.Unavailable:
            return False
    with connect(inference=address, token="", reconnect_for_s=0) as stranger:
        for ask in (
            lambda: stranger.deployments.get_deployment("deployments/nobody"),
            stranger.inference.server_live,
            lambda: list(stranger.inference.infer_stream("nothing", [])),
        ):
            try:
                with pytest.raises(errors.Unauthenticated) as raised:
                    ask()
            except errors.Unavailable:
                return False
            assert raised.value.reason == "TOKEN_REQUIRED"
    return True


def both(process: subprocess.Popen[bytes]) -> dict[int, int]:
    return eventually(
        lambda: frontends_of(process.pid) if len(frontends_of(process.pid)) == 2 else None, TIMEOUT_S, "two frontends"
    )


def gone(pids: dict[int, int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.timeout(900)
def test_without_ray_frontends_answer_are_started_again_and_end_with_their_parent(tmp_path: Path, address: str) -> None:
    with service(tmp_path, address) as process:
        eventually(lambda: answers(address), TIMEOUT_S, "the first frontend answers")
        with Client(address) as client:
            assert not client.is_healthy(), "the service says that it starts"
        before = both(process)
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: frontends_of(process.pid).get(0) not in (None, before[0]), TIMEOUT_S, "it is started again")
        eventually(lambda: answers(address), TIMEOUT_S, "it answers again")
        after = both(process)
        assert after[1] == before[1]
        process.kill()
        eventually(lambda: gone(after), 180, "no frontend is left")
    with service(tmp_path, address) as process:
        eventually(lambda: answers(address), TIMEOUT_S, "the next service answers on the same port")
        frontends = both(process)
        process.terminate()
        assert process.wait(240) == 0
        assert gone(frontends)
