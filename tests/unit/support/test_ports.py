"""Ports for servers that begin to listen a while after a test has chosen theirs."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from millrace_client.stack import supervisor as stack_supervisor
from tests.support import ports
from tests.support.ports import FIRST, LAST, free_ports


@pytest.fixture
def port() -> int:
    """A port that the counter of all tests gives to this one, so that it may be bound."""
    (port,) = free_ports(1)
    return port


@pytest.fixture(autouse=True)
def counter(port: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of the test's own. It gives ports that other tests may have, so none but `port` may be bound."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("counter")))
    is_free = ports._is_free
    monkeypatch.setattr(ports, "_is_free", lambda one: one != port or is_free(one))


def test_no_test_is_given_a_port_that_a_stack_may_take() -> None:
    assert set(range(FIRST, LAST)).isdisjoint(stack_supervisor.PORTS)


def test_no_port_is_given_twice() -> None:
    given = [*free_ports(3), *free_ports(1), *free_ports(2)]
    assert len(set(given)) == 6
    assert all(FIRST <= port < LAST for port in given)


def test_no_port_is_one_that_the_system_gives_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda _: True)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    (tmp_path / "range").write_text(f"{FIRST + 3}\t60999\n")
    assert free_ports(3) == [FIRST + 1, FIRST + 2, FIRST]
    (tmp_path / "range").write_text("1024\t60999\n")  # where it gives all of them away, any is as good
    assert free_ports(1) == [FIRST + 1]


def test_a_port_that_is_taken_is_passed_over(port: int) -> None:
    free_ports(1)
    (counter,) = Path(tempfile.gettempdir()).iterdir()
    counter.write_text(str(port - 1))
    assert free_ports(1) == [port]
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        counter.write_text(str(port - 1))
        (found,) = free_ports(1)
    assert found == (port + 1 if port + 1 < ports._end() else FIRST)


def test_behind_the_last_port_the_first_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda _: True)
    (first,) = free_ports(1)
    (counter,) = Path(tempfile.gettempdir()).iterdir()
    counter.write_text(str(LAST - 2))
    assert free_ports(2) == [LAST - 1, FIRST]
    assert first == FIRST + 1


def test_where_too_few_are_free_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda port: port == FIRST + 7)
    with pytest.raises(RuntimeError, match="only 1 are free, and 2 are wanted"):
        free_ports(2)
