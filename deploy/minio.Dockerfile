# MinIO is distributed as source: built here by the Go module of its last release.
# MINIO_VERSION is the Makefile's, so that tests and the stack run the same server.
FROM golang:1.26-bookworm AS build
ARG MINIO_VERSION=v0.0.0-20251015172955-9e49d5e7a648
RUN CGO_ENABLED=0 GOBIN=/out go install github.com/minio/minio@${MINIO_VERSION}

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 1000 minio && install -d -o minio /data
COPY --from=build /out/minio /usr/local/bin/minio
USER minio
VOLUME /data
CMD ["minio", "server", "/data", "--address", ":9000"]
