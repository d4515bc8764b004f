# Every target makes .venv first, once: `make test` works on a fresh clone, and a second call installs nothing.
# PIP_ARGS goes to pip: on Linux without a GPU, point it at an index that holds torch's CPU build, which spares gigabytes.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
CHAT_ARGS ?= --compare --runs 1 --max-new-tokens 36 $(QUESTIONS)
TRAIN_ARGS ?= --out out/demo --restart
GENERATE_ARGS ?=
NPROC ?= 2
THREADS ?= 1
JOBS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
# Without bytecode on disk each test process, and each that a test starts, would compile every file anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=10 --durations-min=2
SUITE := $(PYTEST) -n $(JOBS) --dist worksteal
TORCHRUN := OMP_NUM_THREADS=$(THREADS) $(BIN)/torchrun --standalone --nproc-per-node
QUESTIONS := "What is a language model? Answer in one sentence." "Explain gravity to a child in two sentences." \
	"What is the capital of France?"

.DEFAULT_GOAL := help
.PHONY: help demo demo-pretrained demo-chat demo-train demo-generate support test test-rest test-all test-every test-versions test-processors test-gpu lint format docs composition wheel bench bench-kernels clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt requirements-demo.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[test,demo,docs]'
	$(BIN)/pip install -q $(PIP_ARGS) --no-deps --require-hashes -r requirements-demo.txt
	touch $@

demo: demo-pretrained demo-chat demo-train  ## a pretrained BERT embeds, a real Llama answers, a small one trains

demo-pretrained: $(STAMP)  ## a real BERT at TP=2 embeds real sentences
	$(TORCHRUN) $(NPROC) examples/embed_sentences.py

demo-chat: $(STAMP)  ## a real Llama answers at TP=3, for it has 9 heads, beside transformers (CHAT_ARGS= for a conversation)
	$(BIN)/python examples/smollm2.py
	$(TORCHRUN) 3 examples/generate.py --model out/smollm2 --chat $(CHAT_ARGS)

demo-train: $(STAMP)  ## a byte-level Llama trains at TP=2 on real text (TRAIN_ARGS="--out out/mine --family gpt2" and so on)
	$(TORCHRUN) $(NPROC) examples/train_gpt.py --tp $(NPROC) $(TRAIN_ARGS)

demo-generate: $(STAMP)  ## what demo-train trained goes on from prompts (GENERATE_ARGS="--model DIR --compare" and so on)
	$(TORCHRUN) $(NPROC) examples/generate.py $(GENERATE_ARGS)

test: lint  ## the everyday suite, in JOBS=2 processes (JOBS=0: in this one, for a debugger)
	$(SUITE) -m "not slow and not gpu"

test-rest: $(STAMP)  ## what test-all adds to test
	$(SUITE) -m "slow and not rare and not gpu"

test-all: test test-rest  ## all kinds of tests that need no GPU

test-every: $(STAMP)  ## and all of their cases
	$(SUITE) -m "not gpu"

test-versions: $(STAMP)  ## the everyday suite with the oldest and the newest PyTorch, Triton and NumPy (ARGS=--help)
	$(BIN)/python -m tests.versions $(ARGS)

test-processors: $(STAMP)  ## the everyday suite as other processors compute: AVX-512, AVX2, SSE4 (ARGS="sse4 tests/layers")
	$(BIN)/python -m tests.processors $(ARGS)

test-gpu: $(STAMP)  ## the kernels, compiled
	$(PYTEST) -m gpu

lint: $(STAMP)  ## style and types, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## style, put right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the documents and the API reference as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

support: $(STAMP)  ## the table of docs/supported.md, from the models' tests (slow ones too)
	$(SUITE) tests/models -m "not gpu" -o junit_family=xunit1 --junitxml=out/support.xml
	$(BIN)/python -m bench.support out/support.xml

composition: $(STAMP)  ## the tables of docs/composition.md, from their tests
	$(SUITE) tests/test_composition.py -m "not gpu" -o junit_family=xunit1 --junitxml=out/composition.xml
	$(BIN)/python -m bench.composition out/composition.xml

wheel: $(STAMP)  ## dist/tpfuse-*.whl
	$(BIN)/pip wheel -q $(PIP_ARGS) --no-deps -w dist .

bench: $(STAMP)  ## a training step against other implementations, in one interleaved run
	$(BIN)/python -m bench.models.train_step $(ARGS)

bench-kernels: $(STAMP)  ## every op against torch and torch.compile on the machine at hand (ARGS="layer_norm --shape 8192x4096")
	$(BIN)/python -m tpfuse bench $(or $(ARGS),all)

clean:  ## all that was built here, .venv too; what training wrote stays
	rm -rf .venv .versions build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
