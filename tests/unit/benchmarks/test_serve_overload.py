"""What the serving bench makes of overload: its figures at twice and four times the sustained rate, and their bars."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from benchmarks import serve, serve_load
from benchmarks.serve_place import Place
from benchmarks.serve_report import BARS, report
from millrace_client.load import LATE, OK, Measured, Outcome

SECONDS, CAPACITY = 2.0, 100


class Clients:
    """Those of a server that answers `CAPACITY` a second, and refuses the others, but for one in a hundred at four
    times the rate, which is late."""

    address = "nowhere:0"

    def __init__(self) -> None:
        self.rates: list[float] = []

    def in_clients(self, task: Any, _address: str, rate: float, seconds: float, deadline_s: float, _seed: int) -> Any:
        assert (task, deadline_s) == (serve_load.opened_counting_cpu, serve.OVERLOAD_DEADLINE_S)
        self.rates.append(rate)
        arrivals, answered = round(rate * seconds), round(min(rate, CAPACITY) * seconds)
        late = arrivals // 100 if rate > 3 * CAPACITY else 0
        statuses = [OK] * answered + [LATE] * late + ["RESOURCE_EXHAUSTED"] * (arrivals - answered - late)
        outcomes = [Outcome(status, 0.0, 0.0, 0.01 if status == OK else 0.002) for status in statuses]
        return Measured(seconds, 1, outcomes), 0.5 * (seconds + serve_load.WARM_UP_S)


def test_overload_is_measured_at_twice_and_four_times_the_rate_and_clients_are_distinguished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_sustainable", lambda *_: float(CAPACITY))
    clients = Clients()
    figures = serve._overload(cast(Place, clients), 2, SECONDS)
    assert clients.rates == [100.0, 200.0, 400.0] * 2
    assert (figures["goodput_share"], figures["goodput_share_at_4x"]) == (1.0, 1.0)
    assert (figures["late_share"], figures["late_share_at_4x"]) == (0.0, 0.01)
    assert figures["refusal_p99_ms_at_4x"] == pytest.approx(2.0)
    assert figures["overload_client_cpus"] == figures["overload_client_cpus_at_4x"] == 0.5
    met = report(figures, {})["met"]
    assert (met["late_share"], met["late_share_at_4x"], met["goodput_share_at_4x"]) == (True, False, True)


@pytest.mark.parametrize(("share", "met"), [(0.84, False), (0.85, True)])
@pytest.mark.parametrize("name", ["goodput_share", "goodput_share_at_4x"])
def test_goodput_under_overload_is_to_be_85_percent(name: str, share: float, met: bool) -> None:
    assert report({name: share}, {})["met"] == {name: met}
    assert BARS[name][1] == "at least"


def test_the_cpu_time_of_the_clients_is_measured_beside_what_they_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(1.0, 1, [])

    def busy(*_: object) -> Measured:
        until_s = time.process_time() + 0.02
        while time.process_time() < until_s:
            pass
        return measured

    monkeypatch.setattr(serve_load, "opened", busy)
    seen, cpu_s = serve_load.opened_counting_cpu("nowhere:0", 1.0, 1.0, 1.0, 0)
    assert seen is measured
    assert cpu_s >= 0.02
