"""A deployment: its checkpoint, scale, traffic and state.

Transitions are functions from one value to the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from inference_service.domain.rollout import Rollout, RolloutState
from inference_service.domain.signature import Parameters, Signature
from shared.durable import Durable, as_state, fields_of, stored_as
from shared.errors import Cancelled, Conflict, MillraceError, invalid_field, invalid_fields, not_found

# --- Version policy ---
# The versions of a deployment that stay loaded without traffic.

MAX_LATEST = 100
MAX_NAMED = 100


class Kept(StrEnum):
    LATEST = "LATEST"
    ALL = "ALL"
    NAMED = "NAMED"


@dataclass(frozen=True)
class VersionPolicy:
    """Which versions stay loaded.

    `count` is the number of newest versions, for LATEST; `named` are version numbers, for NAMED.
    """

    kept: Kept = Kept.LATEST
    count: int = 1
    named: tuple[str, ...] = ()

    def keeps(self, numbers: Iterable[str]) -> Collection[str]:
        """Return those of `numbers` that stay."""
        ordered = sorted(numbers, key=int)
        if self.kept is Kept.ALL:
            return ordered
        if self.kept is Kept.NAMED:
            return [number for number in ordered if number in self.named]
        return ordered[-self.count :]

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> VersionPolicy:
        return VersionPolicy(Kept(record["kept"]), record["count"], tuple(record["named"]))


LATEST = VersionPolicy()


def latest_policy(field: str, count: int) -> VersionPolicy:
    """Return the policy LATEST; raise `InvalidArgument`."""
    if not 0 <= count <= MAX_LATEST:
        raise invalid_field(f"{field}.latest.count", count, f"use 0 to {MAX_LATEST}; 0 means 1")
    return VersionPolicy(Kept.LATEST, count=count or 1)


def named_policy(field: str, numbers: Collection[str]) -> VersionPolicy:
    """Return the policy NAMED; raise `InvalidArgument`."""
    if len(numbers) > MAX_NAMED:
        raise invalid_field(f"{field}.named.versions", f"{len(numbers)} versions", f"name at most {MAX_NAMED}")
    for number in numbers:
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and number == str(int(number))):
            raise invalid_field(f"{field}.named.versions", number, "use the numbers of versions: 1, 2, 3, …")
    return VersionPolicy(Kept.NAMED, named=tuple(numbers))


# --- Scaling ---
# The replicas of a version, and the resources of each.

MAX_REPLICAS = 64
MAX_CPUS = 256.0
MIN_SHARE = 0.01
MAX_UP_S = 600.0
MAX_DOWN_S = 86_400.0
MAX_ROWS = 1_000_000
DEFAULT_UP_S = 5.0
DEFAULT_DOWN_S = 300.0

Problem = tuple[str, object, str]


@dataclass(frozen=True, kw_only=True)
class Autoscaling(Durable):
    """Scales the replicas with the load.

    One replica for each `rows_per_replica` rows that wait or are being computed, within `min_replicas` and
    `max_replicas`. Replicas are added after too few for `up_after_s`, and removed after too many for `down_after_s`.
    """

    min_replicas: int
    max_replicas: int
    rows_per_replica: int
    up_after_s: float = DEFAULT_UP_S
    down_after_s: float = DEFAULT_DOWN_S

    def within(self, replicas: int) -> int:
        return min(max(replicas, self.min_replicas), self.max_replicas)

    @staticmethod
    def from_record(record: Mapping[str, Any] | None) -> Autoscaling | None:
        return Autoscaling(**fields_of(Autoscaling, record)) if record else None


def autoscaling_problems(autoscaling: Autoscaling) -> list[Problem]:
    """Return the problems of out-of-range fields: field, value and remedy each."""
    low = autoscaling.min_replicas
    found: list[Problem] = []
    if not 1 <= low <= MAX_REPLICAS:
        found.append(("spec.autoscaling.min_replicas", low, f"use 1 to {MAX_REPLICAS}; 0 means 1"))
        low = 1
    if not low <= autoscaling.max_replicas <= MAX_REPLICAS:
        found.append(("spec.autoscaling.max_replicas", autoscaling.max_replicas, f"use {low} to {MAX_REPLICAS}"))
    if not 1 <= autoscaling.rows_per_replica <= MAX_ROWS:
        remedy = f"use 1 to {MAX_ROWS}; 0 means max_batch_size"
        found.append(("spec.autoscaling.rows_per_replica", autoscaling.rows_per_replica, remedy))
    if not 0 <= autoscaling.up_after_s <= MAX_UP_S:
        found.append(("spec.autoscaling.scale_up_after", autoscaling.up_after_s, f"use 0 to {MAX_UP_S:g} s"))
    if not 0 <= autoscaling.down_after_s <= MAX_DOWN_S:
        found.append(("spec.autoscaling.scale_down_after", autoscaling.down_after_s, f"use 0 to {MAX_DOWN_S:g} s"))
    return found


def share_problems(cpus: float | None, gpus: float) -> list[Problem]:
    """Return the problems of a replica's CPU and GPU share."""
    found: list[Problem] = []
    # NaN is in no range.
    if cpus is not None and not MIN_SHARE <= cpus <= MAX_CPUS:
        remedy = f"use {MIN_SHARE:g} to {MAX_CPUS:g}, or leave it out for threads_per_replica"
        found.append(("spec.cpus_per_replica", cpus, remedy))
    if gpus != 0 and not MIN_SHARE <= gpus <= 1:
        found.append(("spec.gpus_per_replica", gpus, f"use 0 for none, or {MIN_SHARE:g} to 1: a model is on one GPU"))
    return found


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The scale of one version in Ray Serve.

    `initial` replicas, constant unless there is `autoscaling`, with CPUs and GPUs for each.
    """

    initial: int
    cpus: float
    gpus: float = 0.0
    autoscaling: Autoscaling | None = None


# --- Traffic ---
# How requests are routed besides the weights: by a header, and as copies to a shadow.

MAX_WEIGHT = 1000
MAX_WEIGHTS = 1000
MAX_ROUTES = 20
MAX_VALUE = 200
HEADER = re.compile(r"[a-z0-9_.-]{1,100}")
HEADERS = "headers"
# gRPC's limit for a call's metadata.
MAX_HEADERS = 16_384


@dataclass(frozen=True)
class HeaderRoute(Durable):
    """Routes requests by a header.

    A request that names no version goes to `version` if its `header`, in lower case, is exactly `value`.
    """

    header: str
    value: str
    version: str


@dataclass(frozen=True)
class Shadow(Durable):
    """A shadow: `version` gets copies of `percent` of the requests, and its answers are discarded."""

    version: str
    percent: int


@dataclass(frozen=True, kw_only=True)
class TrafficChange:
    """A client's change of the traffic; None leaves a field as it is.

    A shadow of 0 % removes the shadow.
    """

    weights: Mapping[str, int] | None = None
    routes: tuple[HeaderRoute, ...] | None = None
    shadow: Shadow | None = None
    policy: VersionPolicy | None = None


def check_change(change: TrafficChange) -> TrafficChange:
    """Return the change, or raise `InvalidArgument` naming every out-of-range field."""
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
    """Return the versions that these headers route to, in the order of the routes."""
    return (route.version for route in routes if headers.get(route.header) == route.value)


def headers_of(metadata: Iterable[tuple[str, str | bytes]], parameters: Parameters) -> dict[str, str]:
    """Merge the call's headers with those of the request.

    The request's parameter `headers`, a JSON object of strings, takes precedence. Raises `InvalidArgument` if it is no
    such object.
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
    except (ValueError, RecursionError):  # RecursionError: too deep nesting is no object of strings either
        own = None
    if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
        raise invalid_field(f"parameters.{HEADERS}", given, 'use a JSON object of strings, e.g. {"x-canary": "yes"}')
    return headers | {name.lower(): value for name, value in own.items()}


