# Everything runs in a virtual environment of its own, which any target below makes when it is needed.

# The first Python that fits; override with PYTHON=python3.13.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)
# PyTorch's own index of CPU builds, asked only if pip as configured knows no such build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

TORCH := torch==2.13.0+cpu

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTO := ecoserve/proto/v1

.PHONY: up test lint unit soak e2e proto crds rules lock venv clean

up: $(STAMP)
	@exec $(BIN)/ecoserve up $(ARGS)

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# Long counts: many more examples of each property, large waves of calls, long silences, many kills.
soak: $(STAMP)
	ECOSERVE_SOAK=1 $(BIN)/python -m pytest --hypothesis-profile=soak --timeout 3600 $(ARGS)
	ECOSERVE_SOAK=1 $(BIN)/python -m pytest -rs e2e/kube

# End-to-end tests on the cluster that KUBECONFIG names. It must have the images OPERATOR_IMAGE and
# WORKER_IMAGE (by default as the README builds them); with an empty WORKER_IMAGE no engine is run.
e2e: $(STAMP)
	$(BIN)/python -m pytest -rs e2e/kube $(ARGS)

# Regenerates the gRPC stubs; tests/local/test_proto.py fails when they are not up to date.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		$(PROTO)/session.proto $(PROTO)/admin.proto

# Regenerates the CRDs from the operator's models; tests/operator/test_crd_files.py fails when they are
# not up to date.
crds: $(STAMP)
	$(BIN)/python -m ecoserve_operator.crd crds
	$(BIN)/python -m ecoserve_operator.crd charts/ecoserve/crds

# Regenerates the chart's recording rules; tests/scaling/test_rules.py fails when they are not up to
# date.
rules: $(STAMP)
	$(BIN)/python -m ecoserve.scaling.rules charts/ecoserve/rules.yaml

# Writes down what is installed now as what everyone installs. torch's +cpu is dropped: it is a
# matter of the build, and vLLM's own requirement asks for it.
lock: $(STAMP)
	@{ sed -n '/^#/p' requirements.lock; $(PIP) freeze --exclude-editable --exclude pip \
		--exclude setuptools | sed 's/+cpu$$//'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo \
		"$(PYTHON) has no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo \
		"vLLM needs libnuma.so.1; on Debian: apt-get install libnuma1"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing (some minutes the first time)"
	@extra=; $(PIP) install --quiet --dry-run --no-deps --ignore-installed '$(TORCH)' >/dev/null 2>&1 \
		|| extra='--extra-index-url $(TORCH_INDEX)'; \
	set -x; $(PIP) install -qq $$extra --constraint requirements.lock --editable '.[cpu,operator,dev]'
# vLLM's CPU wheel asks for these three, but their builds on PyPI are for CUDA and stop transformers
# from being imported beside a CPU build of torch. Nothing here uses them.
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
