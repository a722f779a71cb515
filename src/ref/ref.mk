# The step of src/ref/step.cpp as a program.
step: $(BUILD)/step  ## one GRPO step in numbers, and what each paper's switch changes in it
	@$<
$(BUILD)/step: $(BUILD)/tools/step.o $(BUILD)/src/ref/step.o $(BUILD)/src/base/rng.o
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ -o $@)