# --- Deployment ---
# A deployment's spec and state. Transitions are functions from one value to the next.

MAX_THREADS = 256
MAX_BATCH_SIZE = 1024
MAX_BATCH_DELAY_S = 1.0
MAX_QUEUED_ROWS = 1_000_000
DEFAULT_BATCH_SIZE = 32
DEFAULT_BATCH_DELAY_S = 0.002
DEFAULT_QUEUED_ROWS = 4096
FIRST_VERSION = "1"
MAX_PREDICTOR = 200
ALL_TRAFFIC = 100


#              UNLOADED
#                ▲ ▼
#  LOADING ──▶ READY ──▶ DELETING ──▶ GONE
#     ├──────▶ FAILED ─────▲ │          │ the same id may be created again, with a new uid
#     └────────────────────┘            └──▶ LOADING
class State(StrEnum):
    """A deployment's state.

    Only `GONE` has no counterpart in the API: such a deployment is NOT_FOUND.
    """

    LOADING = "LOADING"
    READY = "READY"
    FAILED = "FAILED"
    UNLOADED = "UNLOADED"
    DELETING = "DELETING"
    GONE = "GONE"


LIVE = frozenset({State.LOADING, State.READY})  # these have an application in Ray Serve


@dataclass(frozen=True, kw_only=True)
class Spec(Durable):
    """A deployment's spec, with defaults filled in.

    `checkpoint` is as the client named it, a job or a checkpoint. With `autoscaling`, `num_replicas` is the minimum. If
    `cpus_per_replica` is None, a replica takes `threads_per_replica` CPUs.
    """

    checkpoint: str
    num_replicas: int
    threads_per_replica: int
    max_batch_size: int
    max_batch_delay_s: float
    max_queued_rows: int
    version_policy: VersionPolicy = LATEST
    autoscaling: Autoscaling | None = None
    cpus_per_replica: float | None = None
    gpus_per_replica: float = 0.0
    # Whether rows with a NaN or an infinity that no step fills are answered; else they are refused.
    allow_non_finite: bool = False
    # Only for a program's checkpoint: `module:name` of the class in its bundle that serves it; empty: `Predictor` of
    # the program's module.
    predictor: str = ""

    def scale(self, replicas: int = 0) -> Scale:
        """Return a version's scale in Ray Serve.

        With autoscaling it starts with `replicas`, within the limits.
        """
        return Scale(
            initial=self.autoscaling.within(replicas) if self.autoscaling else self.num_replicas,
            cpus=self.threads_per_replica if self.cpus_per_replica is None else self.cpus_per_replica,
            gpus=self.gpus_per_replica,
            autoscaling=self.autoscaling,
        )

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Spec:
        policy = record.get("version_policy")
        return Spec(
            **{
                **fields_of(Spec, record),
                "version_policy": VersionPolicy.from_record(policy) if policy else LATEST,
                "autoscaling": Autoscaling.from_record(record.get("autoscaling")),
            }
        )


