# Each verb once; CI runs the same ones (.ci/run).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where the tools that are not Python packages are kept. CI puts it outside the tree, to build them only once.
MILLRACE_CACHE ?= .cache
CACHE := $(abspath $(MILLRACE_CACHE))
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^# --- / { gsub(/^# --- | -+$$/, ""); heading = $$0 } \
	  /^[a-z0-9-]+:.*## / { if (heading) print "\n" heading; heading = ""; printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- Installation ----------------------------------------------------------------------------------------------------

.PHONY: install lock
install: $(VENV)/.installed ## the virtual environment .venv, from the hash-pinned locks

# pip installs uv by its hash from the lock, and uv everything else: a quarter of the time that pip would take.
# Compiled here, once: uv leaves it to the first import, so where PYTHONDONTWRITEBYTECODE is set each of Ray's many
# processes would compile torch and Ray anew, 8.5 s of CPU instead of 3.7.
LOCKS := requirements.lock requirements-frameworks.lock
$(VENV)/.installed: $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("Millrace is locked for Python 3.11: make PYTHON=/path/to/python3.11")'
	[ -x $(BIN)/uv ] || { $(PYTHON) -m venv $(VENV) && \
	  $(BIN)/pip install -q --require-hashes -r <(awk '/^uv==/ { on = 1 } on { print } on && !/\\$$/ { exit }' requirements.lock); }
	$(BIN)/uv pip sync -q --compile-bytecode --python $(BIN)/python --require-hashes $(LOCKS)
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation --offline -e .
	@touch $@

# The second lock holds only what the first has not, and takes its versions from the first.
LOCK := $(BIN)/uv pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links \
  --python-version 3.11 --custom-compile-command 'make lock'
LOCKED_EXTRAS := server gpu tensorboard mlflow wandb dev
FRAMEWORK_EXTRAS := huggingface lightning
lock: install ## work the lock files out again, after a change of dependencies
	$(LOCK) $(LOCKED_EXTRAS:%=--extra %) pyproject.toml -o requirements.lock
	$(LOCK) $(FRAMEWORK_EXTRAS:%=--extra %) pyproject.toml -c requirements.lock -o requirements-frameworks.lock \
	  $$(awk -F '==' '/^[a-z0-9]/ { print "--no-emit-package " $$1 }' requirements.lock)

# --- Protos ----------------------------------------------------------------------------------------------------------

.PHONY: gen
GEN := protos/gen
PROTOS = $(shell find protos -path protos/gen -prune -o -name '*.proto' -print | sort)
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# googleapis-common-protos names the source of operations.proto otherwise than the import that its own generated code
# registers; the mapping gives it back its name.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iprotos -I$(SITE) \
	-Igoogle/longrunning/operations.proto=$(SITE)/google/longrunning/operations_proto.proto

gen: install ## generated Python in protos/gen
	@mkdir -p $(GEN)
	@find $(GEN) -name '*_pb2*.py*' -delete
	$(PROTOC) --python_out=$(GEN) --pyi_out=$(GEN) --grpc_python_out=$(GEN) $(PROTOS)

# --- Checks ----------------------------------------------------------------------------------------------------------

BUF_VERSION := 1.75.0
BUF := $(CACHE)/buf-$(BUF_VERSION)/node_modules/.bin/buf

$(BUF):
	@command -v npm >/dev/null || { echo "make lint needs npm (Node.js 18 or newer) for buf, which checks the protos." >&2; exit 1; }
	npm install --silent --no-audit --no-fund --prefix $(CACHE)/buf-$(BUF_VERSION) @bufbuild/buf@$(BUF_VERSION)

.PHONY: lint lint-python lint-protos lint-generated lint-docs
lint: lint-python lint-protos lint-generated lint-docs ## style, types, architecture, protos, generated code, links of the documents

lint-python: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_words

# buf reads what protoc compiled: so the protos of googleapis need not be fetched a second time.
lint-protos: install $(BUF)
	@image=$$(mktemp --suffix=.binpb); trap 'rm -f "$$image"' EXIT; \
	$(PROTOC) --include_imports --include_source_info --descriptor_set_out="$$image" $(PROTOS); \
	$(BUF) lint "$$image" --config buf.yaml --path millrace --path inference

lint-generated: install
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(MAKE) -s gen GEN="$$fresh" >/dev/null; \
	diff -r -x __pycache__ "$$fresh" protos/gen || { echo "protos/gen is not what the protos say: run make gen" >&2; exit 1; }

# --- Documents -------------------------------------------------------------------------------------------------------

