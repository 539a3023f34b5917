"""Whether spans are exported, and what that costs who exports none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shared.logging_and_tracing import Tracing, is_wanted, tracing, tracing_environ
from shared.otlp_tracing import OtlpTracing
from shared.settings import SettingsError
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HERE = "http://127.0.0.1:4318"
CLIENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as one:
        yield one


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({ENDPOINT: HERE}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{HERE}/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({ENDPOINT: HERE, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: HERE, "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({ENDPOINT: HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_spans_are_exported_where_the_standard_variables_say_so(environ: dict[str, str], wanted: bool) -> None:
    assert is_wanted(environ) is wanted
    assert tracing_environ({**environ, "PATH": "/bin"}) == (environ if wanted else {})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({ENDPOINT: "127.0.0.1:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT='127.0.0.1:4317': use http://host:4318"),
        ({ENDPOINT: HERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTLP_PROTOCOL='grpc': use http/protobuf"),
        ({ENDPOINT: HERE, "OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER='zipkin': use otlp or none"),
    ],
)
def test_an_impossible_setting_is_refused_with_its_variable_and_the_remedy(
    environ: dict[str, str], expected: str
) -> None:
    with pytest.raises(SettingsError, match=expected):
        is_wanted(environ)


def test_a_number_out_of_bounds_is_refused_as_a_setting(receiver: OtlpReceiver) -> None:
    environ = {**os.environ, **receiver.environ, "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}
    program = "import os; from shared.logging_and_tracing import configure_tracing; configure_tracing('x', os.environ)"
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=240)
    assert "SettingsError: OpenTelemetry refuses one of the OTEL_* variables: " in ended.stderr


def test_who_exports_nothing_imports_nothing_of_it() -> None:
    program = (
        "import os, sys, shared.grpc_server\n"
        "import inference_service.serve.batcher, inference_service.serve.infer\n"
        "from shared.logging_and_tracing import configure_tracing\n"
        "configure_tracing('inference', os.environ)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=240)
    assert ended.stdout == "[]\n", ended.stderr


def test_switched_off_it_does_nothing() -> None:
    assert type(tracing()) is Tracing
    assert tracing().call("/a.B/C", [("traceparent", CLIENT)]) is None
    assert tracing().waiting(1) is None
    assert tracing().headers() is None
    with tracing().span("a"), tracing().batch([None], 1), tracing().received("b", {"traceparent": CLIENT}):
        tracing().describe(rows=1)


@pytest.fixture
def exporting(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpTracing]:
    for name, value in receiver.environ.items():
        monkeypatch.setenv(name, value)
    made = OtlpTracing("test")
    yield made
    made.close()


def parent_of(exporting: OtlpTracing, receiver: OtlpReceiver, *metadata: tuple[str, str | bytes]) -> tuple[str, str]:
    """The trace and the parent of a call that comes with this."""
    call = exporting.call("/a.B/C", metadata)
    call.end("OK")
    trace = call.ids["trace_id"]
    return trace, receiver.wait_for(trace, "a.B/C")["a.B/C"].parent


def test_a_call_goes_on_in_its_clients_trace(exporting: OtlpTracing, receiver: OtlpReceiver) -> None:
    metadata: list[tuple[str, str | bytes]] = [
        ("traceparent", CLIENT),
        ("tracestate", "one=1"),
        ("tracestate", "two=2"),
        ("x-bin", b"\0"),
    ]
    assert parent_of(exporting, receiver, *metadata) == ("a" * 32, "b" * 16)
    (span,) = receiver.spans("a" * 32)
    assert (span.kind, span.state) == ("SERVER", "one=1,two=2")
    assert span.attributes["rpc.method"] == "C"
    assert span.resource["service.name"] == "millrace-test"
    assert span.resource["process.pid"] == os.getpid()


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        "zz",
        f"00-{'a' * 31}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-01-more",
        f"00-{'a' * 32}-{'b' * 16}-1",
        "x" * 100_000,
    ],
)
def test_a_malformed_parent_is_none_and_its_state_with_it(
    exporting: OtlpTracing, receiver: OtlpReceiver, malformed: str
) -> None:
    trace, parent = parent_of(exporting, receiver, ("traceparent", malformed), ("tracestate", "one=1"))
    assert trace != "a" * 32
    assert parent == ""
    assert receiver.spans(trace)[0].state == ""


def test_two_parents_are_none(exporting: OtlpTracing, receiver: OtlpReceiver) -> None:
    assert parent_of(exporting, receiver, ("traceparent", CLIENT), ("traceparent", CLIENT))[1] == ""


def test_who_is_not_recorded_begins_no_spans_anywhere(exporting: OtlpTracing, receiver: OtlpReceiver) -> None:
    call = exporting.call("/a.B/C", [("traceparent", CLIENT.removesuffix("1") + "0")])
    assert call.ids["trace_id"] == "a" * 32  # its logs can be found all the same
    waiting = exporting.waiting(1)
    with exporting.span("part"), exporting.batch([waiting], 1):
        assert exporting.headers() is None
        with exporting.received("model", exporting.headers()):
            exporting.parts(0, infer=1.0)
    call.end("OK")
    last, _ = parent_of(exporting, receiver)
    assert [one.trace for one in receiver.spans()] == [last]


def test_only_a_servers_fault_is_one(exporting: OtlpTracing, receiver: OtlpReceiver) -> None:
    for status, failed in (("OK", False), ("INVALID_ARGUMENT", False), ("INTERNAL", True), ("CANCELLED", False)):
        call = exporting.call("/a.B/C", [])
        call.end(status, "it broke")
        trace = call.ids["trace_id"]
        assert receiver.wait_for(trace, "a.B/C")["a.B/C"].failed is failed, status


def test_neither_a_call_nor_closing_waits_for_a_receiver_that_hangs(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in receiver.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
    exporting = OtlpTracing("test")
    receiver.may_answer.clear()
    began_s = time.perf_counter()
    for _ in range(10_000):  # many more than its queue holds
        exporting.call("/a.B/C", []).end("OK")
    exporting.close(0.5)
    assert time.perf_counter() - began_s < 90.0  # a wait for the receiver would take 120 s
