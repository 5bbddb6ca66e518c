# Everything runs in .venv, made here; PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
SETUP := setup.cfg pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-room thorough check coverage docs soak fuzz versions outside device horovod clean

help:
	@echo "make demo    in two to three minutes: does compression pay over a slow network? tables, and a report in out/demo"
	@echo "make test    all tests; of large products of cases so many that every value is met"
	@echo "make test-room ROOM=exchange  the tests of one room of grace/, and those that hold it from outside"
	@echo "make thorough  all tests in all cases"
	@echo "make check   style, types and the fast tests"
	@echo "make docs    the pages and the API reference as a site in out/docs, its links checked; no network once installed"
	@echo "make coverage  all tests, and the lines and branches of grace/ that they run: out/coverage/report.txt (one to three hours)"
	@echo "make soak    training scripts drawn from seeds, for MINUTES=10; RANKS=2, ENGINE=gloo (mpirun-mpi, ...)"
	@echo "make fuzz    property tests with new examples, for MINUTES=10; seeds and counts are printed"
	@echo "make versions  tries TORCH='2.6.0 2.14.1' and PYTHONS='python3.10': an environment (gigabytes) and a log for each in out/versions"
	@echo "make outside  torch's own tests of DistributedDataParallel and Accelerate's test scripts, with Grace in every model"
	@echo "make device  tries and measures Grace on a GPU, with the Python that is there: tables in OUT=out/device"
	@echo "make horovod builds Horovod for torch and TensorFlow, and tries it; MPI=system takes your MPI, JOBS=n compilers"
	@echo "make clean   remove .venv and everything else that was made here"
	@echo "PYTHON=python3.12 chooses the interpreter (3.10 or newer)"

demo: $(VENV)/demo.stamp
	$(BIN)/grace demo --out out/demo

# Loops are compiled once ahead, those of some options on the other core: ranks that meet in one would all compile it.
test: $(VENV)/test.stamp $(VENV)/horovod.stamp
	@tools/programs.sh
	@$(BIN)/grace warmup "topk(chunk=64)" "block(format=fp8)" "block(hadamard=32)" > /dev/null & $(BIN)/grace warmup && wait
	@status=0; \
	$(BIN)/python -m pytest -n 2 -m "not alone" --durations=10 || status=$$?; \
	$(BIN)/python -m pytest -m alone $$(grep -lr --include="test_*.py" "mark.alone" tests) || status=$$?; \
	exit $$status

# Tests of a room that do not lie in tests/ROOM, and those of other rooms that hold it.
TESTS_core := tests/core tests/exchange tests/faults
TESTS_kernels := tests/kernels tests/exchange/test_fused_codec.py tests/exchange/test_loops_or_plain.py
TESTS_compressors := tests/compressors tests/kernels tests/exchange/test_oracles.py
TESTS_exchange := tests/exchange tests/communicators tests/memories
TESTS_communicators := tests/communicators tests/exchange/test_route_bytes.py tests/planner/test_exchange_costs.py
TESTS_backends := tests/backends tests/faults
TESTS_session := tests/session tests/situations
TESTS_torch := tests/in_torch tests/situations
TESTS_tensorflow := tests/in_tensorflow
TESTS_pipeline := tests/pipeline tests/in_torch/pipeline tests/situations tests/cli/test_pipeline.py
test-room: $(VENV)/test.stamp $(VENV)/horovod.stamp
	@test -d "grace/$(ROOM)" -a -n "$(ROOM)" || { echo "make test-room ROOM=NAME, where NAME is one of:" \
		$$(ls -d grace/*/ | cut -d/ -f2 | grep -v __pycache__); exit 1; }
	$(BIN)/python -m pytest -n 2 -m "not alone" grace/$(ROOM) $(or $(TESTS_$(ROOM)),tests/$(ROOM)) \
		tests/test_floors.py tests/test_import.py

thorough:
	@GRACE_THOROUGH=1 $(MAKE) --no-print-directory test

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not slow and not ranks"

# A warning (a link or a reference that leads nowhere) fails it. TensorFlow and Horovod are read where they are installed.
docs: $(VENV)/docs.stamp
	@rm -rf out/docs
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m sphinx -b html -q -W --keep-going -E -d out/docs/.cache docs out/docs
	@rm -rf out/docs/.cache
	@echo "out/docs/index.html is there."
# Processes that tests start are measured too: each reads this variable when it starts (see pyproject.toml).
coverage: $(VENV)/test.stamp $(VENV)/horovod.stamp
	@rm -rf out/coverage && mkdir -p out/coverage
	@export COVERAGE_FILE=$(CURDIR)/out/coverage/data; status=0; \
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(MAKE) --no-print-directory test || status=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage json --quiet -o out/coverage/report.json && \
	$(BIN)/coverage report --show-missing > out/coverage/report.txt && tail -1 out/coverage/report.txt; \
	exit $$status

# Every failing seed is printed: make it a test, and run it again by python -m tests.soak --seed.
soak: $(VENV)/test.stamp
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) --ranks $(or $(RANKS),2) --engine $(or $(ENGINE),gloo)

fuzz: $(VENV)/test.stamp
	$(BIN)/python -m tests.fuzzing --minutes $(or $(MINUTES),10)

versions: $(VENV)/test.stamp
	$(BIN)/python tools/versions.py --torch $(TORCH) --python $(PYTHONS)

# torch's own tests need one package more.
outside: $(VENV)/test.stamp
	@$(PIP) expecttest
	$(BIN)/python -m tools.outside

# Nothing is installed: it is for a machine that is lent for minutes. ARGS="--only bandwidth" and the like.
device:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) tools/on_device.py --out $(or $(OUT),out/device) $(ARGS)

# Its wheel is kept in the user's cache (the top of the script says where), so that the second time takes seconds.
horovod:
	@rm -f $(VENV)/horovod.stamp
	@$(MAKE) --no-print-directory $(VENV)/horovod.stamp

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f docs/methods.md docs/strategy-files.md docs/benchmarks.html
	find grace tests examples tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "Grace needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." \
		"Choose another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/python.stamp $(SETUP)
	@echo "Installing what the demo needs into $(VENV); the first time takes minutes."
	$(PIP) -e ".[torch,bench]"
	@touch $@

$(VENV)/test.stamp: $(VENV)/python.stamp $(SETUP)
	@echo "Installing what the tests need into $(VENV); the first time takes minutes."
	$(PIP) -e ".[torch,bench,strategy,integrations,dev]"
	@touch $@ $(VENV)/demo.stamp

$(VENV)/docs.stamp: $(VENV)/python.stamp $(SETUP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make docs needs Python 3.11 or newer; $(VENV) has $$($(BIN)/python --version)." \
		"Choose another: make clean, then make docs PYTHON=python3.12"; exit 1; }
	@echo "Installing what the documentation needs into $(VENV); the first time takes minutes."
	$(PIP) -e ".[torch,bench,strategy,docs]"
	@touch $@ $(VENV)/demo.stamp

# Both frameworks first: one wheel holds Horovod for all that it finds.
$(VENV)/frameworks.stamp: $(VENV)/python.stamp $(SETUP)
	@echo "Installing torch and TensorFlow into $(VENV); the first time takes minutes."
	$(PIP) -e ".[torch,mpi]" tensorflow-cpu
	@touch $@

$(VENV)/horovod.stamp: $(VENV)/frameworks.stamp tools/build_horovod.py
	$(BIN)/python tools/build_horovod.py $(if $(MPI),--mpi=$(MPI)) $(if $(JOBS),--jobs=$(JOBS))
	@touch $@