def check_spec(
    *,
    checkpoint: str,
    num_replicas: int,
    threads_per_replica: int,
    max_batch_size: int,
    max_batch_delay_s: float | None,
    max_queued_rows: int,
    version_policy: VersionPolicy = LATEST,
    autoscaling: Autoscaling | None = None,
    cpus_per_replica: float | None = None,
    gpus_per_replica: float = 0.0,
    allow_non_finite: bool = False,
    predictor: str = "",
) -> Spec:
    """Return the spec with its defaults.

    Raises `InvalidArgument` naming every number that is out of range. In `autoscaling`, a `min_replicas` of 0 means 1,
    and a `rows_per_replica` of 0 a full batch.
    """
    batch_size = max_batch_size or DEFAULT_BATCH_SIZE
    if autoscaling is not None:
        autoscaling = replace(
            autoscaling,
            min_replicas=autoscaling.min_replicas or 1,
            rows_per_replica=autoscaling.rows_per_replica or batch_size,
        )
    spec = Spec(
        checkpoint=checkpoint,
        num_replicas=num_replicas or 1,
        threads_per_replica=threads_per_replica or 1,
        max_batch_size=batch_size,
        max_batch_delay_s=DEFAULT_BATCH_DELAY_S if max_batch_delay_s is None else max_batch_delay_s,
        max_queued_rows=max_queued_rows or DEFAULT_QUEUED_ROWS,
        version_policy=version_policy,
        autoscaling=autoscaling,
        cpus_per_replica=cpus_per_replica,
        gpus_per_replica=gpus_per_replica,
        allow_non_finite=allow_non_finite,
        predictor=predictor,
    )
    problems: list[tuple[str, object, str]] = [
        (f"spec.{field}", value, f"use {low} to {high}{unit}")
        for field, value, low, high, unit in (
            ("num_replicas", spec.num_replicas, 1, MAX_REPLICAS, ""),
            ("threads_per_replica", spec.threads_per_replica, 1, MAX_THREADS, ""),
            ("max_batch_size", spec.max_batch_size, 1, MAX_BATCH_SIZE, ""),
            ("max_batch_delay", spec.max_batch_delay_s, 0, MAX_BATCH_DELAY_S, " s"),
            ("max_queued_rows", spec.max_queued_rows, 1, MAX_QUEUED_ROWS, ""),
        )
        if not low <= value <= high
    ]
    problems += share_problems(cpus_per_replica, gpus_per_replica)
    module, _, name = predictor.partition(":")
    if predictor and not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        problems.append(
            ("spec.predictor", predictor[:MAX_PREDICTOR], "use module:name of a class, e.g. serve:Predictor")
        )
    if autoscaling is not None:
        problems += autoscaling_problems(autoscaling)
        if num_replicas:
            problems.append(("spec.num_replicas", num_replicas, "leave it out: autoscaling has min_replicas"))
    if problems:
        raise invalid_fields(problems)
    return replace(spec, num_replicas=autoscaling.min_replicas) if autoscaling is not None else spec


