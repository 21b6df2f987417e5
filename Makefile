# make rescue   the whole story on directories of its own: protect, train, kill, ruin, last good, drill, restore, resume, compare (ARGS="1 2 3 4": seeds)
# make rescue-remote   the same with a machine that is lost: another one goes on, from an object store (ARGS=ssh: over ssh)
# make rescue-fleet   two hosts train one sharded model under torchrun: one is lost, the other goes on, a spare takes the place
# make test     what gates a change, in ten minutes; make test-full: everything, in half an hour (CONTRIBUTING.md)
#
# All do their own set-up (see .ci/setup) and need root and /dev/fuse.

SHELL := /bin/sh
# Images of containers set it. Every process that a test starts would then compile the libraries that it imports, which takes longer
# than most tests do (.ci/setup leaves the compiling to the first import).
unexport PYTHONDONTWRITEBYTECODE
VENV  := .venv
PY    := $(VENV)/bin/python
LOCKED := $(PY) -m pip install -qq --require-hashes --no-deps
# Each in a process with directories of its own; a file's tests stay together. JOBS=0: in one process, to look into a test.
# Three on two processors: tests wait for disks, timers and one another's daemons a third of the time.
JOBS ?= 3
# Which part of the suite (tests/support/suite.py): test, full, slice-1 to slice-3, or several of them.
TIER ?= test

.PHONY: help rescue rescue-remote rescue-fleet test test-full check lock release deb unit torture docs bench bench-store bench-store-memory bench-polite bench-saves bench-sizes bench-remote bench-fleet setup setup-test preflight clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -6
	@echo "make check    formatting, lint, types, layers, known weaknesses of dependencies (no root needed)"
	@echo "make docs     the documentation as a site, with the API from the docstrings, in build/site/html"
	@echo "make lock     newest versions of all dependencies into requirements/ (CONTRIBUTING.md)"
	@echo "make release  the distributions of VERSION=… with their components and checksums in dist/, and what is left to do (docs/releasing.md)"
	@echo "make deb      a Debian package of these, for this machine's Python and processor (docs/releasing.md)"
	@echo "make torture  tries to break every promise for SECONDS=600 with SEED=… DRIVER=kernel (or pyfuse3, kernel-cached) and prints one table of figures"
	@echo "make bench    measures ciuic next to the plain directory; a table and a plot in benchmarks/results (docs/benchmarks.md)"
	@echo "make bench-store  measures snapshots next to restic, borg and cp (docs/benchmarks.md)"
	@echo "make bench-store-memory  measures what verify, prune and a capture keep in memory for each chunk"
	@echo "make bench-polite  measures fio beside captures, under each I/O scheduler, and snapshots on a busy host (docs/benchmarks.md)"
	@echo "make bench-saves  measures what saving a training costs it, next to torch.save and dcp.async_save (docs/benchmarks.md)"
	@echo "make bench-remote  measures uploads and restores of a remote, next to restic and rclone (docs/benchmarks.md)"
	@echo "make bench-fleet  simulates a fleet on one remote: requests, cost, time by the number of hosts (docs/scale.md)"
	@echo "make bench-sizes  measures what ten checkpoints of a training cost on the disk (docs/benchmarks.md)"
	@echo "make clean    removes the virtual environment and all caches"

preflight-%:
	@.ci/preflight $*

rescue: preflight-rescue
	@.ci/setup run
	@$(PY) tests/e2e/rescue/story.py $(ARGS)

rescue-remote: preflight-rescue-remote
	@.ci/setup test
	@$(PY) tests/e2e/rescue/remote_story.py $(ARGS)

rescue-fleet: preflight-rescue-fleet
	@.ci/setup test
	@$(PY) tests/e2e/rescue/fleet_story.py

test: preflight-test
	@.ci/setup test
	@$(MAKE) --no-print-directory check
	JOBS=$(JOBS) PYTHONPATH=tests .ci/with-test-disk $(PY) -m support.suite $(TIER) $(ARGS)

# What passed is recorded for `make release`, if it was the same content all the time.
test-full:
	@.ci/setup test
	@tree=$$($(PY) .ci/build.py) && $(MAKE) --no-print-directory test TIER=full && \
	{ [ -n "$(ARGS)" ] || [ "$$tree" != "$$($(PY) .ci/build.py)" ] || { mkdir -p dist && echo "$$tree" >dist/tested; }; }

# The advisory service is asked meanwhile: it may take its time to say nothing.
check:
	@.ci/setup test
	@$(PY) .ci/audit.py & audit=$$!; set -ex; \
	$(VENV)/bin/ruff format --check .; \
	$(VENV)/bin/ruff check .; \
	$(VENV)/bin/mypy; \
	$(VENV)/bin/lint-imports; \
	wait $$audit

lock:
	@.ci/setup test
	@.ci/lock $(ARGS)

release:
	@.ci/setup test
	@.ci/release $(VERSION)

deb:
	@.ci/setup test
	@.ci/deb

SECONDS ?= 600
DRIVER ?= kernel
torture: preflight-torture
	@.ci/setup test
	@CIUIC_TEST_DRIVER=$(DRIVER) PYTHONPATH=tests $(PY) -m torture --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

docs:
	@.ci/setup test
	@$(PY) -c 'import mkdocstrings' 2>/dev/null || $(LOCKED) -r requirements/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(PY) docs/site/build.py
	@echo "build/site/html/index.html"

bench: preflight-bench
	@.ci/setup test
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(LOCKED) -r requirements/bench.txt
	@PYTHONPATH=tests $(PY) -m benchmarks $(ARGS)
	@$(if $(ARGS),,PYTHONPATH=tests $(PY) -m benchmarks.fleet)

bench-store: preflight-bench-store
	@.ci/setup test
	@$(VENV)/bin/python -c 'import matplotlib' 2>/dev/null || $(LOCKED) -r requirements/bench.txt
	@PYTHONPATH=tests $(PY) -m benchmarks.store $(ARGS)

bench-store-memory:
	@.ci/setup test
	@PYTHONPATH=tests $(PY) -m benchmarks.store.memory $(ARGS)

bench-saves:
	@.ci/setup test
	@$(PY) -m benchmarks.saves $(ARGS)

bench-sizes:
	@.ci/setup test
	@$(PY) -m benchmarks.sizes $(ARGS)

bench-remote:
	@.ci/setup test
	@PYTHONPATH=tests $(PY) -m benchmarks.remote $(ARGS)

bench-fleet:
	@.ci/setup test
	@PYTHONPATH=tests $(PY) -m benchmarks.fleet $(ARGS)

bench-polite: preflight-bench-store
	@.ci/setup test
	@PYTHONPATH=tests $(PY) -m benchmarks.polite $(ARGS)

setup:
	@.ci/setup run

setup-test:
	@.ci/setup test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
