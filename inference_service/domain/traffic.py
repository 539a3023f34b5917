"""How a deployment's requests are shared out beside the weights: by a header, and copies to a shadow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inference_service.domain.request_parameters import Parameters
from inference_service.domain.version_policy import VersionPolicy
from shared.durable import Durable
from shared.errors import invalid_field, invalid_fields

MAX_WEIGHT = 1000
MAX_WEIGHTS = 1000
MAX_ROUTES = 20
MAX_VALUE = 200
HEADER = re.compile(r"[a-z0-9_.-]{1,100}")
HEADERS = "headers"
# As much as gRPC takes of a call's own.
MAX_HEADERS = 16_384


@dataclass(frozen=True)
class HeaderRoute(Durable):
    """A request that names no version and whose `header`, in small letters, is exactly `value` goes to `version`."""

    header: str
    value: str
    version: str


@dataclass(frozen=True)
class Shadow(Durable):
    """`version` gets copies of `percent` of the requests; nobody gets its answers."""

    version: str
    percent: int


@dataclass(frozen=True, kw_only=True)
class TrafficChange:
    """What a client wishes to be otherwise; None: as it is. A shadow of 0 % is none."""

    weights: Mapping[str, int] | None = None
    routes: tuple[HeaderRoute, ...] | None = None
    shadow: Shadow | None = None
    policy: VersionPolicy | None = None


def check_change(change: TrafficChange) -> TrafficChange:
    """The change, or `InvalidArgument` naming every field that is out of range."""
    problems: list[tuple[str, object, str]] = []
    if change.weights is not None:
        problems += [
            (f"deployment.traffic.weights[{number}]", weight, f"use 0 to {MAX_WEIGHT}")
            for number, weight in sorted(change.weights.items())
            if not 0 <= weight <= MAX_WEIGHT
        ]
        if not any(change.weights.values()):
            problems.append(("deployment.traffic.weights", dict(change.weights), "give one version a weight at least"))
    if change.routes is not None and len(change.routes) > MAX_ROUTES:
        problems.append(("deployment.traffic.routes", f"{len(change.routes)} routes", f"use at most {MAX_ROUTES}"))
    for place, route in enumerate((change.routes or ())[:MAX_ROUTES]):
        field = f"deployment.traffic.routes[{place}]"
        if not HEADER.fullmatch(route.header) or route.header.endswith("-bin"):
            problems.append((f"{field}.header", route.header, "use a name of a gRPC metadata key that is text"))
        if not 0 < len(route.value) <= MAX_VALUE:
            problems.append((f"{field}.value", route.value, f"use 1 to {MAX_VALUE} characters"))
    if change.shadow is not None and not 0 <= change.shadow.percent <= 100:
        problems.append(("deployment.traffic.shadow.percent", change.shadow.percent, "use 0 to 100; 0 is no shadow"))
    if problems:
        raise invalid_fields(problems)
    return change


def routed(routes: Sequence[HeaderRoute], headers: Mapping[str, str]) -> Iterable[str]:
    """The numbers of the versions that these headers lead to, in the order of the routes."""
    return (route.version for route in routes if headers.get(route.header) == route.value)


def headers_of(metadata: Iterable[tuple[str, str | bytes]], parameters: Parameters) -> dict[str, str]:
    """Those of the call, and over them those of the request's own parameter `headers`, a JSON object of strings.

    Raises `InvalidArgument` where that is none.
    """
    headers = {name: value for name, value in metadata if isinstance(value, str)}
    given = parameters.get(HEADERS)
    if given is None:
        return headers
    if isinstance(given, str) and len(given) > MAX_HEADERS:
        raise invalid_field(
            f"parameters.{HEADERS}", given, f"use a JSON object of strings of at most {MAX_HEADERS:,} characters"
        )
    try:
        own = json.loads(given) if isinstance(given, str) else None
    except (ValueError, RecursionError):  # what is nested too deeply is no object of strings either
        own = None
    if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
        raise invalid_field(f"parameters.{HEADERS}", given, 'use a JSON object of strings, e.g. {"x-canary": "yes"}')
    return headers | {name.lower(): value for name, value in own.items()}