@dataclass(frozen=True, kw_only=True)
class Creation:
    """A checked creation request.

    `digest` is the digest of the request's body without its `request_id`.
    """

    deployment_id: str
    spec: Spec
    request_id: str
    digest: str
    validate_only: bool


@dataclass(frozen=True, kw_only=True)
class ModelVersion(Durable):
    """One checkpoint under one version number.

    `folder` has its files; `weight` is its share of the traffic that names no version. `dataset_version` and
    `signature` are known once a replica has loaded it. After `retired_at`, in seconds since the epoch, it gets no more
    traffic, answers its pending requests, and is then removed.
    """

    number: str
    checkpoint: str
    folder: str
    checkpoint_sha256: str
    training_job: str
    # `codeBundles/{sha256}` of the user's own code that builds the model; empty without such code.
    code_bundle: str = ""
    dataset_version: str = ""
    weight: int = ALL_TRAFFIC
    signature: Signature | None = None
    retired_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Deployment(Durable):
    """A deployment.

    `generation` counts the clients' changes and is the etag; times are seconds since the epoch. `versions` are all that
    are loaded or to be loaded, in the order of their numbers; `numbers_used` is the last number given.
    """

    name: str
    uid: str
    spec: Spec
    state: State
    generation: int
    operation: str
    request_id: str
    versions: tuple[ModelVersion, ...]
    create_time: float
    update_time: float
    error: dict[str, Any] | None = None
    rollout: Rollout | None = field(default=None, metadata=stored_as("roll_out"))
    numbers_used: int = 1
    routes: tuple[HeaderRoute, ...] = ()
    shadow: Shadow | None = None

    @property
    def model_name(self) -> str:
        return self.name.removeprefix("deployments/")

    @property
    def etag(self) -> str:
        return f"{self.uid[:8]}-{self.generation}"

    @property
    def was_loaded(self) -> bool:
        """Whether it was ever READY, though it may be in deletion by now."""
        return any(version.signature for version in self.versions)

    def as_record(self) -> dict[str, Any]:
        record: dict[str, Any] = as_state(self)
        return record

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Deployment:
        versions = tuple(
            ModelVersion(
                **{
                    **fields_of(ModelVersion, version),
                    "signature": version["signature"] and Signature.from_record(version["signature"]),
                }
            )
            for version in record["versions"]
        )
        rollout, shadow = record.get("roll_out"), record.get("shadow")
        read = dict(
            fields_of(Deployment, record),
            spec=Spec.from_record(record["spec"]),
            state=State(record["state"]),
            versions=versions,
            rollout=Rollout.from_record(rollout) if rollout else None,
            routes=tuple(HeaderRoute(**fields_of(HeaderRoute, route)) for route in record.get("routes", ())),
            shadow=Shadow(**fields_of(Shadow, shadow)) if shadow else None,
        )
        return Deployment(**read)


