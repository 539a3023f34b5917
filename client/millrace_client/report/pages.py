"""Reports as HTML pages: of a version, and of a training run.

A page has no script, no other file and no network; everything from data is escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from millrace.data.v1 import data_service_pb2
from millrace_client.cli.command import duration_text, size_text
from millrace_client.report.profile import HEIGHT as BARS_HEIGHT
from millrace_client.report.profile import WIDTH as BARS_WIDTH
from millrace_client.report.profile import box_bars, profile_of
from millrace_client.report.training import HEIGHT as CURVES_HEIGHT
from millrace_client.report.training import WIDTH as CURVES_WIDTH
from millrace_client.report.training import Run
from millrace_client.report.wording import number_text

TEMPLATE, TRAINING_TEMPLATE = "page.html.jinja", "training.html.jinja"


def rendered(template: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("millrace_client.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(**values)


def page(preview: data_service_pb2.PreviewVersionResponse) -> str:
    filters = {"size": size_text, "bars": box_bars}
    return rendered(TEMPLATE, filters, profile=profile_of(preview), box=(BARS_WIDTH, BARS_HEIGHT))


def training_page(run: Run) -> str:
    filters = {"size": size_text, "duration": duration_text, "number": number_text}
    return rendered(TRAINING_TEMPLATE, filters, run=run, job=run.job, box=(CURVES_WIDTH, CURVES_HEIGHT))
