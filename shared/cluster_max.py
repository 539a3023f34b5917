"""How far the cluster grows, as its operator says: beyond it nothing is ever placed."""

from __future__ import annotations

from collections.abc import Mapping

from shared.settings import SettingsError

VARIABLE = "MILLRACE_CLUSTER_MAX"


def largest_cluster(environ: Mapping[str, str]) -> dict[str, float] | None:
    """Reads MILLRACE_CLUSTER_MAX, e.g. `CPU=512,GPU=64`; None where it is not set."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        pairs = [part.partition("=") for part in text.split(",")]
        most = {name.strip(): float(amount) for name, _, amount in pairs}
    except ValueError:
        most = {"": -1.0}
    # Ray's own are CPU and GPU; a bound on another spelling would bound nothing.
    if not all(name and name not in ("cpu", "gpu") and amount >= 0 for name, amount in most.items()):
        raise SettingsError(f"{VARIABLE}={text!r}: use names of Ray's resources and amounts, e.g. CPU=512,GPU=64")
    return most
