"""What is known of deployments while their logs are read and written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_service.domain.deployment import State
from inference_service.serve.models import Catalog
from shared.errors import NotFound, Unavailable
from tests.support.inference_server import deployment

READY = deployment("m")


def test_before_the_logs_are_read_nothing_is_known_to_be_missing() -> None:
    catalog = Catalog()
    with pytest.raises(Unavailable):
        catalog.find("m")
    assert (catalog.is_read, catalog.deployments()) == (False, [])


def test_a_deployment_written_while_the_logs_are_read_is_not_lost() -> None:
    catalog, loading = Catalog(), replace(READY, state=State.LOADING)
    catalog.replace([])
    catalog.begin_reading()
    catalog.put(loading)
    catalog.replace([])  # read before it was written
    assert catalog.find("m") == loading
    catalog.begin_reading()
    catalog.replace([])
    with pytest.raises(NotFound):
        catalog.find("m")


def test_of_two_that_wrote_the_later_one_counts_whichever_came_back_first() -> None:
    catalog, later = Catalog(), replace(READY, update_time=2.0)
    catalog.replace([later])
    catalog.put(READY)
    assert catalog.find("m") == later


def test_a_deployment_that_is_gone_is_kept_neither_from_a_call_nor_from_the_logs() -> None:
    gone = replace(READY, state=State.GONE)
    catalog = Catalog()
    catalog.begin_reading()
    catalog.put(gone)  # as the answer to a creation that is asked for again after the deployment went
    catalog.replace([])
    with pytest.raises(NotFound):
        catalog.find("m")
    catalog.put(READY)
    catalog.put(gone)
    with pytest.raises(NotFound):
        catalog.find("m")
    assert catalog.deployments() == []


def test_an_earlier_namesake_that_is_gone_takes_nothing_away() -> None:
    catalog = Catalog()
    catalog.replace([READY])
    catalog.put(replace(READY, uid="earlier", state=State.GONE))
    assert catalog.find("m") == READY