# Built in a folder of its own: nothing is left behind, and nothing that an earlier build kept is taken for the page.
lint-docs: install ## the documents build, and each of their links and anchors leads somewhere
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	cp -r docs zensical.toml "$$fresh"; $(MAKE) -s contracts CONTRACTS="$$fresh/docs/contracts"; \
	$(BIN)/zensical build --strict --config-file "$$fresh/zensical.toml"

# The contracts as pages, from the comments of the protos; git ignores them.
.PHONY: docs contracts
CONTRACTS := docs/contracts
contracts: install
	@image=$$(mktemp --suffix=.binpb); trap 'rm -f "$$image"' EXIT; \
	$(PROTOC) --include_source_info --descriptor_set_out="$$image" $(PROTOS); \
	$(BIN)/python tools/proto_reference.py "$$image" "$(CONTRACTS)"

DOCS_ADDRESS ?= 127.0.0.1:8000
docs: contracts ## serve the documents: DOCS_ADDRESS=127.0.0.1:8000; a page is built again when it changes
	$(BIN)/zensical serve --dev-addr $(DOCS_ADDRESS)

# --- Tests -----------------------------------------------------------------------------------------------------------

.PHONY: test test-fast test-real test-timed
PYTEST := MILLRACE_CACHE="$(CACHE)" $(BIN)/pytest
# TEST_SEED=1 runs files, and the tests in each, in an order drawn from that seed: shared heads and stacks must bear any.
# Property tests draw their examples from it, too; without it each run tries the same ones.
TEST_SEED ?=
IN_ANY_ORDER = $(if $(TEST_SEED),-p randomly --randomly-seed=$(TEST_SEED) --randomly-dont-reset-seed \
	--hypothesis-profile=drawn --hypothesis-seed=$(TEST_SEED))
SHARED_OUT = --dist loadscope --no-loadscope-reorder --durations 40 \
	-m "not long and not chaos and not timed" $(IN_ANY_ORDER)
# Read by every process that a test starts; where PYTHONDONTWRITEBYTECODE is set, none of them would write it.
.PHONY: bytecode
bytecode: install
	@$(BIN)/python -m compileall -q -j 0 -x example_package benchmarks client data_service inference_service protos/gen shared \
	  tests/support train_service
	@$(BIN)/python -m tools.compile_tests

test: install ## all tests but those of make long and make chaos; without an S3 server, those on s3:// are skipped
	@$(MAKE) s3 || echo "No S3 server: the tests that need one say so." >&2
	@$(MAKE) --keep-going test-fast test-real test-timed

# These tests wait more than they compute, so four processes share two cores.
FAST_TEST_PROCESSES ?= 4
test-fast: bytecode ## unit and contract tests
	$(PYTEST) -n $(FAST_TEST_PROCESSES) $(SHARED_OUT) tests/unit tests/contract

# Ray heads and services keep two cores busy.
TEST_PROCESSES ?= 2
test-real: bytecode ## tests with real services and Ray: integration, end to end, faults
	$(PYTEST) -n $(TEST_PROCESSES) $(SHARED_OUT) tests/integration tests/e2e tests/fault

# One process: what these tests measure, other tests beside them would change. Importing the files of the other nine
# thousand tests would take as long as these tests do.
test-timed: bytecode ## tests that measure time, one after the other
	$(PYTEST) -n 0 --durations 10 -m "timed and not long and not chaos" $(IN_ANY_ORDER) \
	  $$(grep -rlw timed tests --include 'test_*.py')

.PHONY: retest
retest: install ## the tests that failed last, alone
	MILLRACE_CACHE="$(CACHE)" $(BIN)/pytest --last-failed --last-failed-no-failures none

.PHONY: long chaos
long: install ## whole runs of a minute or more each: suspended, resumed, swept, rolled back, scaled; all examples of property tests
	@result=0; $(PYTEST) -m long --durations 0 || result=$$?; \
	$(PYTEST) -m "hypothesis and not long" --hypothesis-profile=thorough || result=$$?; exit $$result
chaos: install ## the long fault tests: whole runs under blow after blow, Ray heads killed and replaced; a table of all blows
	MILLRACE_CACHE="$(CACHE)" $(BIN)/pytest -m chaos

.PHONY: fuzz soak
# Which messages: of another seed each day, unless it is given. What fails names its seed and its number.
FUZZ_SECONDS ?= 120
FUZZ_SEED ?= $(shell date +%F)
fuzz: install ## mutated and hostile requests at the inference service: FUZZ_SECONDS=120, FUZZ_SEED=; counts at its end
	MILLRACE_FUZZ_SECONDS=$(FUZZ_SECONDS) MILLRACE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/pytest tests/unit/inference_service/serve/test_fuzz.py

