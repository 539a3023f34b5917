from __future__ import annotations

from inference_service.serve.models import Absences


def test_replicas_are_lost_once_two_readings_so_far_apart_have_seen_none() -> None:
    absences = Absences(3.0)
    absences.read(["a", "b"], {"a": 0, "b": 1}, 100.0)
    assert absences.lost == frozenset()
    absences.read(["a", "b"], {"a": 0, "b": 0}, 102.0)
    assert absences.lost == frozenset()
    absences.read(["a", "b"], {}, 103.0)
    assert absences.lost == {"a"}
    absences.read(["a", "b"], {"a": 1}, 105.0)
    assert absences.lost == {"b"}


def test_one_that_is_back_for_a_moment_or_was_taken_out_begins_anew() -> None:
    absences = Absences(3.0)
    absences.read(["a", "b"], {}, 0.0)
    absences.read(["a"], {"a": 1}, 2.0)
    absences.read(["a", "b"], {}, 3.0)
    absences.read(["a", "b"], {}, 5.0)
    assert absences.lost == frozenset()
    absences.read(["a", "b"], {}, 6.0)
    assert absences.lost == {"a", "b"}
