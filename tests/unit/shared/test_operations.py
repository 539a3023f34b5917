"""`google.longrunning.Operations` over whatever keeps them: waiting ends in time, names and pages are checked."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2

from shared import streaming
from shared.errors import InvalidArgument, NotFound, Unavailable, Unimplemented, not_found
from shared.storage import ObjectStore
from shared.storage.object_store import KEYS_A_LISTING
from shared.streaming import OperationsServicer, operation_ids_after
from tests.support.counting_store import CountingStore


class Source:
    """Operations that are done once they were asked for so many times."""

    # Their responses, got and listed.
    whole = brief = b""

    def __init__(self, **done_after: int) -> None:
        self.left = dict(done_after)
        self.cancelled: list[str] = []

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
        operation_id = name.removeprefix("operations/")
        if operation_id not in self.left:
            raise not_found(name)
        self.left[operation_id] -= 1
        operation = operations_pb2.Operation(name=name, done=self.left[operation_id] < 0)
        operation.response.value = self.brief if brief else self.whole
        return operation

    def follow(self, name: str) -> Followed:
        return Followed(self, name)

    def ids_after(self, after: str, most: int) -> list[str]:
        return sorted(one for one in self.left if one > after)[:most]

    def cancel(self, name: str) -> None:
        self.get(name)
        self.cancelled.append(name)


class Followed:
    """An operation of a `Source`, without a change but its end."""

    number = 1

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name

    def read(self) -> operations_pb2.Operation:
        return self._source.get(self._name)


class Context:
    """A call with so many seconds left, or without a deadline."""

    def __init__(self, remaining: float | None = None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining


def call(source: Source, method: str, request: Any, context: Context | None = None) -> Any:
    servicer: Any = OperationsServicer(source)
    return asyncio.run(getattr(servicer, method)(request, context or Context()))


def wait(name: str, seconds: float | None) -> operations_pb2.WaitOperationRequest:
    if seconds is None:
        return operations_pb2.WaitOperationRequest(name=name)
    timeout = duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    return operations_pb2.WaitOperationRequest(name=name, timeout=timeout)


@pytest.fixture
def waits_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a test may take."""
    monkeypatch.setattr(streaming, "LONGEST_WAIT_S", 10_000.0)


@pytest.mark.usefixtures("waits_that_never_end")
def test_waiting_returns_as_soon_as_it_is_done() -> None:
    operation = call(Source(o1=2), "WaitOperation", wait("operations/o1", None))

    assert operation.done


@pytest.mark.usefixtures("waits_that_never_end")
@pytest.mark.parametrize(
    ("seconds", "remaining"),
    [(0.2, None), (0.0, None), (-5.0, None), (None, 0.1), (3600.0, 0.0)],
    ids=["its timeout", "no time", "negative", "hardly any left", "none left"],
)
def test_waiting_ends_with_the_present_state_when_time_is_up(seconds: float | None, remaining: float | None) -> None:
    operation = call(Source(o1=10**6), "WaitOperation", wait("operations/o1", seconds), Context(remaining))

    assert not operation.done


