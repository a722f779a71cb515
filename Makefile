# pare: everything is built by this file.  `make help` lists the targets.
#
#   CXX=clang++     compiler of the CPU program (g++ >= 12 or clang >= 14)
#   ARCH="80 90a"   GPU architectures of `make cuda`; native: those of this machine
#   STATIC=1        `make cuda cuda-tests` into build/cuda/static, without shared libraries but libc and libm
#   V=1             print the commands
#   JOBS=1          processes at a time (default: one per core)
#   O=1             optimisation level of the CPU program (default 3)
#   UNITY=1         tests joined to some translation units: a third less to compile from clean, more after a change
#   PREFIX=/usr/local  where `make install` puts bin/pare, below DESTDIR
#   FUZZ_SECONDS=60 time of each target of `make fuzz`
#   CLANG=clang++   clang of `make fuzz` and `make clang-check`
NVCC ?= nvcc
ARCH ?= 80 90a
O ?= 3
BUILD := build
JOBS ?= $(shell nproc)
MAKEFLAGS += -j$(JOBS)
# $(call run,label,command): the recipe of a rule that makes one file.
define run
@mkdir -p $(@D)
@echo '$(1)'
$(if $(V),,@)$(2)
endef

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SECONDARY:

# ---- libraries: missing ones are installed, or the command is printed and the build stops ---------------------------
PACKAGES := nlohmann-json3-dev libcli11-dev libtoml11-dev libgtest-dev libutf8proc-dev libgmp-dev libmpfr-dev \
  libmpc-dev libxxhash-dev
# Without CXX=: the first g++ of version 12 or later (Ubuntu 22.04 has g++-12 beside an older default).
ifeq ($(origin CXX),default)
CXX := $(shell for c in g++ g++-14 g++-13 g++-12; do v=$$($$c -dumpversion 2>/dev/null | cut -d. -f1); \
         [ "$${v:-0}" -ge 12 ] && { echo $$c; break; }; done)
PACKAGES += $(if $(CXX),,g++-12)
CXX := $(or $(CXX),g++-12)
endif
HEADERS := nlohmann/json.hpp CLI/CLI.hpp toml.hpp gtest/gtest.h utf8proc.h gmpxx.h mpfr.h mpc.h xxhash.h
HASH := \#
MISSING := $(shell for h in $(HEADERS); do echo "$(HASH)if !__has_include(<$$h>)"; echo $$h; echo "$(HASH)endif"; done \
  | $(CXX) -x c++ -E -P - 2>/dev/null || echo $(CXX))
DEPS_DONE := $(if $(strip $(MISSING)),$(BUILD)/.deps)
$(BUILD)/.deps:
	@tools/deps.sh $(PACKAGES)
	@mkdir -p $(@D) && touch $@

# ---- sources ---------------------------------------------------------------------------------------------------------
ROOMS := $(addprefix src/,base comm bench cases ops ref cpu kv kv/policies rollout rl run) model model/hf tokenizer \
  data data/verify data/math_value
