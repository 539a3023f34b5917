"""`make bench-serve`: throughput, latency and overload behaviour of a served model.

The peers are the bare model, Ray Serve's own gRPC ingress and MLServer. All serve the same ResNet-18 with the same
weights, on one thread, in batches of at most 32, to the same clients in their own process, all on loopback. Contenders
take turns, the first turn warms up; ratios are of medians. The last line is one JSON object, which lists the bars that
are met.

    python -m benchmarks.serve [--repeats 3] [--seconds 5] [--only peers model alone overload swaps profile]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import serve_load, serve_mlserver, serve_ray
from benchmarks.serve_place import MAX_BATCH, Place, mlserver, our_place, ray_serve
from benchmarks.serve_profile import profile
from benchmarks.serve_report import report, spread
from benchmarks.serve_statistics import ServiceStatistics
from benchmarks.serve_swaps import KILLS, ROLLOUTS, swaps
from benchmarks.signals import exit_on_signals
from inference_service.domain.batch_policy import buckets
from millrace_client.load import LATE, OK, Measured

PARTS = ("model", "alone", "overload", "profile", "peers", "swaps")
IN_FLIGHT = 64
# The overload factors, with the suffixes of their figures, and the deadline of each request.
OVERLOADS, OVERLOAD_DEADLINE_S = {2.0: "", 4.0: "_at_4x"}, 0.2
# The statuses with which a server above its limit refuses; any other is an error.
REFUSED = ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
# A rate is sustained if this share is answered in time; the tried rates are shares of the rate of a closed loop of
# `IN_FLIGHT`.
SUSTAINED, SHARES_TRIED = 0.99, (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3)
ALONE_RUNS = 200
TRIED_FOR_S = 3.0
# The tolerance of logits between batch sizes: kernels of other sizes add in another order.
TOLERANCE = 1e-4
CHECKED_ROWS = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-serve")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="of the part swaps")
    parser.add_argument("--kills", type=int, default=KILLS, help="of the part swaps")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    exit_on_signals()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as scratch, our_place(Path(scratch)) as place:
        _check(place, "millrace", place.address)
        if "model" in given.only:
            figures |= _model(place, given.repeats, given.seconds)
        if "alone" in given.only:
            figures |= _alone(place, given.repeats, given.seconds)
        if "overload" in given.only:
            figures |= _overload(place, given.repeats, given.seconds)
        if "profile" in given.only:
            table, profiled = profile(place, given.seconds)
            print(table, flush=True)
            figures["profile"] = profiled
        if "peers" in given.only:
            figures |= _peers(place, given.repeats, given.seconds)
        if "swaps" in given.only:
            figures |= swaps(place, given.rollouts, given.kills)
    print(json.dumps(report(figures, {"repeats": given.repeats, "seconds": given.seconds, "in_flight": IN_FLIGHT})))


def _check(place: Place, name: str, address: str) -> None:
    """Check that this contender gives the model's own answers."""
    given = place.in_clients(serve_load.logits, address, CHECKED_ROWS)
    wanted = place.bare("logits", serve_load.images(serve_load.DISTINCT)[:CHECKED_ROWS])
    if not np.allclose(given, wanted, rtol=0, atol=TOLERANCE):
        raise SystemExit(f"bench-serve: {name} answers otherwise than the model, by {np.abs(given - wanted).max()}")


