# make rescue   the whole story on directories of its own: protect, train, kill, ruin, last good, drill, restore, resume, compare (ARGS="1 2 3 4": seeds)
# make rescue-remote   the same with a machine that is lost: another one goes on, from an object store (ARGS=ssh: over ssh)
# make rescue-fleet   two hosts train one sharded model under torchrun: one is lost, the other goes on, a spare takes the place
# make test     everything that CI runs
#
# All do their own set-up (see .ci/setup) and need root and /dev/fuse.

SHELL := /bin/sh
# Images of containers set it. Every process that a test starts would then compile the libraries that it imports, which takes longer
# than most tests do (.ci/setup leaves the compiling to the first import).
unexport PYTHONDONTWRITEBYTECODE
VENV  := .venv
PY    := $(VENV)/bin/python
LOCKED := $(PY) -m pip install -qq --require-hashes --no-deps
# A test that hangs on a mount cannot be interrupted from Python: pytest-timeout ends the process, with all stacks. At a load of 9 the
# longest took 300 seconds.
PYTEST := .ci/with-test-disk $(PY) -m pytest --timeout=600 --timeout-method=thread

# Each in a process with directories of its own; a file's tests stay together. JOBS=0: in one process, to look into a test.
# Three on two processors: tests wait for disks, timers and one another's daemons a third of the time.
JOBS ?= 3
# The order is that of tests/costs.txt, expensive files first (ARGS=--record-costs renews it); by the number of its tests, a file with
# one long test would be the last.
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# What is run on the other driver as well; all that mounts would take twice the time.
BOTH_DRIVERS := tests/conformance tests/property/test_mount_exact.py tests/e2e/test_daemon_mounts.py
# And on the kernel driver as on a kernel without passthrough (before 6.9), where everything is cached.
CACHED := tests/conformance tests/property/test_mount_exact.py \
	tests/e2e/test_job_survives_dead_workers.py::test_a_job_does_not_notice_that_its_worker_is_killed

.PHONY: help rescue rescue-remote rescue-fleet test check lock sbom unit torture docs bench bench-store bench-store-memory bench-polite bench-saves bench-sizes bench-remote bench-fleet setup setup-test preflight clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -6
	@echo "make check    formatting, lint, types, layers, known weaknesses of dependencies (no root needed)"
	@echo "make docs     the documentation as a site, with the API from the docstrings, in build/site/html"
	@echo "make lock     newest versions of all dependencies into requirements/ (CONTRIBUTING.md)"
	@echo "make sbom     list of the components of a release, CycloneDX, in dist/"
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
	$(PYTEST) $(PARALLEL) --durations=20 $(ARGS)
	CIUIC_TEST_DRIVER=pyfuse3 $(PYTEST) $(PARALLEL) $(BOTH_DRIVERS)
	CIUIC_TEST_DRIVER=kernel-cached $(PYTEST) $(PARALLEL) $(CACHED)

check:
	@.ci/setup test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@$(PY) .ci/audit.py

lock:
	@.ci/setup test
	@.ci/lock $(ARGS)

sbom:
	@.ci/setup test
	@mkdir -p dist
	$(VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
		--of JSON -o dist/ciuic.cdx.json requirements/run.txt

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
