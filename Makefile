# Every target sets up what it needs, says so while it does, and is quiet when it is there.
# Wanted beforehand: Rust 1.95 (https://rustup.rs), Python 3.9, and on a Debian or Ubuntu machine root or sudo for apt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

SERVERS := tests/servers
FUZZ_SECONDS ?= 20
PYTEST_WORKERS ?= 3
SOAK_MINUTES ?= 60
TOWLINE := target/release/towline
DIST_PROFILE ?= release
PYTHON_PATHS := bindings/python benches/gpu benches/page.py benches/layouts.py tests/python tests/vllm deploy examples packaging

.PHONY: help demo test test-python test-vllm bench bench-gpu bench-page bench-peers kernels soak lint deny sbom fuzz dist image clean-servers rust nextest

help:
	@echo 'make demo           train a small model, save it as it goes, lose the machine, resume elsewhere'
	@echo 'make test           every test, against two real S3 servers on loopback, the doctests, and the Python package with'
	@echo '                    torch, Lightning, transformers and others, installed into .venv'
	@echo 'make test-vllm      the loader of vLLM, against vLLM for CPUs; not part of make test'
	@echo 'make lint           format, clippy, rustdoc, ruff, mypy; licences, sources and known vulnerabilities of dependencies'
	@echo 'make bench          the micro-benchmarks'
	@echo 'make bench-gpu      loads to a GPU beside bare copies; without one it says so and measures nothing'
	@echo 'make bench-page     the page in headless Chromium: first paint, many transfers, what it costs an agent'
	@echo 'make bench-peers    against restic, rustic, rclone, rsync, cp and s5cmd; writes docs/benchmarks.md'
	@echo '                    (BENCH_SIZE=256M BENCH_BIG=0 for a short look; BENCH_ONLY=local,s3,small,memory,runs,boxes,python,sharded,weights,links,index)'
	@echo 'make soak           an agent under load for SOAK_MINUTES=$(SOAK_MINUTES): memory, files and threads must not grow'
	@echo 'make dist           what ships, into target/dist: program, wheel and crate, stripped; their symbols in target/dist/symbols'
	@echo 'make image          an OCI image of the program, into target/image/towline.tar: no shell, not root, the same each time'
	@echo 'make sbom           what the program and the wheel are built from, into target/sbom (CycloneDX)'
	@echo 'make kernels        compile the GPU kernels to PTX after a change of their source (clang 19; the result is committed)'
	@echo 'make fuzz           each parser of stored bytes, FUZZ_SECONDS=$(FUZZ_SECONDS) each'
	@echo 'make clean-servers  stop the test servers and remove what they keep'

# A toolchain is the one thing that nobody wants installed behind their back.
rust:
	@missing=
	command -v cargo >/dev/null || missing='cargo (Rust 1.95 or newer: https://rustup.rs)'
	command -v cc >/dev/null || missing="$${missing:+$$missing, }cc (apt-get install build-essential)"
	[ -z "$$missing" ] || { echo "missing: $$missing" >&2; exit 1; }

nextest: rust
	@command -v cargo-nextest >/dev/null && exit 0
	echo 'installing cargo-nextest (once, some minutes)'
	cargo install cargo-nextest --locked --quiet

demo: rust
	@cargo build --release --quiet --bin towline
	TOWLINE=$(CURDIR)/$(TOWLINE) tests/demo/demo.sh

# The frameworks come from the network while the compiler works.
test: rust nextest
	@$(SERVERS)/setup.sh
	tests/python/setup.sh --frameworks & frameworks=$$!
	cargo nextest run --no-run
	wait $$frameworks
	trap '$(SERVERS)/servers.sh stop' EXIT
	$(SERVERS)/servers.sh start
	export TOWLINE_TEST_CEPH=$(CURDIR)/target/servers/ceph.env
	export TOWLINE_TEST_MINISTACK=$(CURDIR)/target/servers/ministack.env
	export TOWLINE_TEST_REQUIRE_SERVERS=1
	# Files in memory are always read again, which tests of what is not read do not expect.
	[ "$$(stat -f -c %T "$${TMPDIR:-/tmp}")" != tmpfs ] || export TMPDIR=/var/tmp
	cargo nextest run
	cargo test --doc --quiet
	tests/python/setup.sh
	.venv/bin/python -m pytest --numprocesses=$(PYTEST_WORKERS) --dist=loadfile tests/python

# The package alone, and without servers what needs them is left out.
test-python: rust
	@tests/python/setup.sh
	.venv/bin/python -m pytest --numprocesses=$(PYTEST_WORKERS) --dist=loadfile tests/python

test-vllm: rust
	@tests/vllm/setup.sh
	PYTHONPATH=target/vllm .venv/bin/python -m pytest tests/vllm

bench: rust
	@cargo bench

bench-gpu: rust
	@cargo build --release --quiet --bin towline
	benches/gpu/run.sh

# Only clang's compiler of CUDA is needed, not NVIDIA's toolkit.
KERNELS := src/staging/cuda/decoder/kernels
kernels:
	@command -v clang-19 >/dev/null || { echo 'missing: clang-19 (apt-get install clang-19)' >&2; exit 1; }
	digest=$$(sha256sum $(KERNELS).cu | cut -d ' ' -f 1)
	echo "// Compiled from kernels.cu (sha256 $$digest) by \`make kernels\`." >$(KERNELS).ptx.new
	clang-19 -x cuda --cuda-device-only --cuda-gpu-arch=sm_75 -nocudainc -nocudalib -O3 -S -o - $(KERNELS).cu >>$(KERNELS).ptx.new
	mv $(KERNELS).ptx.new $(KERNELS).ptx

