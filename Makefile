# The first target creates the virtual environment $(VENV). A change of pyproject.toml installs again.
PYTHON ?= python3
TEXTS = accelerate_configs accelerate_recipes benchmarks common docs launchers recipes tests *.md *.toml Makefile
VENV ?= .venv
BIN = $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)
# Images of containers often set it, and then each process compiles torch and the other packages again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train quick quick-tests test test-full test-large ready extension test-gpu gpu-lease benchmark-gpu gallery verified upgrades docs lint clean

# Runs on the CPU, so that two processes fit on every machine.
train: $(VENV)/trains
	CUDA_VISIBLE_DEVICES= accelerate launch --config_file accelerate_configs/ddp.yaml recipes/mnist.py --overwrite_output_dir

# Three workers, because cores are idle while processes start. Tests that share a port or a fixture are in one group.
PYTEST = pytest -n 3 --dist loadgroup

# Tests that start no process, and each recipe on two processes; lint runs at the same time, on another core.
quick: $(VENV)/installed
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick-tests

quick-tests: $(VENV)/installed
	pytest -n 2 --dist loadgroup -m quick

test: ready
	$(PYTEST)

test-full: ready
	$(PYTEST) -m "not gpu and not large"

# Models of real size, one run at a time: about 40 minutes on two cores and 24 GiB. Writes docs/large.md.
test-large: ready
	pytest -m large tests/large
	PYTHONPATH=tests python tests/large/matrix.py

# DeepSpeed's extension compiles while lint runs, so that no test waits for it.
ready: $(VENV)/installed
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint extension

extension: $(VENV)/installed
	python -c 'from accelerate_recipes.common.parallel.extensions import load_extension; load_extension()'

# One GPU, with the packages of the current environment: a machine with a GPU often has torch installed already. PART=1
# and PART=2 are halves for a machine that is lent for ten minutes. Each outcome is a line of the report at once.
test-gpu:
	PYTHONPATH=$(CURDIR) python3 -m pytest -m gpu tests/gpu -n 8 --dist worksteal $(PART:%=--part %) --report gpu_report.jsonl

# What eight minutes on one GPU tell, the most telling first; each result is a line of gpu_lease.jsonl at once.
gpu-lease:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests python3 tests/gpu/lease.py --output gpu_lease.jsonl

# Writes gpu_benchmarks.md. MNIST=<folder with the IDX files> and TEXT=<tinyshakespeare.txt> add the goals that need them.
benchmark-gpu:
	PYTHONPATH=$(CURDIR) python3 benchmarks/gpu_goals.py $(MNIST:%=--mnist %) $(TEXT:%=--text %) > gpu_benchmarks.md
	PYTHONPATH=$(CURDIR) python3 benchmarks/gpt2_variants.py >> gpu_benchmarks.md
	cat gpu_benchmarks.md

# Runs each recipe that has no run in outputs/gallery, and writes docs/recipes/.
gallery: $(VENV)/installed
	python docs/tools/gallery.py

# Writes docs/verified.md from docs/certificates/.
verified: $(VENV)/trains
	python docs/tools/catalogue.py

# One process of each recipe against docs/records/, which an earlier version of the packages may have made.
upgrades: $(VENV)/installed
	python docs/tools/upgrades.py compare newest

# The site, in site/. A link that leads nowhere is an error.
docs: $(VENV)/trains
	$(INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

lint: $(VENV)/installed
	ruff check .
	ruff format --check .
	codespell $(TEXTS)
	lint-imports
	mypy
	mypy recipes/plain/*.py
	mypy recipes/single_file/*.py

# Without --no-compile, pip compiles thousands of modules that no run imports.
INSTALL = $(if $(shell command -v uv),uv pip install --python $(BIN)/python,$(BIN)/pip install --no-compile) --quiet

# The torch with which the records and figures in docs/ were made. TORCH=torch takes the newest that pyproject.toml allows.
TORCH ?= torch==2.13.*

# What a run needs.
$(VENV)/trains: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable . '$(TORCH)'
	touch $@

# What the tests need, too.
$(VENV)/installed: $(VENV)/trains
	$(INSTALL) --editable '.[data,deepspeed,test]'
	touch $@

clean:
	rm -rf $(VENV) outputs site
