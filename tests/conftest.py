"""Fixtures of all suites: the stores to test on, one S3 server a session."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import uuid
from collections.abc import Generator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shared.settings import StoreSettings
from shared.storage.object_store import ensure_bucket
from tests.support.faults import fault_table
from tests.support.needs import Missing
from tests.support.node_client import installed_packages
from tests.support.s3_server import NoS3Server, S3Program, S3Server, find_program, name_under_test, running
from tests.support.scheduling import BySuite

# Ray replaces 127.0.0.1 by the machine's outer address and listens on all interfaces, unless every process of it has
# this before it starts: heads, services and whoever joins. The variable's name is history.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# Torch's threads wait for each other asleep, not spinning: in several processes they outnumber the CPUs, and a spinning
# thread keeps the one that it waits for from running. Torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The services of the tests demand no token but where a test names its own.
os.environ.pop("MILLRACE_TOKEN_FILE", None)

# How long one example takes says more of the machine's other work than of ours. Each run tries the same examples, so
# that one that fails has a cause in what was changed; others are drawn where a seed asks for them, as for an order.
# `make test` tries two fifths of Hypothesis's hundred, `make long` all of them. A test that needs a number names it.
ANY_TIME: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("millrace", **ANY_TIME, derandomize=True, max_examples=40)
settings.register_profile("thorough", **ANY_TIME, derandomize=True)
settings.register_profile("drawn", **ANY_TIME)
settings.load_profile("millrace")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from walking over a gigabyte of imported modules and collected tests: while they are
    made, and in each later collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> BySuite:
    """How several processes share the tests."""
    return BySuite(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a bare `async def test_…` on an event loop of its own, bounded by pytest's timeout."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    parameters = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in parameters}))
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests counted, whichever process ran them: `record_property("counted", text)`, and what the fault tests
    struck."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, text in report.user_properties:
                    if name == "counted":
                        terminalreporter.write_line(text)
    if table := fault_table(chain.from_iterable(terminalreporter.stats.values())):
        terminalreporter.section("what the fault tests struck")
        for line in table:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def s3_program() -> S3Program:
    """MinIO, or versitygw. Without either: fails if the environment demands one, as CI does, else skips."""
    try:
        return find_program()
    except NoS3Server as absent:
        absent.end_test()


@pytest.fixture(scope="session")
def node_packages() -> Path:
    """The folder `node_modules` of clients in Node.js. Without it: as `s3_program`."""
    try:
        return installed_packages()
    except Missing as absent:
        absent.end_test()


@pytest.fixture(scope="session")
def s3_server(s3_program: S3Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """`s3_program` on a loopback port."""
    with running(s3_program, tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def file_store(tmp_path: Path) -> StoreSettings:
    """An empty store in a directory of the test's own."""
    return StoreSettings(url=(tmp_path / "store").as_uri())


@pytest.fixture
def s3_store(s3_server: S3Server) -> StoreSettings:
    """An empty store on the S3 server, below a prefix of the test's own."""
    settings = s3_server.settings(f"s3://millrace/{uuid.uuid4().hex}")
    ensure_bucket(settings)
    return settings


@pytest.fixture(params=["file", pytest.param("s3", id=f"s3-{name_under_test()}")])
def store_settings(request: pytest.FixtureRequest) -> StoreSettings:
    """An empty store of either kind: a test that takes it runs once on each."""
    settings: StoreSettings = request.getfixturevalue(f"{request.param}_store")
    return settings
