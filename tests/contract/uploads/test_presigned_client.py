"""The SDK's way past the service: parts put by URL on a real S3 server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from data_service.uploads.upload import open_upload
from data_service.uploads.uploads import MIN_PART_BYTES
from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc as pb_grpc
from millrace.data.v1 import resources_pb2
from millrace_client import uploads
from millrace_client.calls import Caller, open_channel
from millrace_client.errors import FailedPrecondition, MillraceError, NotFound, Unavailable
from millrace_client.uploads import resume_upload, upload_presigned
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.ports import free_ports
from tests.support.upload_server import DATASET, upload_server

DATA = bytes(range(256)) * 65_536  # 16 MiB: four parts, of which the last is short


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "rows.bin"
    made.write_bytes(DATA)
    return made


class Service:
    """A stub whose StartUpload answers may be changed on their way, and who calls."""

    def __init__(self, store: ObjectStore, address: str) -> None:
        self.store = store
        self.channel = open_channel(address)
        self.caller = Caller(self.channel, address)
        self._stub: Any = pb_grpc.DataServiceStub(self.channel)
        self.started = 0
        self.change: Any = lambda _: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def StartUpload(self, request: Any, **options: Any) -> resources_pb2.Upload:  # noqa: N802
        answer: resources_pb2.Upload = self._stub.StartUpload(request, **options)
        self.started += 1
        self.change(answer)
        return answer

    def upload(self, path: Path, **options: Any) -> resources_pb2.Upload:
        return upload_presigned(self.caller, self, DATASET, path, part_size_bytes=MIN_PART_BYTES, **options)


def serving(settings: StoreSettings) -> Iterator[Service]:
    store = open_store(settings)
    with upload_server(store) as server:
        service = Service(store, server.address)
        with service.channel:
            yield service


@pytest.fixture
def service(s3_store: StoreSettings) -> Iterator[Service]:
    yield from serving(s3_store)


@pytest.fixture
def local(file_store: StoreSettings) -> Iterator[Service]:
    yield from serving(file_store)


def kept(service: Service, upload: resources_pb2.Upload) -> bytes:
    with open_upload(service.store, upload.name) as file:
        return bytes(file.read())


def test_a_file_goes_past_the_service_in_parts(service: Service, path: Path) -> None:
    reported = []
    upload = service.upload(path, on_progress=lambda *progress: reported.append(progress))
    assert upload.state == resources_pb2.Upload.STATE_COMMITTED
    assert kept(service, upload) == DATA
    assert len(reported) == 4
    assert reported[-1] == (len(DATA), len(DATA))


def test_urls_that_are_no_longer_good_are_asked_for_anew(service: Service, path: Path) -> None:
    def age(upload: resources_pb2.Upload) -> None:
        for part in upload.presigned_parts if service.started == 1 else ():
            part.url = part.url.replace("X-Amz-Signature=", "X-Amz-Signature=0")

    service.change = age
    assert kept(service, service.upload(path)) == DATA


def test_where_the_store_cannot_be_reached_the_upload_stays_open_for_the_other_way(
    service: Service, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "OUTAGE_TIMEOUT_S", 0.2)
    (nobody,) = free_ports(1)

    def lead_astray(upload: resources_pb2.Upload) -> None:
        upload.presigned_parts[2].url = f"http://127.0.0.1:{nobody}/"

    service.change = lead_astray
    with pytest.raises(Unavailable, match="refused") as raised:
        service.upload(path)
    name = raised.value.metadata["upload"]
    assert name in raised.value.remedy
    assert kept(service, resume_upload(service.caller, service, name, path)) == DATA


class Scripted(BaseHTTPRequestHandler):
    """A store that answers PUTs with `answers` in turn; None hangs up half-way. `puts` are counted, and by the clock
    `now_s` each takes `takes_s`."""

    answers: ClassVar[list[int | None]] = []
    puts: ClassVar[list[int]] = []
    takes_s: ClassVar[float] = 0.0
    now_s: ClassVar[float] = 0.0

    def do_PUT(self) -> None:
        size_bytes, answer = int(self.headers["Content-Length"]), self.answers.pop(0)
        self.puts.append(size_bytes)
        self.rfile.read(size_bytes if answer is not None else size_bytes // 2)
        Scripted.now_s += self.takes_s
        if answer is not None:
            self.send_response(answer)
            self.send_header("Content-Length", "0")
            self.end_headers()
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def scripted(service: Service) -> Iterator[type[Scripted]]:
    """Of the third part; the others go to the store."""
    Scripted.answers, Scripted.puts, Scripted.takes_s = [], [], 0.0
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def lead(upload: resources_pb2.Upload) -> None:
            upload.presigned_parts[2].url = f"http://127.0.0.1:{server.server_port}/"

        service.change = lead
        yield Scripted
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("answers", "puts"), [([403, 403], 2), ([400], 1), ([503, 403, 403], 3)])
def test_a_part_that_the_store_refuses_is_not_tried_for_ever(
    service: Service, scripted: type[Scripted], path: Path, answers: list[int | None], puts: int
) -> None:
    scripted.answers = list(answers)
    with pytest.raises(FailedPrecondition, match="the store refuses the part at 10485760") as raised:
        service.upload(path)
    assert raised.value.reason == "PART_REFUSED"
    assert raised.value.metadata["upload"].startswith(f"{DATASET}/uploads/")
    assert len(scripted.puts) == puts


def test_a_part_that_broke_off_late_is_sent_once_more_however_long_it_takes(
    service: Service, scripted: type[Scripted], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "OUTAGE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(uploads, "time", SimpleNamespace(monotonic=lambda: scripted.now_s))
    scripted.answers, scripted.takes_s = [None, 429, 200], 1.0
    with pytest.raises(MillraceError):  # what this server was given is in no store
        service.upload(path)
    assert scripted.puts == [MIN_PART_BYTES] * 3


def test_a_failure_ends_what_goes_on_beside_it_at_once(
    service: Service, scripted: type[Scripted], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Exception] = []

    def slow_digest(self: Any, size_bytes: int) -> str:
        part = uploads._Part(self._file, 0, size_bytes, self._over)
        try:
            while part.read(16):
                time.sleep(0.01)
        except Exception as error:
            ended.append(error)
            raise
        return ""

    monkeypatch.setattr(uploads._SendingParts, "_sha256", slow_digest)  # for three hours
    scripted.answers = [400]
    with pytest.raises(FailedPrecondition):
        service.upload(path)
    assert [type(error) for error in ended] == [uploads._Over]


def test_an_upload_that_was_aborted_meanwhile_is_not_begun_again(
    service: Service, scripted: type[Scripted], path: Path
) -> None:
    scripted.answers = [503]
    lead = service.change

    def abort_first(upload: resources_pb2.Upload) -> None:
        lead(upload)
        if service.started == 1:
            service.AbortUpload(pb.AbortUploadRequest(name=upload.name))

    service.change = abort_first
    with pytest.raises(NotFound, match="aborted meanwhile"):
        service.upload(path)


def test_a_local_store_has_no_such_way_and_nothing_is_begun(local: Service, path: Path) -> None:
    with pytest.raises(FailedPrecondition):
        local.upload(path)
    assert not local.store.folders(f"{DATASET}/uploads")
