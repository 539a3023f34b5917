"""`python -m train_service.reconciler`: starts attempts at training jobs on Ray."""

from __future__ import annotations

import os

from shared.jobs.reconciler import run_reconciler
from shared.settings import service_settings
from shared.telemetry import configure_logging
from train_service.reporting import TRAIN_KIND

if __name__ == "__main__":
    settings = service_settings(os.environ, "127.0.0.1:0")
    configure_logging("train-reconciler", settings.log_level)
    run_reconciler(settings, TRAIN_KIND, "train_service.trainer:run")
