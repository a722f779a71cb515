# libFuzzer on readers of foreign text and files (tools/fuzz), under ASan and UBSan; clang-check includes these objects.
CLANG ?= clang++
$(BUILD)/clang/% $(BUILD)/fuzz/%: CXX = $(CLANG)
# Data and tokenizer call a function at every branch (tools/fuzz/count.h), as do the templates of std::string in them.
COUNT_LINK := $(patsubst %,-Xlinker --wrap=%,__sanitizer_cov_trace_pc memchr memcmp memcpy memmove)
$(BUILD)/fuzz/data/%.o $(BUILD)/fuzz/tokenizer/%.o: private fuzz_FLAGS += -fsanitize-coverage=trace-pc
FUZZ_SECONDS ?= 60
FUZZ := steps $(filter-out steps,$(patsubst tools/fuzz/%.cpp,%,$(wildcard tools/fuzz/*.cpp)))  # the longest first
READERS := src/base/% data/% tokenizer/% src/kv/spec.o src/run/config%.o src/run/unknown_key.o model/hf/safetensors.o
FUZZ_LIB := $(filter $(addprefix $(BUILD)/fuzz/,$(READERS)),$(fuzz_LIB))
CLANG_CHECK := $(FUZZ_LIB) $(filter-out $(FUZZ_LIB:$(BUILD)/fuzz/%=$(BUILD)/clang/%),$(clang_LIB)) $(clang_APP) \
  $(clang_TEST) $(clang_EMU) $(patsubst %.cpp,$(BUILD)/clang/%.o,$(wildcard tools/*.cpp tools/*/*.cpp))
clang-check: $(CLANG_CHECK)  ## does clang take every source?
NO_FUZZER = $(shell echo 'extern "C" int LLVMFuzzerTestOneInput() { return 0; }' | \
  $(CLANG) -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>&1 || echo no)
NEEDED := sudo apt-get install -y clang libclang-rt-dev (Ubuntu 22.04: clang is enough)
$(if $(filter fuzz% steps,$(MAKECMDGOALS)),$(if $(NO_FUZZER),$(error $(CLANG) with libFuzzer is missing: $(NEEDED))))
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
