"""The process itself: how it starts, what it refuses to start with, how it stops. No Ray is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.longrunning.operations_pb2 import GetOperationRequest

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace_client import connect, errors
from shared.settings import StoreSettings
from tests.integration.data_service.client import DataClient, metadata_of, parquet
from tests.support.ports import free_ports
from tests.support.refusals import refused
from tests.support.service_process import running_service, store_environ

# Of bad settings, of which every one is in tests/unit: each process imports the service.
CHAOS = pytest.mark.chaos


def test_without_ray_and_roots_it_serves_what_it_can(store_settings: StoreSettings, tmp_path: Path) -> None:
    environ = {**store_environ(store_settings), "RAY_ADDRESS": "", "MILLRACE_IMPORT_ROOTS": ""}
    with running_service("data_service", environ, tmp_path / "service.log") as service:
        client = DataClient(service.address)
        dataset = client.data.CreateDataset(pb.CreateDatasetRequest(dataset_id="d"), timeout=60)
        local = pb.ImportVersionRequest(parent=dataset.name, sources=[parquet("a", (tmp_path / "a").as_uri())])
        refusal = refused(lambda: client.data.ImportVersion(local, timeout=60))
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "MILLRACE_IMPORT_ROOTS" in refusal.fields["sources[0].parquet.uri"]
        remote = pb.ImportVersionRequest(parent=dataset.name, sources=[parquet("a", "s3://bucket/a")])
        if store_settings.url.startswith("file:"):
            refusal = refused(lambda: client.data.ImportVersion(remote, timeout=60))
            assert "no S3 endpoint" in refusal.fields["sources[0].parquet.uri"]
        else:
            operation = client.data.ImportVersion(remote, timeout=60)
            assert not operation.done
            assert metadata_of(operation).version == f"{dataset.name}/versions/v1"
        client.close()
        assert service.stop() == 0


def test_while_ray_is_gone_the_api_answers_and_an_import_waits(file_store: StoreSettings, tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    environ = {**store_environ(file_store), "RAY_ADDRESS": gone, "MILLRACE_IMPORT_ROOTS": str(tmp_path)}
    pq.write_table(pa.table({"n": [1, 2, 3]}), tmp_path / "a.parquet")
    with running_service("data_service", environ, tmp_path / "service.log") as service:
        client = DataClient(service.address)
        dataset = client.data.CreateDataset(pb.CreateDatasetRequest(dataset_id="d"), timeout=60)
        local = pb.ImportVersionRequest(parent=dataset.name, sources=[parquet("a", (tmp_path / "a.parquet").as_uri())])
        started = client.data.ImportVersion(local, timeout=60)
        version = metadata_of(started).version
        found = client.data.GetVersion(pb.GetVersionRequest(name=version), timeout=60)
        assert found.state == DatasetVersion.STATE_CREATING
        assert client.data.GetDataset(pb.GetDatasetRequest(name=dataset.name), timeout=60).name == dataset.name
        listed = client.data.ListVersions(pb.ListVersionsRequest(parent=dataset.name), timeout=60)
        assert [one.name for one in listed.versions] == [version]
        assert not client.operations.GetOperation(GetOperationRequest(name=started.name), timeout=60).done
        client.close()


def test_with_a_token_it_answers_those_who_bring_it(file_store: StoreSettings, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-the-tests\n")
    token_file.chmod(0o600)
    environ = {**store_environ(file_store), "RAY_ADDRESS": "", "MILLRACE_TOKEN_FILE": str(token_file)}
    with running_service("data_service", environ, tmp_path / "service.log") as service:
        with connect(data=service.address, token="") as stranger:
            with pytest.raises(errors.Unauthenticated, match="demands a token"):
                stranger.data.create_dataset("d")
            with pytest.raises(errors.Unauthenticated, match="demands a token"):
                stranger.data.read_table("datasets/d/versions/v1")
        with connect(data=service.address, token="another-token-of-tests") as stranger:
            with pytest.raises(errors.Unauthenticated) as raised:
                stranger.data.create_dataset("d")
            assert raised.value.reason == "TOKEN_INVALID"
        with connect(data=service.address, token="a-token-of-the-tests") as client:
            assert list(client.data.list_datasets()) == []
            assert client.data.create_dataset("d").name == "datasets/d"
            source = tmp_path / "source"
            source.write_bytes(b"some bytes")
            assert client.data.upload("datasets/d", source).size_bytes == len(b"some bytes")
    log = service.log.read_text()
    assert "brought no valid token" in log
    assert "a-token-of-the-tests" not in log
    assert "another-token-of-tests" not in log


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "MILLRACE_STORE is not set"),
        pytest.param({"MILLRACE_STORE": "ftp://host/a"}, "use file:///folder or s3://bucket/prefix", marks=CHAOS),
        ({"MILLRACE_STORE": "file:///tmp/x", "MILLRACE_IMPORT_ROOTS": "here"}, "use absolute folders"),
        pytest.param({"MILLRACE_STORE": "file:///tmp/x", "MILLRACE_LISTEN": "nowhere"}, "use host:port", marks=CHAOS),
    ],
)
def test_bad_settings_end_it_with_the_remedy(environ: dict[str, str], said: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    ended = subprocess.run(
        [sys.executable, "-m", "data_service"], env={**clean, **environ}, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
