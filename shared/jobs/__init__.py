"""Durable jobs: a resource log holds the desired state, a detached Ray actor works, a reconciler compares the two."""

from shared.jobs.attempt import AttemptContext
from shared.jobs.registry import Jobs
from shared.jobs.transitions import JobRecord, JobState

__all__ = ["AttemptContext", "JobRecord", "JobState", "Jobs"]
