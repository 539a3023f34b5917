"""One attempt at a training job, in a process of its own: it starts and supervises workers, and reports its end."""
