"""`connect()`: the door to the three services."""

from __future__ import annotations

from types import TracebackType

from millrace_client.addresses import SERVICES, Addresses, resolve
from millrace_client.calls import DEFAULT_TIMEOUT_S, Caller, open_channel
from millrace_client.data import DataClient
from millrace_client.deployments import DeploymentClient
from millrace_client.health import HealthClient
from millrace_client.inference import InferenceClient
from millrace_client.train import TrainClient


class Millrace:
    """The three services. Close it, or use it in a `with` statement."""

    def __init__(self, addresses: Addresses, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.addresses = addresses
        self._channels = {service: open_channel(addresses.of(service)) for service in SERVICES}
        callers = {
            service: Caller(channel, addresses.of(service), timeout_s) for service, channel in self._channels.items()
        }
        self.data = DataClient(callers["data"])
        self.train = TrainClient(callers["train"])
        self.deployments = DeploymentClient(callers["inference"])
        self.inference = InferenceClient(callers["inference"])
        self.health = HealthClient(callers)

    def close(self) -> None:
        """Closes the channels; calls still in flight fail as cancelled."""
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
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Millrace:
    """A client of the services at the addresses given, each host:port.

    Addresses left out are found as `millrace_client.addresses` lists. `timeout_s` is the default deadline of a call.
    Nothing is sent yet.
    """
    return Millrace(resolve(data=data, train=train, inference=inference), timeout_s=timeout_s)
