# The step of src/ref/step.cpp as a program; a test compares what it prints with the page.
step: $(BUILD)/step  ## one GRPO step in numbers, and what each paper's switch changes in it
	@$<
$(BUILD)/step: $(BUILD)/tools/step.o $(BUILD)/src/ref/step.o $(BUILD)/src/base/rng.o
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ -o $@)
$(BUILD)/tests/pare_tests: | $(BUILD)/step
readme: readme-ref
readme-ref: $(BUILD)/step
	$(call between,src/ref/README.md,one step,$(BUILD)/step | sed 's/^./    &/')
