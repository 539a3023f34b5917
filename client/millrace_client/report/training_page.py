"""A run as one HTML page: no script, no other file, no network."""

from __future__ import annotations

from millrace_client.cli.output import duration_text, size_text
from millrace_client.report.curves import HEIGHT, WIDTH
from millrace_client.report.rendering import rendered
from millrace_client.report.training import Run
from millrace_client.report.wording import number_text

TEMPLATE = "training.html.jinja"


def training_page(run: Run) -> str:
    filters = {"size": size_text, "duration": duration_text, "number": number_text}
    return rendered(TEMPLATE, filters, run=run, job=run.job, box=(WIDTH, HEIGHT))
