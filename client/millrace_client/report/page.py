"""A version's report as one HTML page: no script, no other file, no network."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from millrace.data.v1 import data_service_pb2
from millrace_client.cli.output import size_text
from millrace_client.report.bars import HEIGHT, WIDTH, box_bars
from millrace_client.report.profile import profile_of

TEMPLATE = "page.html.jinja"


def page(preview: data_service_pb2.PreviewVersionResponse) -> str:
    """Everything in it that comes from data is escaped."""
    environment = Environment(
        loader=PackageLoader("millrace_client.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size_text, bars=box_bars)
    return environment.get_template(TEMPLATE).render(profile=profile_of(preview), box=(WIDTH, HEIGHT))
