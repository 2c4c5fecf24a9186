# On a fresh machine run `make demo` or `make test`. Both create their environment in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Files are compiled when they are imported; most of the 17,000 never are
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --retries 10 --no-compile -c constraints.txt

# The tests start some fifty processes; without bytecode each would compile the project again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-live test test-fast check words kernels docs wheel tables format test-gpu test-peers test-long test-newest mutate clean

help:            ## list these commands
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 16

# Install torch first, alone and pinned; with a range pip would look for another build
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip || true  # old ones take ten seconds more for what follows
	for try in 1 2 3; do $(PIP) $$(grep '^torch==' constraints.txt) && break; test $$try -lt 3 || exit 1; sleep 5; done
	for try in 1 2 3; do $(PIP) -e '.[demo,dev,docs]' && break; test $$try -lt 3 || exit 1; sleep 5; done
	touch $(READY)

demo: $(READY)   ## fetch a small target, train a drafter, write the report, serve one request (about 5 minutes on 2 cores)
	$(BIN)/python scripts/demo/demo.py

demo-live: $(READY) ## serve the demo's pair with a drafter that learns from a new kind of question
	$(BIN)/python scripts/demo/live.py

test: $(READY)   ## run the whole test suite on a CPU; `make kernels` compiles the kernels
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not compiles and not newest'  # the tests compute in one thread each

test-fast: $(READY) ## run the tests that train nothing and start no process (about a minute)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --fast --ignore=tests/kernels --ignore=tests/scripts

# Tests that are skipped without a GPU would miss what was removed; arguments in lists have no count
GPU_TESTS = $$(grep -rlE --include='*.py' 'mark\.(gpu|hopper)' tests)
check: $(READY)  ## run ruff, ruff format, mypy and the word count
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	! MYPYPATH=tests:tests/helpers $(BIN)/mypy $(GPU_TESTS) \
	    | grep -E '\[(attr-defined|call-arg|name-defined|import-not-found|syntax)\]$$|INTERNAL' | grep -v 'Too many arguments'
	$(BIN)/python scripts/words.py

words: $(READY)  ## count words that make prose hard to read; `scripts/words.py FOLDER` prints the places
	$(BIN)/python scripts/words.py

GPUS := sm_86 or sm_89 or sm_90 or sm_100 or sm_120
kernels: $(READY) ## compile every kernel for sm_86, 89, 90, 100 and 120, without a GPU; check shared memory and spills (2 minutes)
	$(BIN)/python -m pytest -q -m compiles -k '$(GPUS)' tests/kernels/test_kernels_compile.py

docs: $(READY)   ## build the documentation site in site/; fails on a broken link or a missing file
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel:           ## build the wheel, install it in a new environment, run the five commands from it
	rm -rf build dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/env
	build/env/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd build && for command in env/bin/dflash-*; do $$command --version && $$command --help > /dev/null || exit 1; done

tables: $(READY) ## write the tables of README.md and docs/ from scripts/results
	$(BIN)/python scripts/docs/tables.py
	$(BIN)/python scripts/docs/generated.py

format: $(READY) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-gpu: $(READY) ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

test-long: $(READY) ## run 10,000 random events, 5,000 requests of a live drafter, its demo, every family of targets in 16 bits and FP8, 2,000 JSON schemas, 6,000 hostile requests, all cases of sampled tests, and compile the kernels of every model for eight GPUs
	DFLASH_LONG=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/runtime/test_runtime_recurrent.py \
	    tests/runtime/test_runtime_families.py tests/test_json_schema.py tests/serve/test_serve_fuzz.py
	DFLASH_LONG=1 $(BIN)/python -m pytest -q tests/train/test_train_process.py tests/scripts/test_demo_live.py
	DFLASH_LONG=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'sampled or hypothesis'
	DFLASH_LONG=1 $(BIN)/python -m pytest -q -m compiles tests/kernels/test_kernels_compile.py