SOAK_MINUTES ?= 4
soak: install ## good, bad, cancelled, late and left requests at a real service: SOAK_MINUTES=4; fails where its memory grows
	$(BIN)/python -m benchmarks.serve_soak --minutes $(SOAK_MINUTES)

# --- The S3 server of the tests --------------------------------------------------------------------------------------

# RELEASE.2025-10-15T17-29-55Z: MinIO is distributed as source, and Go modules name a release by its commit.
MINIO_VERSION := v0.0.0-20251015172955-9e49d5e7a648
VERSITYGW_VERSION := v1.8.0
# The path of a MinIO program that is already there, instead of building one.
MILLRACE_MINIO ?=

.PHONY: minio versitygw s3
ifneq ($(MILLRACE_MINIO),)
minio:
	@[ -x "$(MILLRACE_MINIO)" ] || { echo "MILLRACE_MINIO=$(MILLRACE_MINIO) is not a program." >&2; exit 1; }
else
minio: $(CACHE)/bin/.minio-$(MINIO_VERSION) ## the pinned MinIO server, in .cache/bin
endif

versitygw: $(CACHE)/bin/.versitygw-$(VERSITYGW_VERSION)

$(CACHE)/bin/.minio-$(MINIO_VERSION): module := github.com/minio/minio@$(MINIO_VERSION)
$(CACHE)/bin/.versitygw-$(VERSITYGW_VERSION): module := github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW_VERSION)
# The version is in the marker's name: a new pin builds anew, and leaves no other version's program behind if it fails.
$(CACHE)/bin/.minio-$(MINIO_VERSION) $(CACHE)/bin/.versitygw-$(VERSITYGW_VERSION):
	@command -v go >/dev/null || { echo "This needs Go 1.25 or newer; or set MILLRACE_MINIO to a minio program." >&2; exit 1; }
	@mkdir -p $(@D)
	@name=$(notdir $(firstword $(subst @, ,$(module)))); rm -f $(@D)/$$name $(@D)/.$$name-*
	GOBIN=$(@D) go install $(module)
	@touch $@

# Only a refusal by the module proxy brings versitygw in. Whatever else goes wrong is an error, so that a bad moment of
# the network never changes silently what the tests run against. Nothing remembers a refusal: asking takes a second.
s3: ## the S3 server that tests start: MinIO, or versitygw where MinIO's module is refused
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; \
	if $(MAKE) minio 2>&1 | tee "$$said" >&2; then exit 0; fi; \
	grep -qE ': (403 Forbidden|410 Gone)$$|module version is not available' "$$said" || exit 1; \
	echo "MinIO's module is refused on this machine (above, word for word)." >&2; \
	echo "THE TESTS ON s3:// RUN AGAINST VERSITYGW $(VERSITYGW_VERSION), another S3 server, NOT AGAINST MINIO." >&2; \
	$(MAKE) versitygw

# --- Benchmarks ------------------------------------------------------------------------------------------------------

# Ours beside the peers in one run; the last line is one JSON object.
.PHONY: bench-data bench-train bench-serve bench-scale gpu-check lock-mlserver
bench-data: install ## rows/s of ingest, transforms and reading, over pyarrow and plain Ray Data
	$(BIN)/python -m benchmarks.data

bench-scale: install ## what operations cost at 1, 10, 100 and 1,000 times a size, on a simulated store
	$(BIN)/python -m benchmarks.scale

bench-train: install ## loader, step, checkpoint, whole loops and recovery of training, over torch and plain Ray Train
	$(BIN)/python -m benchmarks.train

bench-serve: install ## a served model's speed, over the bare model, Ray Serve's gRPC ingress and MLServer
	MILLRACE_CACHE="$(CACHE)" $(BIN)/python -m benchmarks.serve

gpu-check: install ## what is promised of a GPU, tried on the one here; without one it says so and fails
	$(BIN)/python -m benchmarks.gpu_check

# MLServer wants other versions than ours, but for torch; the bench makes an environment of this lock.
lock-mlserver: install
	$(BIN)/uv pip compile -q --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --python-version 3.11 --custom-compile-command 'make lock-mlserver' benchmarks/mlserver.in -o benchmarks/mlserver.lock

# --- Running ---------------------------------------------------------------------------------------------------------

.PHONY: demo up down clean
demo: install ## from raw data to a served model, on this machine (KEEP=1 leaves it running)
	$(BIN)/millrace demo $(if $(filter-out 0,$(KEEP)),--keep)

up: install ## the three services and Ray, on this machine
	$(BIN)/millrace up

down: install ## stop what make up started
	$(BIN)/millrace down

clean: ## remove what make built
	rm -rf $(VENV) .cache docs/contracts .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
