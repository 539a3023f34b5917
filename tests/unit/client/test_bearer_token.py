"""The client's token: where it comes from, that every call brings it, and what its user hears where it is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from millrace.train.v1 import train_service_pb2_grpc
from millrace_client import connect, errors
from millrace_client.calls import Caller, authorization, open_channel
from millrace_client.cli import millrace
from millrace_client.connection import Millrace
from millrace_client.stack.supervisor import StackOptions, make_plan
from millrace_client.uploads import ChunkStream
from shared.grpc_server import BearerToken
from tests.support.fake_servicers import Refusing
from tests.support.grpc_answers import error_info, serving, status
from tests.support.inference_server import inference_server

TOKEN = "a-token-of-the-tests"
SENT = f"Bearer {TOKEN}"
INPUTS = {"image": np.zeros((1, 4), np.uint8)}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return file


class Recording(grpc.GenericRpcHandler):
    """Serves no method, and remembers each that is called and the token that came with it."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}

    def service(self, handler_call_details: Any) -> None:
        metadata = dict(handler_call_details.invocation_metadata)
        self.tokens[handler_call_details.method.rpartition("/")[2]] = metadata.get("authorization", "")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recording]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    handler = Recording()
    with serving(lambda server: server.add_generic_rpc_handlers((handler,))) as address:
        for service in ("DATA", "TRAIN", "INFERENCE"):
            monkeypatch.setenv(f"MILLRACE_{service}_ADDRESS", address)
        yield handler


CALLS: dict[str, Callable[[Millrace], object]] = {
    "GetDataset": lambda client: client.data.get_dataset("datasets/d"),
    "ReadVersion": lambda client: client.data.read_table("datasets/d/versions/v"),
    "StartUpload": lambda client: client.data.upload("datasets/d", __file__),
    "GetTrainingJob": lambda client: client.train.get_training_job("trainingJobs/j"),
    "WatchTrainingJob": lambda client: list(client.train.watch_training_job("trainingJobs/j")),
    "GetDeployment": lambda client: client.deployments.get_deployment("deployments/d"),
    "ServerLive": lambda client: client.inference.server_live(),
    "ModelInfer": lambda client: client.inference.infer("m", INPUTS),
    "ModelStreamInfer": lambda client: list(client.inference.infer_stream("m", [INPUTS])),
}


@pytest.mark.parametrize("method", CALLS)
def test_every_kind_of_call_brings_the_token(recording: Recording, method: str) -> None:
    with connect(token=TOKEN) as client, pytest.raises(errors.Unimplemented):
        CALLS[method](client)
    assert recording.tokens[method] == SENT


def test_calls_in_flight_bring_the_token(recording: Recording) -> None:
    with connect(token=TOKEN) as client, pytest.raises(errors.Unimplemented):
        list(client.inference.infer_many("m", [INPUTS]))
    assert recording.tokens == {"ModelInfer": SENT}


def test_an_upload_brings_the_token(recording: Recording) -> None:
    with connect() as client, open_channel(client.addresses.data) as channel:
        stream = ChunkStream(Caller(channel, client.addresses.data, authorization=authorization(TOKEN)))
        stream.finish(timeout_s=60)
    assert isinstance(stream.error, errors.Unimplemented)
    assert recording.tokens == {"UploadChunks": SENT}


def sent(recording: Recording, **arguments: Any) -> str:
    with connect(**arguments) as client, pytest.raises(errors.Unimplemented):
        client.inference.server_live()
    return recording.tokens["ServerLive"]


def test_the_argument_comes_before_the_file_and_an_empty_one_sends_none(
    recording: Recording, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sent(recording) == ""
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(token_file))
    assert sent(recording) == SENT
    assert sent(recording, token="another-token") == "Bearer another-token"
    assert sent(recording, token="") == ""
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", "")
    assert sent(recording) == ""


