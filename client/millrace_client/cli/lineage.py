"""Where a served model comes from, a line for each step."""

from __future__ import annotations

from millrace.common.v1.lineage_pb2 import Lineage
from millrace_client.cli.output import console


def print_lineage(lineage: Lineage) -> None:
    """dataset version → run → checkpoint digest → model version."""
    steps = [
        ("dataset version", lineage.dataset_version),
        *([("own code", lineage.code_bundle)] if lineage.code_bundle else []),
        ("training run", lineage.training_job),
        ("checkpoint", f"{lineage.checkpoint.rpartition('/')[2]}  sha256:{lineage.checkpoint_sha256}"),
        ("model version", f"{lineage.deployment}  version {lineage.model_version}"),
    ]
    for index, (kind, name) in enumerate(steps):
        console().print(f"  {'→' if index else ' '} {kind:<16} [cyan]{name}[/]", soft_wrap=True)
