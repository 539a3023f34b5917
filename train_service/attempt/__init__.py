"""One attempt at a training job, in a process of its own: Ray Train's workers started, watched, and their end told."""
