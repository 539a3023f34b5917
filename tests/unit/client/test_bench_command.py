"""`millrace bench` on the inference service's own servicer and batcher, with a model that answers at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from millrace_client.cli import millrace
from tests.support.inference_server import Server, served


def bench(*arguments: str) -> Result:
    """Of a server with the model `m`, of four bytes a row."""
    results = []

    async def scenario(server: Server) -> None:
        options = ["--seconds", "0.3", "--warm-up", "0", "--inference-address", server.kit.address]
        results.append(await asyncio.to_thread(CliRunner().invoke, millrace, ["bench", *arguments, *options]))

    served(scenario)
    assert "Traceback" not in results[0].output
    return results[0]


def test_a_closed_loop_is_a_table_of_statuses_and_latencies() -> None:
    result = bench("m", "--in-flight", "4")
    assert result.exit_code == 0, result.output
    header = next(line for line in result.stdout.splitlines() if line.strip())
    assert header.split() == ["status", "calls", "share", "p50", "p90", "p95", "p99", "p99.9", "max"]
    assert "OK" in result.stdout
    assert "answers/s" in result.stdout


def test_an_open_loop_says_how_far_behind_this_client_was() -> None:
    result = bench("m", "--rate", "50")
    assert result.exit_code == 0, result.output
    assert "later than due" in result.stdout


def test_json_has_all_figures() -> None:
    document = json.loads(bench("m", "--in-flight", "2", "--rows", "3", "--json").stdout)
    assert (document["model"], document["in_flight"], document["rows"]) == ("m", 2, 3)
    assert set(document["statuses"]) == {"OK"}
    assert document["rows_per_s"] == pytest.approx(3 * document["answered_per_s"], rel=1e-3)
    assert document["latency_ms"]["OK"]["p50"] > 0


def test_rows_come_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([[1, 2, 3, 4]], np.uint8))
    assert bench("m", "--rows-from", str(tmp_path / "rows.npy")).exit_code == 0


def test_a_file_that_does_not_fit_the_model_is_reported(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", other=np.zeros(1))
    result = bench("m", "--rows-from", str(tmp_path / "rows.npz"))
    assert result.exit_code == 1
    assert "has no image; the model's inputs are image" in result.stderr


def test_a_model_that_answers_nothing_is_exit_code_1_with_what_it_said(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((101, 4), np.uint8))
    result = bench("m", "--rows", "101", "--rows-from", str(tmp_path / "rows.npy"))
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT" in result.stdout
    assert "no request was answered" in result.stderr


def test_an_unknown_model_is_exit_code_3() -> None:
    assert bench("nobody").exit_code == 3


def test_both_loops_at_once_are_wrong_usage() -> None:
    assert bench("m", "--rate", "5", "--in-flight", "5").exit_code == 2