bench-page: rust
	@cargo build --release --quiet --bin towline
	python3 benches/page.py

bench-peers: rust
	@benches/peers/setup.sh
	cargo build --release --quiet --bins --package towline --package bench-tools --package link
	if [[ ,$${BENCH_ONLY:-s3}, == *,s3,* ]]; then
	    $(SERVERS)/setup.sh
	    trap '$(SERVERS)/servers.sh stop' EXIT
	    $(SERVERS)/servers.sh start
	elif [[ ,$$BENCH_ONLY, == *,links,* ]]; then
	    $(SERVERS)/setup.sh
	fi
	.peers/venv/bin/python benches/peers/bench.py

soak: rust
	@TOWLINE_SOAK_MINUTES=$(SOAK_MINUTES) cargo test --quiet --test it -- --ignored --nocapture an_hour_takes

lint: rust
	@cargo fmt --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	for features in '' agent cli; do
	    cargo clippy --no-default-features --features "$$features" --lib --bins --quiet -- -D warnings
	done
	RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --document-private-items --quiet
	if [ -x .venv/bin/ruff ]; then
	    .venv/bin/ruff check --quiet --config bindings/python/pyproject.toml $(PYTHON_PATHS)
	    .venv/bin/ruff format --quiet --check --config bindings/python/pyproject.toml $(PYTHON_PATHS)
	    .venv/bin/mypy --config-file bindings/python/pyproject.toml bindings/python/python/towline
	else echo 'ruff and mypy are not installed: Python not checked (make test-python installs it into .venv)'; fi
	$(MAKE) --no-print-directory deny

ADVISORIES := https://github.com/RustSec/advisory-db

# Known vulnerabilities are a repository on github.com. Without a way there, what was fetched last counts.
deny: rust
	@if ! command -v cargo-deny >/dev/null; then
	    echo 'installing cargo-deny (once, some minutes)'
	    cargo install cargo-deny --locked --quiet
	fi
	cargo deny --log-level error check bans licenses sources
	if timeout 30 git ls-remote --quiet $(ADVISORIES) HEAD >/dev/null 2>&1; then
	    cargo deny --log-level error check advisories
	elif [ -d "$${CARGO_HOME:-$$HOME/.cargo}/advisory-dbs" ]; then
	    echo 'github.com cannot be reached: known vulnerabilities as of the last fetch'
	    cargo deny --log-level error --offline check advisories
	else echo 'github.com cannot be reached: known vulnerabilities not checked'; fi

# Of Debian's packages and the program alone; neither a daemon nor a registry is needed.
image: rust
	@cargo build --release --quiet --locked --bin towline
	deploy/image/build.py --program $(TOWLINE) --out target/image

sbom: rust
	@if ! command -v cargo-cyclonedx >/dev/null; then
	    echo 'installing cargo-cyclonedx (once, a minute or two)'
	    cargo install cargo-cyclonedx --locked --quiet
	fi
	cargo cyclonedx --quiet --format json --spec-version 1.5 --target all --override-filename towline.cdx
	mkdir -p target/sbom
	mv towline.cdx.json target/sbom/
	mv bindings/python/towline.cdx.json target/sbom/towline-python.cdx.json

# Without a sanitizer libFuzzer needs no nightly compiler; the parsers hold no unsafe code for one to watch.
fuzz: rust
	@if ! command -v cargo-fuzz >/dev/null; then
	    echo 'installing cargo-fuzz (once, a minute or two)'
	    cargo install cargo-fuzz --locked --quiet
	fi
	TOWLINE_FUZZ_SEEDS=$(CURDIR)/tests/fuzz/corpus cargo test --quiet --test it seeds_are_written
	for target in $$(cargo fuzz list --fuzz-dir tests/fuzz); do
	    echo "fuzz $$target"
	    cargo fuzz run --fuzz-dir tests/fuzz --sanitizer none "$$target" -- -max_total_time=$(FUZZ_SECONDS) -verbosity=0
	done

# With symbols, which are then taken out: what is stripped and what is kept is one build.
dist: rust
	@command -v objcopy >/dev/null || { echo 'missing: objcopy (apt-get install binutils)' >&2; exit 1; }
	maturin=.venv/bin/maturin
	if [ ! -x $$maturin ]; then
	    maturin=target/maturin/bin/maturin
	    [ -x $$maturin ] || { python3 -m venv target/maturin && target/maturin/bin/pip install --quiet 'maturin>=1.9,<2'; }
	fi
	rm -rf target/dist
	mkdir -p target/dist
	export CARGO_PROFILE_RELEASE_STRIP=none CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
	cargo build --quiet --locked --profile $(DIST_PROFILE) --bin towline
	cp target/$(subst dev,debug,$(DIST_PROFILE))/towline target/dist/
	$$maturin build --quiet --locked --profile $(DIST_PROFILE) --manifest-path bindings/python/Cargo.toml --out target/dist
	packaging/split_symbols.py --to target/dist/symbols target/dist/towline target/dist/*.whl
	cargo package --quiet -p towline --no-verify --allow-dirty --target-dir target/dist/crate
	mv target/dist/crate/package/*.crate target/dist/
	rm -rf target/dist/crate

clean-servers:
	@[ ! -x $(SERVERS)/servers.sh ] || $(SERVERS)/servers.sh stop
	rm -rf target/servers