class LoopAhead(asyncio.SelectorEventLoop):
    """An event loop whose clock a test sets ahead."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


@pytest.mark.usefixtures("waits_that_never_end")
def test_waiting_ends_with_the_present_state_before_the_callers_deadline() -> None:
    loop = LoopAhead()

    class UntilDeadline(Source):
        def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
            operation = super().get(name, brief=brief)
            if self.left["o1"] == 3:  # the second read, while the call waits for a change
                loop.ahead_s = 1000.0
            return operation

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        servicer: Any = OperationsServicer(UntilDeadline(o1=5))
        operation = runner.run(servicer.WaitOperation(wait("operations/o1", 5000.0), Context(1000.0)))

    assert not operation.done


def test_a_store_that_is_silent_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_READ_S", 0.1)
    answers = threading.Event()

    class Unresponsive(Source):
        def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
            assert answers.wait(60)
            return super().get(name, brief=brief)

    try:
        with pytest.raises(Unavailable, match="does not answer"):
            call(Unresponsive(o1=0), "WaitOperation", wait("operations/o1", 0.05))
        assert not answers.is_set()
    finally:
        answers.set()


@pytest.mark.parametrize("seconds", [2**62, -(2**62)], ids=["for ever", "since for ever"])
def test_a_timeout_that_no_clock_has_is_no_fault_of_ours(seconds: int) -> None:
    timeout = duration_pb2.Duration(seconds=seconds)
    request = operations_pb2.WaitOperationRequest(name="operations/o1", timeout=timeout)

    assert call(Source(o1=0), "WaitOperation", request).done


@pytest.mark.parametrize("method", ["GetOperation", "WaitOperation", "CancelOperation"])
def test_names_are_checked_and_unknown_operations_not_found(method: str) -> None:
    request = {"GetOperation": "Get", "WaitOperation": "Wait", "CancelOperation": "Cancel"}[method]
    make = getattr(operations_pb2, f"{request}OperationRequest")

    for name in ("", "o1", "operations/", "operations/O1", "operations/a/b"):
        with pytest.raises(InvalidArgument) as refused:
            call(Source(o1=0), method, make(name=name))
        assert refused.value.fields[0][0] == "name"
    with pytest.raises(NotFound, match="operations/o2"):
        call(Source(o1=0), method, make(name="operations/o2"))


def test_pages_of_operations_cover_all_of_them() -> None:
    source, seen, token = Source(**{f"o{number}": 0 for number in range(7)}), [], ""
    while True:
        request = operations_pb2.ListOperationsRequest(name="operations", page_size=3, page_token=token)
        answer = call(source, "ListOperations", request)
        seen += [operation.name for operation in answer.operations]
        token = answer.next_page_token
        if not token:
            break

    assert seen == [f"operations/o{number}" for number in range(7)]


def test_pages_of_large_operations_are_messages_that_any_client_takes() -> None:
    source = Source(**{f"o{number}": 0 for number in range(7)})
    source.whole, source.brief = b"x" * 10**7, b"x" * 10**6
    pages: list[operations_pb2.ListOperationsResponse] = []
    while not pages or pages[-1].next_page_token:
        token = pages[-1].next_page_token if pages else ""
        pages.append(call(source, "ListOperations", operations_pb2.ListOperationsRequest(page_token=token)))

    assert [len(page.operations) for page in pages] == [3, 3, 1]
    assert [one.name for page in pages for one in page.operations] == [f"operations/o{n}" for n in range(7)]
    assert (
        len(call(source, "GetOperation", operations_pb2.GetOperationRequest(name="operations/o1")).response.value)
        == 10**7
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "datasets"), ("filter", "done = true"), ("page_token", "%"), ("page_token", "Li4veA==")],
)
def test_an_unsupported_option_of_a_list_is_refused_by_its_field(field: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        call(Source(o1=0), "ListOperations", operations_pb2.ListOperationsRequest(**{field: value}))

    assert refused.value.fields[0][0] == field


def test_a_cancel_reaches_the_source_and_deleting_is_not_served() -> None:
    source = Source(o1=5)

    call(source, "CancelOperation", operations_pb2.CancelOperationRequest(name="operations/o1"))
    with pytest.raises(Unimplemented):
        call(source, "DeleteOperation", operations_pb2.DeleteOperationRequest(name="operations/o1"))

    assert source.cancelled == ["operations/o1"]


def record(store: ObjectStore, *ids: str) -> None:
    for operation_id in ids:
        store.put(f"operations/{operation_id}/pointer.json", b"{}")


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_the_ids_of_a_service_come_in_turns_beside_those_of_others(store: ObjectStore, most: int) -> None:
    own = ["import-0", "import-a", "import-f", "transform-1", "transform-9"]
    record(store, *own, "deploy-1", "importer-1", "rollout-1", "transforms-1", "zeta-1")
    found: list[str] = []
    while some := operation_ids_after(store, ("transform-", "import-"), found[-1] if found else "", most):
        assert len(some) <= most
        found += some

    assert found == own


def test_a_page_of_ids_costs_the_same_among_many(store: ObjectStore) -> None:
    def requests(count: int) -> int:
        record(store, *(f"import-{number:04x}" for number in range(count)))
        counting = CountingStore(store)
        assert len(operation_ids_after(counting, ("import-", "transform-"), "import-0003", 5)) == 5
        return len(counting.requests)

    assert requests(10) == requests(2 * KEYS_A_LISTING) == 1
