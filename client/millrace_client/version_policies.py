"""Version policies: which versions of a deployment stay loaded without traffic. Those with traffic always do."""

from __future__ import annotations

from millrace.inference.v1 import deployment_service_pb2 as pb


def keep_latest(count: int) -> pb.VersionPolicy:
    """So many of the newest versions. With 2, a roll-out that succeeded can be rolled back."""
    return pb.VersionPolicy(latest=pb.VersionPolicy.Latest(count=count))


def keep_all() -> pb.VersionPolicy:
    """Every version."""
    return pb.VersionPolicy(all=pb.VersionPolicy.All())


def keep_named(*versions: str) -> pb.VersionPolicy:
    """The versions of these numbers, and no others."""
    return pb.VersionPolicy(named=pb.VersionPolicy.Named(versions=versions))
