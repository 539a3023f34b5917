"""What a script's process has of its own: the line to the attempt, results, and Ray's functions with others behind."""

from __future__ import annotations

import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.train import Checkpoint, Result

from shared.errors import FailedPrecondition
from train_service.program.fit_calls import Channel, ChannelClosed
from train_service.program.ray_hooks import without_gpus
from train_service.program.tuning import result_of


def test_a_question_gets_its_answer_or_the_error_that_it_is() -> None:
    own, other = map(Channel, socket.socketpair())
    refused = FailedPrecondition("not now", reason="CONCURRENT_FITS")

    def answer() -> None:
        assert other.receive() == {"kind": "fit", "text": "x" * 100_000}
        other.send({"result": 1})
        assert other.receive() == {"kind": "fit"}
        other.send({"error": refused.as_record()})
        other.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert own.receive(0.0) is None
    assert own.ask({"kind": "fit", "text": "x" * 100_000}) == {"result": 1}
    with pytest.raises(FailedPrecondition, match="not now"):
        own.ask({"kind": "fit"})
    thread.join()
    with pytest.raises(ChannelClosed):
        own.ask({"kind": "fit"})


def test_a_result_is_rays_and_reads_checkpoints_when_they_are_asked_for(tmp_path: Path) -> None:
    fetched: list[str] = []

    def fetch(name: str) -> str:
        fetched.append(name)
        return str(tmp_path)

    (tmp_path / "state.json").write_text("{}")
    one, two = {"loss": 2.0, "epoch": 0}, {"loss": 1.0, "epoch": 1}
    checkpoints = [{"name": "trainingJobs/a/checkpoints/1", "metrics": one}, {"name": "b", "metrics": two}]
    result = result_of({"path": "trainingJobs/a", "metrics": two, "checkpoints": checkpoints}, fetch)

    assert isinstance(result, Result)
    assert isinstance(result.checkpoint, Checkpoint)
    assert (result.metrics, result.path, result.error) == (two, "trainingJobs/a", None)
    frame: Any = result.metrics_dataframe
    assert list(frame["loss"]) == [2.0, 1.0]
    assert "Checkpoint(b)" in repr(result)
    assert fetched == []
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "state.json").exists()
    sent = pickle.loads(pickle.dumps(result.checkpoint))
    assert (type(sent), sent.path, fetched) == (Checkpoint, str(tmp_path), ["b"])


def test_a_run_without_reports_has_an_empty_result() -> None:
    result = result_of({"path": "trainingJobs/a", "metrics": {}, "checkpoints": []}, str)
    assert (result.metrics, result.checkpoint, result.metrics_dataframe) == (None, None, None)


def test_of_a_tasks_options_only_what_needs_a_gpu_goes() -> None:
    options = {"num_gpus": 1, "num_cpus": 2, "accelerator_type": "A100"}
    assert without_gpus({**options, "resources": {"accelerator_type:T4": 0.1}}) == {"num_cpus": 2}
    assert without_gpus({"resources": {"disk": 1, "accelerator_type:T4": 0.1}}) == {"resources": {"disk": 1}}
    assert without_gpus({"num_gpus": 0, "num_cpus": 1}) == {"num_gpus": 0, "num_cpus": 1}, "Ray Data's own"
    assert without_gpus({}) == {}
