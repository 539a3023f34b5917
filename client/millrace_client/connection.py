"""`connect()`: the clients of the three services, and their health (`grpc.health.v1`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.train.v1 import resources_pb2
from millrace_client.calls import (
    DEFAULT_TIMEOUT_S,
    SERVICES,
    Addresses,
    Caller,
    Headers,
    authorization,
    open_channel,
    resolve,
)
from millrace_client.data import DataClient
from millrace_client.inference import DeploymentClient, InferenceClient
from millrace_client.train import Suggestion, TrainClient

# --- Connection ---


class Millrace:
    """The clients of the three services. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        addresses: Addresses,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reconnect_for_s: float | None = None,
        authorization: Headers = (),
    ) -> None:
        self.addresses = addresses
        self.authorization = authorization
        self._channels = {service: open_channel(addresses.address_of(service)) for service in SERVICES}
        callers = {
            service: Caller(channel, addresses.address_of(service), timeout_s, reconnect_for_s, authorization)
            for service, channel in self._channels.items()
        }
        self.data = DataClient(callers["data"])
        self.train = TrainClient(callers["train"], self.data)
        self.deployments = DeploymentClient(callers["inference"])
        self.inference = InferenceClient(callers["inference"])
        self.health = HealthClient(callers)

    def training_spec(
        self, version: str, *, spec: resources_pb2.TrainingSpec | None = None, **overrides: Any
    ) -> Suggestion:
        """Suggest a complete specification for training on `datasets/{d}/versions/{v}`.

        `.spec` of the result is filled in, `.choices` says what was chosen and why, and `create_training_job` takes the
        result as it is. Fields of `spec` and named fields win, e.g. `epochs=3`. Where steps must learn or a validation
        split is missing, the data service makes the prepared version first, and the call waits for it; ask
        `train.suggest_training_spec` to see the preparation without it. Raises `InvalidArgument` if the version is
        ambiguous; the error names the alternatives.
        """
        return self.train.suggest_training_spec(version, prepare=True, spec=spec, **overrides)

    def close(self) -> None:
        """Close the channels. Calls in flight fail as cancelled."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Millrace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(
    *,
    data: str | None = None,
    train: str | None = None,
    inference: str | None = None,
    token: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    reconnect_for_s: float | None = None,
) -> Millrace:
    """Make a client for the services at these addresses, each host:port. Nothing is sent yet.

    Missing addresses are found as `millrace_client.calls` describes. `timeout_s` is the default deadline of a call.

    `token` is sent with every call. Unset: the token in the file that MILLRACE_TOKEN_FILE names, if it is set; "":
    none. It travels in clear text, because channels have no TLS yet. Raises `Unauthenticated` for a token that cannot
    be sent.

    Calls survive a restart of a service: a call that finds it UNAVAILABLE is repeated, with growing pauses, for
    `reconnect_for_s` (unset: until its deadline; 0: never), and then raises `Unavailable`. This holds for reads and for
    calls with a request id. Other calls, including inference, are repeated only if they were certainly not sent.
    """
    addresses = resolve(data=data, train=train, inference=inference)
    return Millrace(addresses, timeout_s=timeout_s, reconnect_for_s=reconnect_for_s, authorization=authorization(token))


# --- Health ---

# A running service answers in milliseconds, but on an overloaded machine it may take seconds.
HEALTH_TIMEOUT_S = 10.0


class HealthClient:
    """Asks each service for its overall health. It never raises if a service does not answer."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = callers

    def check(self, service: str, *, timeout_s: float = HEALTH_TIMEOUT_S) -> str:
        """Return `SERVING`, `NOT_SERVING`, or `UNREACHABLE`. `service` is `data`, `train` or `inference`."""
        stub: Any = health_pb2_grpc.HealthStub(self._callers[service].channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return "UNREACHABLE"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
