"""The only process of the service that talks to Ray: `python -m data_service.reconciler`, supervised by the server."""

from __future__ import annotations

import os

from data_service.parallel import missing_capacity
from data_service.settings import data_settings
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs.reconciler import JobKind, run_reconciler
from shared.telemetry import configure_logging

ENTRY = "data_service.pipeline:run"
PREPARE = "data_service.pipeline:prepare"


def main() -> None:
    settings = data_settings(os.environ)
    configure_logging("data-reconciler", settings.service.log_level)
    prepare = PREPARE if settings.standby_attempt else ""
    run_reconciler(
        settings.service, JobKind(name=IMPORT_KIND, entry=ENTRY, prepare=prepare, missing_capacity=missing_capacity)
    )


if __name__ == "__main__":
    main()