# Without constraints, as a user installs today; with a CUDA build of torch it needs 6 GB
NEWEST := .venv-newest
NEWEST_TESTS := tests/models/test_structure.py tests/models/test_target.py tests/models/test_packed.py \
    tests/models/test_architectures.py tests/models/test_checkpoint.py tests/test_decode.py tests/test_preflight.py \
    tests/runtime/test_runtime_engine.py tests/runtime/test_runtime_weights.py tests/kernels/test_kernels_step.py \
    tests/train/test_train_cli.py tests/train/objective/test_parity.py \
    tests/serve/test_serve_api.py tests/examples/test_nano.py tests/docs/test_readme_commands.py
NEWEST_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(NEWEST)/bin/python -m pip install --quiet --retries 10 --upgrade
test-newest:     ## run the core of the suite with the newest packages, in a separate environment
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST_PIP) -e '.[train,serve,gpu]' pytest pytest-timeout pytest-xdist hypothesis jsonschema openai
	$(NEWEST)/bin/python -c "from importlib.metadata import version; \
	    print(*(f'{name} {version(name)}' for name in ('torch', 'transformers', 'triton', 'numpy')), sep=', ')"
	$(NEWEST)/bin/python -m pytest -q -n 2 --dist worksteal $(NEWEST_TESTS)

mutate: $(READY) ## plant faults in the core modules and count those that the tests catch (about an hour; resumes)
	$(BIN)/python scripts/mutate.py

# z-lab's client pins its own transformers, so it runs as a subprocess in a separate environment.
# vLLM and SGLang parse the command lines of `dflash-serve --engine`, and vLLM loads drafters for every architecture; their
# packages are installed without dependencies for computing (400 MB).
# lm-eval measures a tiny target through the server. Each client has its own environment; those of CLIENTS use our torch.
PEERS_SITE := .venv-peers/site
LM_EVAL := .venv-peers/lm-eval
CLIENTS := schemathesis==4.32.5 guidellm==0.8.1 aiperf==0.13.0 litellm==1.110.2 anthropic==2.14.0
LIBRARIES := openai==3.57.0 langchain-openai==1.7.4 llama-index-llms-openai-like==0.8.1 instructor==1.17.0 \
    openai-agents==0.24.0 aider-chat==0.86.2
PARSERS := vllm==0.33.0 sglang==0.5.23 aiohappyeyeballs aiohttp aiosignal attrs cachetools cbor2 cloudpickle frozenlist \
    ipython llguidance multidict openai_harmony orjson partial_json_parser pillow propcache pybase64 pyzmq traitlets yarl
test-peers: $(READY) ## check against z-lab's client (run `make demo` first), vLLM's loader, vLLM's and SGLang's parsers, lm-eval and other clients
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet 'dflash[local]==0.1.0'
	test -d $(PEERS_SITE)/sglang || $(BIN)/python -m pip install --quiet --no-deps --target $(PEERS_SITE) $(PARSERS)
	test -x $(LM_EVAL)/bin/python || $(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/python -m pip install --quiet 'lm_eval[api]==0.4.13' transformers==5.24.0
	for client in $(CLIENTS) $(LIBRARIES); do at=.venv-peers/clients/$${client%%==*}; \
	    test -x $$at/bin/python || $(PYTHON) -m venv $$at || exit 1; case " $(CLIENTS) " in *" $$client "*) \
	    $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $$at/lib/python3*/site-packages)/ours.pth;; esac; \
	    $$at/bin/python -m pip install --quiet $$client || exit 1; done
	DFLASH_LM_EVAL=$(LM_EVAL)/bin/python DFLASH_PEERS_CLIENTS=.venv-peers/clients \
	DFLASH_PEERS_SITE=$(PEERS_SITE) DFLASH_PEERS_PYTHON=.venv-peers/bin/python $(BIN)/python -m pytest -q -m peers

clean:           ## remove the outputs of these commands
	rm -rf $(VENV) .venv-peers .venv-newest demo out site build dist *.egg-info