@pytest.mark.parametrize(
    ("content", "mode", "said", "remedy"),
    [
        (TOKEN, 0o644, "may be read or changed by other users (mode 0644)", "run chmod 600"),
        (" \n", 0o600, "is empty", "write the service's token into it"),
        (f"{TOKEN}\n{TOKEN}", 0o600, "something else than one token", "MILLRACE_TOKEN_FILE"),
        ("x" * 1025, 0o600, "at most 1024", "MILLRACE_TOKEN_FILE"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused_before_any_call(
    token_file: Path, monkeypatch: pytest.MonkeyPatch, content: str, mode: int, said: str, remedy: str
) -> None:
    token_file.write_text(content)
    token_file.chmod(mode)
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(token_file))
    with pytest.raises(errors.Unauthenticated) as raised:
        connect()
    assert raised.value.reason == "TOKEN_UNUSABLE"
    assert said in raised.value.message
    assert str(token_file) in raised.value.message
    assert remedy in raised.value.remedy
    assert TOKEN not in str(raised.value.as_dict())


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(tmp_path / "nothing"))
    with pytest.raises(errors.Unauthenticated, match=r"nothing.*cannot be read: No such file or directory"):
        connect()


@pytest.mark.parametrize("token", ["two words", "tökens-are-ascii-only", "line\nbreak", "x" * 1025])
def test_an_argument_that_is_no_header_is_refused(token: str) -> None:
    with pytest.raises(errors.Unauthenticated, match="the argument") as raised:
        connect(token=token)
    assert token not in str(raised.value.as_dict())


def test_a_refused_call_says_how_to_give_the_token() -> None:
    refusal = status(grpc.StatusCode.UNAUTHENTICATED, "this service demands a token", error_info("TOKEN_REQUIRED"))
    servicer = Refusing(refusal)
    with (
        serving(lambda server: train_service_pb2_grpc.add_TrainServiceServicer_to_server(servicer, server)) as address,
        connect(train=address) as client,
        pytest.raises(errors.Unauthenticated) as raised,
    ):
        client.train.get_training_job("trainingJobs/j")
    assert raised.value.reason == "TOKEN_REQUIRED"
    assert "MILLRACE_TOKEN_FILE" in raised.value.remedy
    assert "connect(token=…)" in raised.value.remedy


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(millrace, arguments)
    assert "Traceback" not in result.output
    return result


async def test_a_command_without_the_token_is_refused_and_says_how_to_give_it(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []

    async with inference_server(token=BearerToken(TOKEN)) as server:
        bench = ("bench", "m", "--seconds", "0.2", "--warm-up", "0", "--json", "--in-flight", "2")
        results.append(await asyncio.to_thread(run, *bench, "--inference-address", server.kit.address))
        monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(token_file))
        results.append(await asyncio.to_thread(run, *bench, "--inference-address", server.kit.address))

    without, with_token = results
    assert without.exit_code == 4
    assert json.loads(without.stdout)["error"]["reason"] == "TOKEN_REQUIRED"
    assert "MILLRACE_TOKEN_FILE" in json.loads(without.stdout)["error"]["remedy"]
    assert with_token.exit_code == 0, with_token.output
    assert set(json.loads(with_token.stdout)["statuses"]) == {"OK"}, "the calls under load bring it, too"


def test_a_command_with_a_file_that_others_may_read_is_refused(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file.chmod(0o640)
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(token_file))
    result = run("train", "list")
    assert result.exit_code == 4
    assert "error: MILLRACE_TOKEN_FILE" in result.stderr
    assert f"remedy: run chmod 600 {token_file}" in result.stderr


class Demanding(grpc.GenericRpcHandler):
    """Refuses every call but health checks, as a service does that wants another token."""

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith("/grpc.health"):
            return None
        reported = status(grpc.StatusCode.UNAUTHENTICATED, "this service demands a token", error_info("TOKEN_REQUIRED"))

        def refuse(_: Any, context: grpc.ServicerContext) -> bytes:
            context.set_trailing_metadata((("grpc-status-details-bin", reported.SerializeToString()),))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, reported.message)

        return grpc.unary_unary_rpc_method_handler(refuse)


def test_status_without_the_token_shows_health_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))

    def register(server: grpc.Server) -> None:
        server.add_generic_rpc_handlers((Demanding(),))
        answers = health.HealthServicer()
        answers.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(answers, server)

    with serving(register) as address:
        for service in ("DATA", "TRAIN", "INFERENCE"):
            monkeypatch.setenv(f"MILLRACE_{service}_ADDRESS", address)
        shown, document = run("status"), run("status", "--json")

    assert (shown.exit_code, document.exit_code) == (0, 0)
    assert "Who holds which CPUs is not shown: this service demands a token" in shown.stdout
    assert "MILLRACE_TOKEN_FILE" in shown.stdout
    reported = json.loads(document.stdout)
    assert reported["healthy"]
    assert reported["refusal"]["reason"] == "TOKEN_REQUIRED"
    assert "cluster" not in reported


@pytest.mark.parametrize(("chosen", "expected"), [(None, "trusted"), ("", "trusted"), ("off", "off")])
def test_a_stack_on_loopback_trusts_its_users_code_unless_they_say_otherwise(
    tmp_path: Path, chosen: str | None, expected: str
) -> None:
    environ = {} if chosen is None else {"MILLRACE_OWN_CODE": chosen}
    _, *services = make_plan(tmp_path, StackOptions(), environ).parts
    assert [part.environment["MILLRACE_OWN_CODE"] for part in services] == [expected] * 3


@pytest.mark.parametrize("name", ["MILLRACE_TOKEN_FILE", "MILLRACE_S3_ACCESS_KEY", "MILLRACE_S3_SECRET_KEY"])
def test_of_a_stack_the_services_alone_are_given_the_token_and_the_stores_keys(tmp_path: Path, name: str) -> None:
    ray, *services = make_plan(tmp_path, StackOptions(), {name: "/a/token"}).parts
    assert [part.environment[name] for part in services] == ["/a/token"] * 3
    assert name not in ray.environment
