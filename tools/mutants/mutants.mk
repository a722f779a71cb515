# Tests of the tests: small changes of the sources, one at a time, which some test should notice (tests/README.md).
MUTANTS := tools/mutants/program.py --jobs $(JOBS) $(MUTANT_FLAGS)
MUTANT_CALL = $(MUTANTS) $(1) $(BUILD)/mutants \
  '$(CXX) $(filter-out -MMD -MP,$(CXXFLAGS)) -w -include $(BUILD)/src/base/std.h -O1' \
  '$(CXX) $(LDFLAGS) $(cpu_LIB) $(cpu_TEST) $(cpu_EMU) -lgtest $(LIBS)' \
  '$(CXX) $(LDFLAGS) $(cpu_LIB) $(cpu_APP) $(LIBS)'
mutants: $(BUILD)/tests/pare_tests $(BUILD)/pare  ## changes the program in one place at a time: do the tests notice?
	@$(call MUTANT_CALL)
mutants-sample: $(BUILD)/tests/pare_tests $(BUILD)/pare  ## ten of these, with the tests that notice them
	@$(call MUTANT_CALL,--sample)
kernel-mutants: $(BUILD)/check/tests/pare_emu_tests  ## the same for the CUDA kernels, under the access checker
	@tools/mutants/kernels.py --jobs $(JOBS) $(BUILD)/mutants/kernels \
	  '$(CXX) $(filter-out -MMD -MP,$(EMUFLAGS)) $(check_FLAGS) $(check_KERNEL_FLAGS) -x c++' \
	  '$(CXX) $(LDFLAGS) $(CHECK_OBJ) -lgtest $(LIBS)'
