"""Statistics and the model repository in the SDK, on the inference service's own servicer."""

from __future__ import annotations

import pytest

from inference_service.domain.deployment import State
from millrace_client import Millrace, errors
from tests.support.inference_client import image, with_client
from tests.support.inference_server import Server, deployment


def test_statistics_are_those_of_what_was_answered() -> None:
    def scenario(_: Server, millrace: Millrace) -> None:
        millrace.inference.infer("m", image(1))
        (found,) = millrace.inference.model_statistics("m", version="1")
        assert (found.name, found.version, found.inference_count) == ("m", "1", 1)
        assert len(millrace.inference.model_statistics()) == 1
        with pytest.raises(errors.NotFound):
            millrace.inference.model_statistics("nobody")

    with_client(scenario)


def test_a_model_is_taken_out_of_service_and_brought_back() -> None:
    def scenario(server: Server, millrace: Millrace) -> None:
        server.deployments.create(deployment())
        listed = [(one.name, one.version, one.state) for one in millrace.inference.repository_index()]
        assert listed == [("m", "1", "READY")]
        millrace.inference.unload_model("m")
        assert server.deployments.get("deployments/m").state is State.UNLOADED
        with pytest.raises(errors.FailedPrecondition):
            millrace.inference.infer("m", image(1))
        assert millrace.inference.repository_index(ready=True) == []
        (unloaded,) = millrace.inference.repository_index()
        assert unloaded.state == "UNAVAILABLE"
        millrace.inference.load_model("m")
        assert server.deployments.get("deployments/m").state is State.READY
        assert millrace.inference.infer("m", image(1)).version == "1"
        with pytest.raises(errors.NotFound):
            millrace.inference.load_model("nobody")

    with_client(scenario)
