"""Which run of its job a script's fit() is."""

from __future__ import annotations

from shared.settings import StoreSettings
from shared.storage import open_store
from train_service.program.fit_calls import Fit, FitCall, FitDone, Fits, matching


def call(name: str = "digits", line: str = "cells.py:9", **changes: str) -> FitCall:
    values = {"storage_path": "/mnt", "function": "loop", "config_sha256": "1", **changes}
    return FitCall(name=name, line=line, **values)


DIGITS = Fit(number=1, call=call())
LETTERS = Fit(number=2, call=call("letters", "cells.py:20"))


def test_a_name_and_a_storage_path_mean_the_same_run_at_any_line() -> None:
    assert matching([DIGITS, LETTERS], call("letters", "cells.py:40"), {1, 2}) is LETTERS
    assert matching([DIGITS, LETTERS], call("letters", "cells.py:40", storage_path="s3://b"), {1, 2}) is None


def test_a_name_that_is_new_in_each_attempt_is_found_by_its_line() -> None:
    dated = Fit(number=3, call=call("run-2026-11-23", "cells.py:30"))
    fits = [DIGITS, LETTERS, dated]
    assert matching(fits, call("run-2026-11-24", "cells.py:30"), {1, 2}) is dated
    # In the attempt that began it another name is another run, as in a loop over names.
    assert matching(fits, call("run-2026-11-24", "cells.py:30"), {1, 2, 3}) is None


def test_runs_are_read_as_they_began_and_ended(file_store: StoreSettings) -> None:
    fits = Fits(open_store(file_store), "trainingJobs/a", "u1")
    assert fits.read() == []
    done = FitDone(function="loop", config_sha256="1", report=4, checkpoint="c", metrics={"loss": 0.5, "epoch": 3})
    second_run = Fit(number=2, call=call("letters"), reported_overrides=("2 counts",))
    fits.begin(DIGITS)
    fits.finish(1, done)
    fits.begin(second_run)
    first, second = fits.read()
    assert (first.call, first.done, second) == (DIGITS.call, done, second_run)
    assert Fits(open_store(file_store), "trainingJobs/a", "u2").read() == []


def test_a_run_is_over_for_the_same_function_and_configuration_alone() -> None:
    done = FitDone(function="loop", config_sha256="1", report=4, checkpoint="c", metrics={})
    fit = Fit(number=1, call=call(), done=done)
    assert fit.is_done(call())
    assert not fit.is_done(call(config_sha256="2"))
    assert not fit.is_done(call(function="other"))
    assert not DIGITS.is_done(call())
