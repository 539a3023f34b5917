"""One attempt at a training job, in its own process. The attempt starts and supervises workers, and reports its end."""
