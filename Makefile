# A virtual environment with everything in it is made on first use, and again when pyproject.toml changes.
PYTHON ?= python3
TEXTS = accelerate_configs benchmarks common docs launchers recipes tests *.md *.toml Makefile
VENV ?= .venv
BIN = $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)

.PHONY: train quick quick-tests test test-full lint clean

# On the CPU, so that two processes fit on every machine.
train: $(VENV)/installed
	CUDA_VISIBLE_DEVICES= accelerate launch --config_file accelerate_configs/ddp.yaml recipes/mnist.py --overwrite_output_dir

# Three at a time, as starting processes leaves cores idle; what shares a port or a fixture is in one group.
PYTEST = pytest -n 3 --dist loadgroup

# All that starts no process, and each recipe on two processes; beside it, on another core, what lint looks at.
quick: $(VENV)/installed
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick-tests

quick-tests: $(VENV)/installed
	pytest -m quick

test: $(VENV)/installed lint
	$(PYTEST)

test-full: $(VENV)/installed lint
	$(PYTEST) -m "not gpu"

lint: $(VENV)/installed
	ruff check .
	ruff format --check .
	codespell $(TEXTS)
	lint-imports
	mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[deepspeed,test]'
	touch $@

clean:
	rm -rf $(VENV) outputs
