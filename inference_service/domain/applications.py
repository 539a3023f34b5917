"""The names of the applications in Ray Serve: one for each version of a deployment."""

from __future__ import annotations

from inference_service.domain.deployment import Deployment, ModelVersion


def application_name(deployment: Deployment, version: ModelVersion) -> str:
    """The Ray Serve application of one version. The uid keeps a deployment from meeting its namesake's replicas."""
    return f"{deployment.uid}-v{version.number}"


def uid_of(application: str) -> str:
    """Of its deployment: the inverse of `application_name`."""
    return application.rpartition("-v")[0]
