"""A deployment: what is to be served, and how far it is. Transitions are functions from one value to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from inference_service.domain.roll_out import RollOut, RollOutState
from inference_service.domain.scaling import MAX_REPLICAS, Autoscaling, Scale, autoscaling_problems, share_problems
from inference_service.domain.signature import Signature
from inference_service.domain.traffic import HeaderRoute, Shadow
from inference_service.domain.version_policy import LATEST, VersionPolicy
from shared.durable import Durable, as_state, fields_of
from shared.errors import Cancelled, Conflict, MillraceError, invalid_fields, not_found

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
    """Only `GONE` has no counterpart on the wire: such a deployment is NOT_FOUND."""

    LOADING = "LOADING"
    READY = "READY"
    FAILED = "FAILED"
    UNLOADED = "UNLOADED"
    DELETING = "DELETING"
    GONE = "GONE"


LIVE = frozenset({State.LOADING, State.READY})  # these have an application in Ray Serve


@dataclass(frozen=True, kw_only=True)
class Spec(Durable):
    """`checkpoint` is as the client named it, a job or a checkpoint; everything else has its default filled in. With
    `autoscaling` `num_replicas` are the fewest; of a replica whose `cpus_per_replica` are None, its threads count."""

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
    # Of a program's checkpoint: `module:name` of the class of its bundle that serves it; empty: `Predictor` of the
    # program's module.
    predictor: str = ""

    def scale(self, replicas: int = 0) -> Scale:
        """What a version of it asks of Ray, with so many replicas to begin with where their number may change."""
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
    """The spec with its defaults, or `InvalidArgument` naming every number that is out of range.

    Of `autoscaling`, 0 `min_replicas` mean 1, and 0 `rows_per_replica` a full batch.
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
    """A checked request to create. `digest` is that of the request's body without its `request_id`."""

    deployment_id: str
    spec: Spec
    request_id: str
    digest: str
    validate_only: bool


@dataclass(frozen=True, kw_only=True)
class ModelVersion(Durable):
    """One checkpoint under one number. `folder` is where its files lie; `weight` its share of the traffic that names no
    version; `dataset_version` and `signature` are known once a replica has loaded it. From `retired_at` on, in seconds
    since the epoch, it gets no traffic any more; it answers what it has, and goes."""

    number: str
    checkpoint: str
    folder: str
    checkpoint_sha256: str
    training_job: str
    # `codeBundles/{sha256}` of a user's own code that makes the model; empty of others.
    code_bundle: str = ""
    dataset_version: str = ""
    weight: int = ALL_TRAFFIC
    signature: Signature | None = None
    retired_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Deployment(Durable):
    """`generation` counts the wishes of clients and is the etag; times are seconds since the epoch. `versions` are all
    that are loaded or are to be, in the order of their numbers; `numbers_used` is the last one given."""

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
    roll_out: RollOut | None = None
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
        """Whether it was ever READY, though it may be going by now."""
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
        roll_out, shadow = record.get("roll_out"), record.get("shadow")
        return Deployment(
            **{
                **fields_of(Deployment, record),
                "spec": Spec.from_record(record["spec"]),
                "state": State(record["state"]),
                "versions": versions,
                "roll_out": RollOut.from_record(roll_out) if roll_out else None,
                "routes": tuple(HeaderRoute(**fields_of(HeaderRoute, route)) for route in record.get("routes", ())),
                "shadow": Shadow(**fields_of(Shadow, shadow)) if shadow else None,
            }
        )


def with_loaded(deployment: Deployment, loaded: ModelVersion, now_s: float) -> Deployment | None:
    """After the first version was loaded, its signature known; None if that is no news (it was READY, or is going)."""
    if deployment.state is not State.LOADING:
        return None
    return replace(deployment, state=State.READY, versions=(loaded,), update_time=now_s)


def with_failure(deployment: Deployment, error: MillraceError, now_s: float) -> Deployment | None:
    """After the first version could not be loaded for good; None if the deployment is no longer loading."""
    if deployment.state is not State.LOADING:
        return None
    return replace(deployment, state=State.FAILED, error=error.as_record(), update_time=now_s)


def with_deletion(deployment: Deployment | None, name: str, etag: str, now_s: float) -> Deployment | None:
    """After a client's wish to delete it; None if that was wished before.

    Raises `NotFound` and `Conflict` (`etag` is not the present one).
    """
    there = checked(deployment, name, etag)
    return None if there.state is State.DELETING else deleting(there, now_s)


def deleting(deployment: Deployment, now_s: float) -> Deployment:
    """After the wish to delete it, which ends a roll-out as well."""
    roll_out = deployment.roll_out
    if roll_out is not None and roll_out.under_way:
        error = Cancelled(f"{deployment.name} was deleted before the roll-out was done", reason="DELETED")
        roll_out = roll_out.ended(RollOutState.ROLLED_BACK, now_s, error)
    return replace(
        deployment,
        state=State.DELETING,
        roll_out=roll_out,
        generation=deployment.generation + 1,
        update_time=now_s,
    )


def checked(deployment: Deployment | None, name: str, etag: str) -> Deployment:
    """The deployment that a wish is about. Raises `NotFound` and `Conflict` (`etag` is not the present one)."""
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
    """After its applications are gone; None unless it was being deleted."""
    if deployment.state is not State.DELETING:
        return None
    return replace(deployment, state=State.GONE, update_time=now_s)
