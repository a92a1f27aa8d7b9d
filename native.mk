# The native parts under sanitizers, and on processors that are not this one.
#
#   make sanitize    ASan and UBSan over CASES fuzzed calls, the native tests and the kernels alone; TSan over their threads;
#                    50 processes in which four threads call a model at once
#   make portable    the kernels alone on old x86 processors and on aarch64, by qemu-user
#
# Both need gcc; `make portable` installs qemu-user and a cross compiler where it may.

.PHONY: sanitize sanitize-quick portable

CASES ?= 100000
KERNELS := statistics distances rows checksums
KERNEL_FLAGS := -fno-math-errno -fno-trapping-math -fno-strict-aliasing -pthread
SOUND := $(VENV)/sanitized
ASAN := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
# Python frees little when it ends, so leaks are not looked for.
UNDER_ASAN := LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc OMP_NUM_THREADS=1 PYTHONPATH=$(SOUND):.

# The tests that exercise the native parts.
SANITIZED_TESTS := $(wildcard tests/reduce/test_memory.py tests/reduce/test_stats.py tests/reduce/test_taking.py \
  tests/reduce/test_precision.py tests/reduce/test_row_norms.py tests/store/test_checksum.py tests/taps/test_keeping.py \
  tests/taps/test_hearing.py tests/test_remembered.py)

# The package with its native parts built for the sanitizers, beside the one that is installed.
$(SOUND)/.built: $(VENV)/.dev $(wildcard src/torchtap/*/*.[ch] src/torchtap/*/*/*.[ch])
	rm -rf $(SOUND) && mkdir -p $(SOUND) && cp -r src/torchtap $(SOUND) && find $(SOUND) -name '*.so' -delete
	for part in reduce/_native reduce/_rows comparison/measure/_distance store/format/_checksum; do \
	  gcc -shared -fPIC -O1 $(ASAN) $(KERNEL_FLAGS) -DPy_LIMITED_API=0x030B0000 \
	    -I"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
	    -o $(SOUND)/torchtap/$$part.abi3.so src/torchtap/$$part.c -lm || exit 1; done
	@touch $@

# What a change has to pass: under two minutes.
sanitize-quick: $(SOUND)/.built
	$(UNDER_ASAN) $(BIN)/python -m tests.native.fuzz 5000 1

sanitize: $(SOUND)/.built
	$(UNDER_ASAN) $(BIN)/python -m tests.native.fuzz $(CASES)
	$(UNDER_ASAN) $(BIN)/python -m pytest -q -p no:cacheprovider -o pythonpath="$(SOUND) ." \
	  $(SANITIZED_TESTS) -k "not hundred_million"
	for kernel in $(KERNELS); do \
	  gcc -O1 $(ASAN) $(KERNEL_FLAGS) -o $(SOUND)/$$kernel tests/native/$$kernel.c -lm && $(SOUND)/$$kernel || exit 1; done
	gcc -O1 -g -fsanitize=thread $(KERNEL_FLAGS) -o $(SOUND)/threads tests/native/statistics.c -lm && $(SOUND)/threads 9000
	$(BIN)/python -m tests.native.threads 50

portable:
	@command -v qemu-x86_64 >/dev/null && command -v aarch64-linux-gnu-gcc >/dev/null || { command -v apt-get >/dev/null \
	  && [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross \
	  >/dev/null; } || { echo "no qemu-user or cross compiler, and no way to install them"; exit 1; }
	mkdir -p build/portable
	for kernel in $(KERNELS); do \
	  gcc -O3 $(KERNEL_FLAGS) -o build/portable/$$kernel tests/native/$$kernel.c -lm || exit 1; \
	  for processor in max Haswell Haswell,-f16c Nehalem; do \
	    echo "$$processor:" && qemu-x86_64 -cpu $$processor build/portable/$$kernel 9000 2>/dev/null || exit 1; done; \
	  aarch64-linux-gnu-gcc -static -O3 $(KERNEL_FLAGS) -o build/portable/$$kernel-aarch64 tests/native/$$kernel.c -lm || exit 1; \
	  echo "aarch64:" && qemu-aarch64 build/portable/$$kernel-aarch64 9000 || exit 1; done
