# The tests that run kernels, the kernels under the access checker, the rest of the program as it is.
KERNEL_TESTS := tests/main tests/kernels tests/op_cases tests/test_ptx $(KERNEL_TEST_SRC:.cpp=)
check: $(BUILD)/check/tests/pare_emu_tests  ## tests of kernels under the emulator's access checker
	$< --jobs=$(JOBS) $(TEST_FLAGS)
# Host code with threads of its own; the checker has only the atomics of kernels.
$(BUILD)/check/emu/cuda/runtime/nccl.o: private check_KERNEL_FLAGS :=
CHECK_OBJ := $(check_EMU) $(patsubst %,$(BUILD)/check/tests/%.o,test_emu test_emu_graphs) \
  $(patsubst %,$(BUILD)/%.o,$(KERNEL_TESTS) tests/test_emu_device tests/test_emu_nccl) $(cpu_LIB)
$(BUILD)/check/tests/pare_emu_tests: $(CHECK_OBJ)
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ -lgtest $(LIBS) -o $@)
# Tests of ops in every order of threads, the kernels of both tables under ASan and UBSan.
asan-ops: $(BUILD)/asan/pare_op_tests  ## tests of ops, their kernels under AddressSanitizer and UBSan
	$< --jobs=$(JOBS) --gtest_filter='*AgreesWithRef*' $(TEST_FLAGS)
CPU_KERNELS = $(foreach d,src/cpu $(ISAS),$(1)/$(d)/%)
$(BUILD)/asan/pare_op_tests: $(asan_EMU) $(filter $(call CPU_KERNELS,$(BUILD)/asan),$(asan_LIB)) \
    $(KERNEL_TESTS:%=$(BUILD)/%.o) $(filter-out $(call CPU_KERNELS,$(BUILD)),$(cpu_LIB))
	$(call run,link $@,$(CXX) $(LDFLAGS) $(asan_FLAGS) $^ -lgtest $(LIBS) -o $@)
odr: $(BUILD)/odr.o  ## with ODR=1 from clean: is every type of program, kernels and tests defined once?
$(BUILD)/odr.o: $(cpu_LIB) $(filter-out %/main.o,$(cpu_APP)) $(cpu_TEST) $(cpu_EMU)
	$(call run,odr,$(CXX) -r -flto -flinker-output=rel -Wodr -Werror=odr -Wno-lto-type-mismatch $^ -o $@)
# What the tests of ops need and nothing else, so that a changed op is tested in seconds.
OP_TESTS := tests/main tests/kernels tests/op_cases tests/test_ops tests/test_op_gradients tests/test_op_bits
OP_LIB := $(foreach d,base comm ops ref cpu cases,$(BUILD)/src/$(d)/%) $(foreach i,$(ISAS),$(BUILD)/$(i)/%)
$(BUILD)/tests/pare_op_tests: $(OP_TESTS:%=$(BUILD)/%.o) $(filter $(OP_LIB),$(cpu_LIB)) $(cpu_EMU)
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ -lgtest $(LIBS) -o $@)
test-op: $(BUILD)/tests/pare_op_tests  ## OP=rmsnorm: tests of the ops whose names contain it, on the CPU and emulated
	$(if $(OP),,$(error make test-op OP=rmsnorm: which op?))
	$< --jobs=$(JOBS) --gtest_filter='*/$(OP)*:*OpBits.*' $(TEST_FLAGS)
