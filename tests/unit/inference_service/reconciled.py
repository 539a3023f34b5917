"""A reconciler before a Serve whose replicas tests control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inference_service.deploy.deployments import Cluster, Deployments
from inference_service.deploy.reconciler import Reconciler
from inference_service.domain.deployment import Deployment, Scale, application_name
from inference_service.frontend_processes import Peers
from inference_service.serve.models import Models
from inference_service.serve.ray_serve import Application
from inference_service.serve.replica import Loaded, ReplicaSpec
from inference_service.settings import InferenceSettings
from shared.settings import ServiceSettings, StoreSettings
from tests.support.inference_server import IMAGES, Classifier

# On the clock that tests let pass.
LOST_AFTER_S = 2.0


@dataclass
class Clock:
    """It stands still but for what a test lets pass."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Running:
    """Serve as the reconciler sees it while all replicas of these applications are up."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.wanted: list[int] = []
        self.replicas = 3
        self.deployed: dict[str, Scale] = {}
        self.deleted: list[str] = []
        self.forgotten: list[str] = []
        self.is_well = True
        self.trouble: Exception | None = None
        self.data: bytes | None = None

    def start(self, *names: str) -> None:
        """These are up, and no others."""
        self._names = names

    def statuses(self) -> dict[str, Application]:
        seen = Application(running=self.is_well, failed=False, message="", replicas=self.replicas)
        return dict.fromkeys(self._names, seen)

    def deploy(self, name: str, _spec: ReplicaSpec, scale: Scale) -> None:
        self.deployed[name] = scale

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        self._names = tuple(one for one in self._names if one != name)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def keep(self, data: bytes) -> None:
        self.data = data

    def kept(self) -> bytes | None:
        return self.data

    def nodes(self) -> dict[str, dict[str, float]]:
        return {"a": {"CPU": 8.0}}

    async def open_model(self, _name: str, replicas: int) -> tuple[Classifier, Loaded]:
        self.wanted.append(replicas)
        if self.trouble is not None:
            raise self.trouble
        return Classifier(), Loaded(IMAGES, "", {})


def reconciling(
    deployments: Deployments, made: Deployment, peers: Peers | None = None, running: Running | None = None
) -> tuple[Reconciler, Models, Running]:
    """Without a Serve that is `running`, one in which the deployment's first version is up."""
    service = ServiceSettings(listen="", store=StoreSettings(url="file:///nowhere"))
    models, running = Models(LOST_AFTER_S), running or Running(application_name(made, made.versions[0]))
    serve: Any = running
    settings = InferenceSettings(service=service, reconcile_every_s=0.01, ray_unresponsive_after_s=0.05)
    reconciler = Reconciler(deployments, serve, models, Cluster(None), settings, peers or Peers())
    return reconciler, models, running
