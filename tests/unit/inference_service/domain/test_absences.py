from __future__ import annotations

from inference_service.serve.models import LossDetector


def test_replicas_are_lost_once_two_readings_so_far_apart_have_seen_none() -> None:
    loss_detector = LossDetector(3.0)
    loss_detector.read(["a", "b"], {"a": 0, "b": 1}, 100.0)
    assert loss_detector.lost == frozenset()
    loss_detector.read(["a", "b"], {"a": 0, "b": 0}, 102.0)
    assert loss_detector.lost == frozenset()
    loss_detector.read(["a", "b"], {}, 103.0)
    assert loss_detector.lost == {"a"}
    loss_detector.read(["a", "b"], {"a": 1}, 105.0)
    assert loss_detector.lost == {"b"}


def test_one_that_is_back_for_a_moment_or_was_taken_out_begins_anew() -> None:
    loss_detector = LossDetector(3.0)
    loss_detector.read(["a", "b"], {}, 0.0)
    loss_detector.read(["a"], {"a": 1}, 2.0)
    loss_detector.read(["a", "b"], {}, 3.0)
    loss_detector.read(["a", "b"], {}, 5.0)
    assert loss_detector.lost == frozenset()
    loss_detector.read(["a", "b"], {}, 6.0)
    assert loss_detector.lost == {"a", "b"}
