"""Durable jobs: a resource log says what should be, a detached Ray actor does it, a reconciler compares the two."""

from shared.jobs.attempt import AttemptContext
from shared.jobs.record import JobRecord, JobState
from shared.jobs.registry import Jobs

__all__ = ["AttemptContext", "JobRecord", "JobState", "Jobs"]
