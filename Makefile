# A new user needs only `make serve` and `make test`. Both set up what they need, once, in .venv.
# Written for GNU make 3.81 and later.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# optional packages to install first, such as `vision audio`: `ingot extras` lists them
EXTRAS ?=
# how many tests run at once: some of them wait; 0 runs them one after another
JOBS ?= 3
# when a slow test counts as hanging
FOREIGN := --timeout=900 -o faulthandler_timeout=1000
AT_LENGTH := --timeout=3600 -o faulthandler_timeout=3700
# cpu, cuda or none; tools/setup detects it if empty
BACKEND ?=
export BACKEND
# Tests start many processes, so bytecode is cached even if the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help serve test test-slow test-all soak cycles test-clients test-oracle test-packages packages sanitize bench check format setup clean
.NOTPARALLEL:

help:
	@echo "make serve         serve a model on http://127.0.0.1:8000      ARGS='--port 9000' passes flags on"
	@echo "                   with optional packages                      EXTRAS='vision audio'"
	@echo "make test          run the tests                              ARGS='-k chat' passes flags on"
	@echo "make test-slow     the slow tests, in an hour or two          PART=3/12 runs one part of twelve"
	@echo "make test-all      everything: all tests, clients, packages, transformers, soak"
	@echo "make soak          keep a server busy for half an hour        ARGS='--minutes 5' for less"
	@echo "make cycles        load and unload models 100 times           ARGS='--cycles 20' for fewer"
	@echo "make check         lint, formatting and types"
	@echo "make test-clients  tests with other projects' clients"
	@echo "make test-oracle   tests against transformers (installs torch)"
	@echo "make packages      build the wheels into dist/"
	@echo "make test-packages install them into an empty environment and send a request"
	@echo "make sanitize      the kernels' tests with gcc's sanitizers"
	@echo "make bench         compare with other servers"
	@echo "make format        format the code"
	@echo "make setup         everything for development, and the pre-commit hook"
	@echo "make clean         remove the environment and all build output"

serve: $(VENV)/.ready-serve $(VENV)/.ready-kernels
	@$(if $(EXTRAS),$(BIN)/ingot extras add $(EXTRAS) && )$(BIN)/ingot serve $(ARGS)

test: $(VENV)/.ready-test $(VENV)/.ready-kernels
	$(BIN)/ingot pull
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 2 -m "not clients and not oracle and not packages and not slow" $(ARGS)

test-slow: $(VENV)/.ready-test $(VENV)/.ready-bench $(VENV)/.ready-kernels
	$(BIN)/ingot pull
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --hypothesis-profile=thorough $(AT_LENGTH) -m "(slow or hypothesis) and not clients and not oracle and not packages" \
		$(if $(PART),--part $(PART)) $(ARGS)

test-all: check test test-slow test-clients test-packages test-oracle soak cycles

soak: $(VENV)/.ready-test $(VENV)/.ready-bench $(VENV)/.ready-kernels
	for model in all-minilm-l6-v2 whisper-tiny.en; do $(BIN)/ingot pull $$model || exit 1; done
	$(BIN)/python -m bench.soak $(ARGS)
	$(if $(ARGS),,for model in hybrid window; do \
		$(BIN)/python -m bench.soak --minutes 4 --model foundry/models/$$model --report build/soak-$$model || exit 1; done)

cycles: $(VENV)/.ready-test $(VENV)/.ready-bench $(VENV)/.ready-kernels
	$(BIN)/ingot pull
	$(BIN)/python -m bench.unloading $(ARGS)

test-clients: $(VENV)/.ready-test $(VENV)/.ready-clients $(VENV)/.ready-kernels
	$(BIN)/ingot pull
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FOREIGN) -m clients $(ARGS)

test-oracle: $(VENV)/.ready-test $(VENV)/.ready-oracle $(VENV)/.ready-kernels
	$(BIN)/ingot pull
	$(BIN)/python -m pytest $(FOREIGN) -m oracle $(ARGS)

packages: $(VENV)/.ready-package
	tools/package $(ARGS)

test-packages: $(VENV)/.ready-test $(VENV)/.ready-package
	tools/package
	$(BIN)/ingot pull
	$(BIN)/python -m pytest $(FOREIGN) -m packages $(ARGS)

sanitize: $(VENV)/.ready-test $(VENV)/.ready-kernels
	tools/sanitize $(ARGS)

bench: $(VENV)/.ready-bench $(VENV)/.ready-kernels
	$(BIN)/python -m bench $(ARGS)

check: $(VENV)/.ready-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.ready-test $(VENV)/.ready-check $(VENV)/.ready-bench $(VENV)/.ready-kernels
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache tests/clients/node_modules \
		tests/clients/.venv tests/clients/.venv-aider
	find ingot tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is as new as the last set-up for its purpose. Removing .venv removes them all.
$(VENV)/.ready-serve: pyproject.toml tools/setup
	@tools/setup serve
	@touch $@

$(VENV)/.ready-test: pyproject.toml tools/setup tools/fetch-templates tools/precompile-header $(VENV)/.ready-serve
	@tools/setup test
	@tools/precompile-header
	@tools/install-chromium
	@tools/fetch-templates
	@touch $@

$(VENV)/.ready-check $(VENV)/.ready-bench $(VENV)/.ready-oracle $(VENV)/.ready-package: pyproject.toml tools/setup $(VENV)/.ready-serve
	@tools/setup $(patsubst .ready-%,%,$(notdir $@))
	@touch $@

$(VENV)/.ready-clients: $(wildcard tests/clients/package.json tests/clients/requirements*.txt) $(VENV)/.ready-serve
	@tools/install-node-clients
	@tools/install-python-clients
	@touch $@

# Without a compiler this fails, and ingot is slower.
$(VENV)/.ready-kernels: $(wildcard ingot/kernels/build.py native/CMakeLists.txt native/pyproject.toml native/src/* native/ingot_native/*) $(VENV)/.ready-serve
	-@$(BIN)/python -m ingot.kernels.build
	@touch $@