def _in_turn(repeats: int, contenders: dict[str, Callable[[], float]], unit: str) -> dict[str, list[float]]:
    """Return the figures of each contender, turn by turn, without the first turn."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats + 1):
        for name, run in contenders.items():
            value = run()
            if number:
                found[name].append(value)
                print(f"{name}: {value:,.1f} {unit}", flush=True)
    return found


def _throughput(place: Place, address: str, seconds: float) -> float:
    measured: Measured = place.in_clients(serve_load.closed, address, IN_FLIGHT, seconds)
    _all_answered(measured)
    return measured.answered_per_s


def _all_answered(measured: Measured) -> None:
    if set(measured.statuses) != {OK}:
        raise SystemExit(f"bench-serve: not every request was answered: {measured.statuses}")


def _answered_or_refused(measured: Measured) -> None:
    if others := set(measured.statuses) - {OK, LATE, *REFUSED}:
        raise SystemExit(f"bench-serve: {', '.join(sorted(others))} is no refusal: {measured.statuses}")


def _peers(place: Place, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure each peer with the best of the tried batch waits."""
    with ExitStack() as stack:
        waits: dict[str, float] = {}
        waits["mlserver"] = _best(serve_mlserver.BATCH_WAITS_S, partial(_try_mlserver, place))
        ray_address, set_wait = stack.enter_context(ray_serve(place.weights))
        waits["ray_serve"] = _best(serve_ray.BATCH_WAITS_S, partial(_try_ray_serve, place, ray_address, set_wait))
        set_wait(waits["ray_serve"])
        addresses = {
            "millrace": place.address,
            "ray_serve": ray_address,
            "mlserver": stack.enter_context(mlserver(place.weights, waits["mlserver"])),
        }
        for name, address in addresses.items():
            _check(place, name, address)
        contenders: dict[str, Callable[[], float]] = {
            name: partial(_throughput, place, address, seconds) for name, address in addresses.items()
        }
        rates = _in_turn(repeats, contenders, "answers/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "throughput_vs_ray_serve": round(medians["millrace"] / medians["ray_serve"], 2),
        "throughput_vs_mlserver": round(medians["millrace"] / medians["mlserver"], 2),
        "answers_per_s": {name: round(value, 1) for name, value in medians.items()},
        "spread_answers_per_s": {name: spread(values) for name, values in rates.items()},
        "peers_batch_wait_s": waits,
    }


def _best(waits_s: Sequence[float], rate: Callable[[float], float]) -> float:
    tried = {wait_s: rate(wait_s) for wait_s in waits_s}
    print(f"tried: {tried}", flush=True)
    return max(tried, key=lambda wait_s: tried[wait_s])


def _try_mlserver(place: Place, wait_s: float) -> float:
    with mlserver(place.weights, wait_s) as address:
        return _throughput(place, address, TRIED_FOR_S)


def _try_ray_serve(place: Place, address: str, set_wait: Callable[[float], None], wait_s: float) -> float:
    set_wait(wait_s)
    return _throughput(place, address, TRIED_FOR_S)


