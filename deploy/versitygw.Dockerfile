# Another S3 server, for machines on which MinIO's Go module cannot be had: see compose.versitygw.yml.
# VERSITYGW_VERSION is the Makefile's, so that tests and the stack run the same server.
FROM golang:1.26-bookworm AS build
ARG VERSITYGW_VERSION=v1.8.0
RUN CGO_ENABLED=0 GOBIN=/out go install github.com/versity/versitygw/cmd/versitygw@${VERSITYGW_VERSION}

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 1000 versitygw && install -d -o versitygw /data
COPY --from=build /out/versitygw /usr/local/bin/versitygw
USER versitygw
VOLUME /data
CMD ["versitygw", "--port", ":9000", "--health", "/health", "--quiet", "posix", "/data"]