LIB_SRC := $(sort $(foreach d,$(ROOMS),$(wildcard $(d)/*.cpp)))
APP_SRC := $(wildcard src/app/*.cpp src/app/*/*.cpp)
TEST_SRC := $(filter-out tests/test_steps.cpp,$(wildcard tests/*.cpp))
CUDA_SRC := $(wildcard cuda/*.cu cuda/runtime/*.cu)
EMU_SRC := $(wildcard cuda/emu/src/*.cpp)

# The emulator runs the CUDA kernels in the tests, on x86-64 only; elsewhere the tests do without (PARE_EMU undefined).
MACHINE := $(shell uname -m)
ifeq ($(MACHINE),x86_64)
EMU_KERNELS := $(CUDA_SRC) $(wildcard tests/*.cu)
EMU_FLAG := -DPARE_EMU
else
$(info note: no CUDA emulation on $(MACHINE): the tests leave the CUDA kernels out)
EMU_SRC :=
TEST_SRC := $(filter-out tests/test_emu%.cpp tests/test_cuda_%.cpp,$(TEST_SRC))
endif
# The tests that run kernels, but for those that are compiled with them.
KERNEL_TEST_SRC := $(filter tests/test_ops.cpp tests/test_vocab_sums.cpp tests/test_cuda_%.cpp,$(TEST_SRC))
# Joined to translation units, but for those that are linked alone.
ifdef UNITY
unite = $(shell tests/unity.sh $(BUILD)/unity $(1) $(2))
ALONE := $(filter-out tests/test_%.cpp,$(TEST_SRC)) $(filter tests/test_emu%.cpp tests/test_ptx.cpp,$(TEST_SRC))
OTHERS := $(call unite,others,$(filter-out $(ALONE) $(KERNEL_TEST_SRC),$(TEST_SRC)))
KERNEL_TEST_SRC := $(call unite,kernels,$(KERNEL_TEST_SRC))
TEST_SRC := $(ALONE) $(KERNEL_TEST_SRC) $(OTHERS)
vpath tests/unity_%.cpp $(BUILD)/unity
endif

# What g++ 12 and 13 say of memory in inlined std::vector code is false (GCC bugs 105651, 107852); ASan watches it.
# Without collecting garbage below a gigabyte, g++ takes a tenth less time on large files.
if_gcc = $(if $(findstring clang,$(CXX)),,$(1))
WARN = -Wall -Wextra -Werror $(call if_gcc,-Wno-restrict -Wno-array-bounds -Wno-stringop-overread \
  -Wno-stringop-overflow --param ggc-min-heapsize=1000000)
# No contraction: where a fused multiply-add is meant it is written, so every build gives the same bits.
BITS := -ffp-contract=off
INCLUDE := -Isrc -I. -I$(BUILD)
CXXFLAGS = -std=c++20 -g1 $(WARN) $(BITS) $(INCLUDE) $(EMU_FLAG) -MMD -MP -pthread
# (Objects of ODR=1 hold machine code, which is linked, and the intermediate code that `make odr` reads.)
LDFLAGS := -pthread -fno-lto
# Normal forms of text; exact and 256-bit arithmetic of the verifiers.
LIBS := -lutf8proc -lmpc -lmpfr -lgmpxx -lgmp

# The program runs on any x86-64-v3 or aarch64 machine.  The kernels of the `cpu` table are compiled once per
# instruction set and chosen at run time; the portable ones are for other machines, and on aarch64 for comparisons.
ifeq ($(MACHINE),x86_64)
CXXFLAGS += -march=x86-64-v3
ISAS := avx2 avx512
else ifeq ($(MACHINE),aarch64)
ISAS := neon generic
generic_FLAGS := -O1
else
ISAS := generic
endif
avx512_FLAGS := -march=x86-64-v4 -mprefer-vector-width=512
# Without GCC's scheduling before it allocates registers, which it does not do for x86-64: a tile fills them all.
neon_FLAGS := -DPARE_NEON $(call if_gcc,-fno-schedule-insns)
KERNEL_SRC := $(wildcard src/cpu/isa/*.cpp)

# The files of data/presets as rows of a C++ table, those of data/machines as NAME.machine, and the page of data files.
PRESETS := $(filter-out %.md,$(wildcard data/presets/* data/machines/*)) data/formats.md
data/presets data/machines: ;
$(BUILD)/data/presets.inc: data/presets data/machines $(PRESETS)
	@mkdir -p $(@D)
	@for f in $(sort $(PRESETS)); do \
	  printf '{"%s", R"preset(' "$$(echo $$f | sed -E 's,data/machines/(.*)toml,\1machine,; s,.*/,,')"; \
	  cat "$$f"; echo ')preset"},'; done > $@
# The commit as a C++ string, written where it is another one: only the file that says it is compiled again.
$(BUILD)/commit.inc: always
	@mkdir -p $(@D)
	@echo "\"$$(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || echo unknown)\"" > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

include tools/variants.mk

# ---- targets ---------------------------------------------------------------------------------------------------------
PARTS := src/ref/ref.mk tests/tests.mk cuda/cuda.mk src/comm/mpi/mpi.mk tools/fuzz/fuzz.mk tools/mutants/mutants.mk \
  tools/runs.mk
.PHONY: always $(shell sed -n 's/^\([a-z-]*\):.*  $(HASH)$(HASH) .*/\1/p' Makefile $(PARTS))
all: $(BUILD)/pare  ## the program, build/pare
test: $(BUILD)/tests/pare_tests $(BUILD)/pare  ## runs every test, in as many processes as there are cores
	$< --jobs=$(JOBS) $(TEST_FLAGS)
asan: $(BUILD)/asan/tests/pare_tests $(BUILD)/asan/pare  ## every test under AddressSanitizer and UBSan
	$< --jobs=$(JOBS) $(TEST_FLAGS)
emu: $(BUILD)/emu/pare  ## build/emu/pare: with the CUDA kernels, emulated on the CPU
$(BUILD)/emu/pare: $(cpu_LIB) $(cpu_APP) $(filter-out $(BUILD)/emu/tests/%,$(cpu_EMU))
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ $(LIBS) -o $@)
arm-check: $(BUILD)/pare  ## the same bits on aarch64: cross build and some steps under qemu
	@tools/arm_check.sh $(BUILD)/pare $(BUILD)/aarch64 $(JOBS)

# The program is one file and finds its presets in itself; PROGRAM=build/cuda/pare installs the one with the device
# `cuda`.
PREFIX ?= /usr/local
PROGRAM ?= $(BUILD)/pare
install: $(PROGRAM)  ## bin/pare below PREFIX; PROGRAM=build/cuda/pare for that one
	install -D -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/pare

# $(call between,page,mark,command): writes the output of a command between two marks of a page.
between = @{ sed '/<!-- $(2)/q' $(1); echo; $(3); echo; sed -n '/<!-- end of $(2)/,$$p' $(1); } > $(BUILD)/page.md && \
  cp $(BUILD)/page.md $(1)
readme: $(BUILD)/pare  ## writes the generated parts of pages: GPU figures, keys, tables of results, outputs
	$(call between,tools/bench/README.md,GPU figures,tools/bench/gpu.py readme)
	$(call between,data/presets/README.md,config reference,$(BUILD)/pare train --keys)
	@tools/experiments/table.py
bench: $(BUILD)/pare  ## speed as shares of what the machine can do
	$(BUILD)/pare bench

# Folders with the shapes of a config.json and random weights: tools/make_random_model.cpp.
$(BUILD)/make_random_model: $(cpu_LIB) $(BUILD)/tools/make_random_model.o
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ $(LIBS) -o $@)

include $(PARTS)
deps:  ## installs the libraries that are missing
	@tools/deps.sh $(PACKAGES)
FORMATTED := $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' 2>/dev/null)
format:  ## clang-format on every source
	@clang-format -i $(FORMATTED)
format-check:  ## is every source formatted?
	@clang-format --dry-run --Werror $(FORMATTED)
lint:  ## clang-tidy
	@clang-tidy --quiet $(LIB_SRC) $(APP_SRC) -- $(filter-out -MMD -MP,$(CXXFLAGS))

clean:  ## removes build/
	rm -rf $(BUILD)
help:  ## this list
	@sed -n '3,13s/^# \{0,1\}//p' Makefile; echo
	@sed -nE 's/^([a-z-]+):.*  ## /\1 /p' Makefile $(PARTS) | sort | \
	  while read -r t what; do printf '  make %-17s %s\n' "$$t" "$$what"; done
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
