# One image for Ray's nodes and for the three services: a job's actor runs the same code as the service that made it.
FROM python:3.11-slim-bookworm

# The lock alone decides this layer, so a change of source installs nothing again. pip takes uv by its hash from the
# lock and uv takes the rest, as `make install` does. The development tools in the lock come along: under 2 % of the
# size. Compiled here, since the user that runs it may write nothing below /venv: otherwise each of Ray's processes
# would compile torch and Ray anew, 5 s of CPU.
#
# `--build-arg LOCKS="requirements.lock requirements-frameworks.lock"` adds Hugging Face's libraries and Lightning, for
# programs that import them: 190 MB more.
WORKDIR /app
ARG LOCKS=requirements.lock
COPY requirements*.lock ./
RUN python -m venv /venv \
    && awk '/^uv==/ { on = 1 } on { print } on && !/\\$/ { exit }' requirements.lock >/tmp/uv.lock \
    && /venv/bin/pip install --quiet --no-cache-dir --require-hashes -r /tmp/uv.lock \
    && /venv/bin/uv pip sync --quiet --no-cache --compile-bytecode --python /venv/bin/python --require-hashes ${LOCKS} \
    && rm /tmp/uv.lock
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 1000 millrace
COPY . .
RUN uv pip install --quiet --no-cache --python /venv/bin/python --no-deps --no-build-isolation --offline -e .
USER millrace
