# make demo | test | test-next-host | check-ascend-compile | lint | docs    VENV=DIR uses another virtual environment, PYTHON=... another Python (3.11+)
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.llamafactory-ascend-ready
HOST := llamafactory==0.9.5 torch==2.10.0 torchvision==0.25.0 torchaudio==2.10.0

# One thread per process: the tests run two processes at a time, and results do not depend on the machine.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NEXT := $(VENV)-next
# What depends on the host: where it is entered, what checkpointing, FSDP and the report do in it.
NEXT_TESTS := tests/test_autoload.py tests/features/test_checkpointing_runs.py tests/features/test_sharding.py \
	tests/report/test_runs.py tests/test_cli.py::test_doctor_on_a_sound_installation

.PHONY: demo test test-next-host check-ascend-compile lint docs

demo: $(READY)
	$(BIN)/python -m demo

test: lint
	$(BIN)/python -m pytest -n 2 --durations=20

test-next-host: $(READY)
	$(BIN)/python -m tests.next_host $(NEXT)
	$(NEXT)/bin/python -m pytest -n 2 $(NEXT_TESTS)

# The environment of triton-ascend is its own: it cannot live beside triton.
check-ascend-compile: $(READY)
	$(BIN)/python -m scripts.ascend_compile.environment $(VENV)-ascend-compile
	$(VENV)-ascend-compile/bin/python -m scripts.ascend_compile

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	LLAMAFACTORY_ASCEND_PLUGINS=none $(BIN)/llamafactory-ascend patches > docs/patches.md.new
	mv docs/patches.md.new docs/patches.md

# The file says that the environment is complete; a changed pyproject.toml makes pip look again.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(HOST)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
