"""A run as one HTML page: no script, no other file, no network."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from millrace_client.cli.output import duration_text, size_text
from millrace_client.report.curves import HEIGHT, WIDTH
from millrace_client.report.training import Run
from millrace_client.report.wording import number_text

TEMPLATE = "training.html.jinja"


def training_page(run: Run) -> str:
    """Everything in it that comes from data is escaped."""
    environment = Environment(
        loader=PackageLoader("millrace_client.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size_text, duration=duration_text, number=number_text)
    return environment.get_template(TEMPLATE).render(run=run, job=run.job, box=(WIDTH, HEIGHT))