def with_loaded(deployment: Deployment, loaded: ModelVersion, now_s: float) -> Deployment | None:
    """Return the deployment after its first version, `loaded`, was loaded.

    None if that changes nothing, because it was READY or is being deleted.
    """
    if deployment.state is not State.LOADING:
        return None
    return replace(deployment, state=State.READY, versions=(loaded,), update_time=now_s)


def with_failure(deployment: Deployment, error: MillraceError, now_s: float) -> Deployment | None:
    """Return the deployment after its first version failed for good; None if it is no longer loading."""
    if deployment.state is not State.LOADING:
        return None
    return replace(deployment, state=State.FAILED, error=error.as_record(), update_time=now_s)


def with_deletion(deployment: Deployment | None, name: str, etag: str, now_s: float) -> Deployment | None:
    """Return the deployment after a client's deletion request; None if it was requested before.

    Raises `NotFound` and `Conflict` (`etag` is not the present one).
    """
    there = checked(deployment, name, etag)
    return None if there.state is State.DELETING else deleting(there, now_s)


def deleting(deployment: Deployment, now_s: float) -> Deployment:
    """Return the deployment in state DELETING, with a running rollout ended."""
    rollout = deployment.rollout
    if rollout is not None and rollout.under_way:
        error = Cancelled(f"{deployment.name} was deleted before the rollout was done", reason="DELETED")
        rollout = rollout.ended(RolloutState.ROLLED_BACK, now_s, error)
    return replace(
        deployment,
        state=State.DELETING,
        rollout=rollout,
        generation=deployment.generation + 1,
        update_time=now_s,
    )


def checked(deployment: Deployment | None, name: str, etag: str) -> Deployment:
    """Return the deployment that a request is about.

    Raises `NotFound` and `Conflict` (`etag` is not the present one).
    """
    if deployment is None or deployment.state is State.GONE:
        raise not_found(name)
    if etag and etag != deployment.etag:
        raise Conflict(
            f"{name} has changed: its etag is {deployment.etag!r} now; read it again",
            reason="ETAG_MISMATCH",
            metadata={"resource": name, "etag": deployment.etag},
        )
    return deployment


def with_removal(deployment: Deployment, now_s: float) -> Deployment | None:
    """Return the deployment after its applications are removed; None unless it was being deleted."""
    if deployment.state is not State.DELETING:
        return None
    return replace(deployment, state=State.GONE, update_time=now_s)


# --- Applications ---
# The names of the applications in Ray Serve, one for each version of a deployment.


def application_name(deployment: Deployment, version: ModelVersion) -> str:
    """Return the Ray Serve application of one version.

    The uid keeps a deployment apart from replicas of an earlier one with the same name.
    """
    return f"{deployment.uid}-v{version.number}"


def uid_of(application: str) -> str:
    """Return the uid of the deployment: the inverse of `application_name`."""
    return application.rpartition("-v")[0]