def _model(place: Place, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure ours at `IN_FLIGHT`, then the bare model at its best batch size, and at the served batch sizes."""
    served: Counter[int] = Counter()
    last: dict[int, int] = {}

    def ours() -> float:
        counted = ServiceStatistics(place.address, place.metrics, serve_load.MODEL)
        rate = _throughput(place, place.address, seconds)
        last.clear()
        last.update(counted.stretch().batches)
        served.update(last)
        return rate

    def bare_best() -> float:
        return max(float(place.bare("limit_per_s", {size: 1})) for size in buckets(MAX_BATCH))

    def bare_served() -> float:
        return float(place.bare("limit_per_s", dict(last)))

    contenders = {"served": ours, "model_limit": bare_best, "model_limit_served_batches": bare_served}
    rates = _in_turn(repeats, contenders, "images/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "share_of_model_limit": round(medians["served"] / medians["model_limit"], 3),
        "share_of_model_limit_served_batches": round(medians["served"] / medians["model_limit_served_batches"], 3),
        "served_images_per_s": round(statistics.median(rates["served"]), 1),
        "served_images_per_s_spread": spread(rates["served"]),
        "model_limit_images_per_s": round(statistics.median(rates["model_limit"]), 1),
        "model_limit_images_per_s_spread": spread(rates["model_limit"]),
        "batches_by_rows": {str(size): count for size, count in sorted(served.items())},
    }


def _alone(place: Place, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure one request at a time, from the client's call to its answer."""

    def ours() -> float:
        measured: Measured = place.in_clients(serve_load.closed, place.address, 1, seconds)
        _all_answered(measured)
        return measured.latency_ms(OK)["p50"]

    def bare() -> float:
        return float(statistics.median(place.bare("seconds", 1, ALONE_RUNS))) * 1000

    took = _in_turn(repeats, {"p50": ours, "model": bare}, "ms")
    return {
        "p50_vs_model": round(statistics.median(took["p50"]) / statistics.median(took["model"]), 2),
        "p50_ms": round(statistics.median(took["p50"]), 2),
        "p50_ms_spread": spread(took["p50"]),
        "model_ms": round(statistics.median(took["model"]), 2),
        "model_ms_spread": spread(took["model"]),
    }


def _overload(place: Place, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure arrivals at two and four times the sustainable rate, in turn with arrivals at that rate.

    The clients share the machine with the service, so their CPU time is reported too.
    """
    rate = _sustainable(place, seconds)
    clients_cpus: dict[float, list[float]] = {}

    def opened(factor: float, seed: int) -> Measured:
        measured: Measured
        measured, cpu_s = place.in_clients(
            serve_load.opened_counting_cpu, place.address, factor * rate, seconds, OVERLOAD_DEADLINE_S, seed
        )
        clients_cpus.setdefault(factor, []).append(cpu_s / (seconds + serve_load.WARM_UP_S))
        print(f"{factor * rate:,.0f} arrivals/s: {measured.as_dict()}, {cpu_s:.2f} s of CPU by clients", flush=True)
        _answered_or_refused(measured)
        return measured

    turns = [{factor: opened(factor, number) for factor in (1.0, *OVERLOADS)} for number in range(repeats)]
    figures: dict[str, Any] = {
        "sustainable_per_s": round(rate, 1),
        "sustained_answers_per_s": round(statistics.median(turn[1.0].answered_per_s for turn in turns), 1),
        "sustained_client_cpus": round(statistics.median(clients_cpus[1.0]), 2),
    }
    for factor, suffix in OVERLOADS.items():
        together = Measured(seconds * repeats, 1, [one for turn in turns for one in turn[factor].outcomes])
        refused = [status for status in together.statuses if status in REFUSED]
        shares = [turn[factor].answered_per_s / turn[1.0].answered_per_s for turn in turns]
        figures |= {
            f"late_share{suffix}": round(together.share(LATE), 5),
            f"refusal_p99_ms{suffix}": together.latency_ms(*refused).get("p99", 0.0),
            f"goodput_share{suffix}": round(statistics.median(shares), 3),
            f"goodput_share{suffix}_spread": spread(shares),
            f"overload_statuses{suffix}": together.statuses,
            f"overload_latency_ms{suffix}": {status: together.latency_ms(status) for status in together.statuses},
            f"overload_client_behind_ms{suffix}": together.behind_ms(),
            f"overload_client_cpus{suffix}": round(statistics.median(clients_cpus[factor]), 2),
        }
    return figures


def _sustainable(place: Place, seconds: float) -> float:
    """Return the highest tried rate at which `SUSTAINED` of the requests are answered within the deadline."""
    most = _throughput(place, place.address, seconds)
    for share in SHARES_TRIED:
        measured: Measured = place.in_clients(
            serve_load.opened, place.address, share * most, seconds, OVERLOAD_DEADLINE_S, 0
        )
        print(f"{share * most:,.0f} arrivals/s, {measured.share(OK):.1%} answered in time", flush=True)
        _answered_or_refused(measured)
        if measured.share(OK) >= SUSTAINED:
            return share * most
    print(f"none of these can be sustained; going on with {share * most:,.0f} arrivals/s", flush=True)
    return share * most


if __name__ == "__main__":
    main()
