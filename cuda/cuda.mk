# Built by nvcc: the program with the device `cuda`, the tests of kernels for a machine with a GPU, and the archive that
# carries both.
ifeq ($(ARCH),native)  # (Without a driver it says so where the answer should be.)
override ARCH := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
  grep -xE '[0-9]+\.[0-9]' | sort -u))
$(if $(ARCH),,$(error ARCH=native: nvidia-smi finds no GPU with a driver here; name architectures, as in ARCH="80 90a"))
endif
$(if $(filter 5% 6% 7%,$(ARCH)),$(error ARCH=$(ARCH): 80 at least is needed, for bfloat16))
override ARCH := $(patsubst 90,90a,$(ARCH))  # of 90 there is no wgmma
NVFLAGS := -std=c++20 -O3 -lineinfo -fmad=false $(INCLUDE) -Icuda --Werror all-warnings \
  -Xcompiler -Wall,-Wextra,-ffp-contract=off -MMD -MP
# The PTX of 8.0 is for devices that none of these suits: the driver compiles it when the program starts.
GENCODE := $(foreach a,$(ARCH),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_80,code=compute_80
# Beside each object what ptxas says of its kernels: registers, spills, shared memory.
$(BUILD)/cuda/%.o $(BUILD)/cuda/%.ptxas: %.cu
	$(call run,cuda: $<,$(NVCC) $(NVFLAGS) -Xptxas -v $(GENCODE) -c $< -o $(BUILD)/cuda/$*.o \
	  2> $(BUILD)/cuda/$*.ptxas || { cat $(BUILD)/cuda/$*.ptxas >&2; exit 1; })
# With STATIC in a folder of its own: what machines without these libraries can run too.  (The CUDA runtime is static as
# ever and looks for the driver itself.)
CUDA_BIN := $(BUILD)/cuda$(if $(STATIC),/static)
CUDA_LIBS := $(if $(STATIC),$(BUILD)/tools/static.o $(LIBS:-l%=-l:lib%.a) -Xcompiler -static-libstdc++ \
  -Xcompiler -static-libgcc,$(LIBS))
cuda: $(CUDA_BIN)/pare  ## build/cuda/pare, by nvcc
$(CUDA_BIN)/pare: $(cpu_LIB) $(cpu_APP) $(CUDA_SRC:%.cu=$(BUILD)/cuda/%.o) | $(filter %.o,$(CUDA_LIBS))
	$(call run,link $@,$(NVCC) $(LDFLAGS:%=-Xcompiler %) $(GENCODE) $^ $(CUDA_LIBS) -o $@)
cuda-tests: $(CUDA_BIN)/pare_cuda_tests  ## build/cuda/pare_cuda_tests: the tests of kernels, for a machine with a GPU
$(BUILD)/cuda/tests/%.o: tests/%.cpp
	$(call run,cuda: $<,$(NVCC) $(filter-out -O3,$(NVFLAGS)) -O1 -DPARE_CUDA_TESTS -c $< -o $@)
# (The two that know whether a GPU runs the kernels; the others are those of pare_tests.)
CUDA_TESTS := tests/kernels tests/test_ptx
CUDA_TEST_OBJ := $(cpu_LIB) $(CUDA_TESTS:%=$(BUILD)/cuda/%.o) \
  $(patsubst %,$(BUILD)/%.o,$(filter-out $(CUDA_TESTS),$(KERNEL_TESTS))) \
  $(patsubst %.cu,$(BUILD)/cuda/%.o,$(CUDA_SRC) $(wildcard tests/ptx*.cu))
$(CUDA_BIN)/pare_cuda_tests: $(CUDA_TEST_OBJ) | $(filter %.o,$(CUDA_LIBS))
	$(call run,link $@,$(NVCC) $(LDFLAGS:%=-Xcompiler %) $(GENCODE) $^ -lgtest $(CUDA_LIBS) -o $@)
pack:  ## build/pare-gpu.tar.gz: what tools/gpu_check.sh needs on a machine with nothing but a driver
	@$(MAKE) --no-print-directory cuda cuda-tests STATIC=1
	@tools/pack.sh $(BUILD)

NVCC_RELEASE = $$($(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
PTXAS := $(CUDA_SRC:%.cu=$(BUILD)/cuda/%.ptxas)
registers: $(PTXAS)  ## registers and spills of every kernel against cuda/registers.txt
	@tools/registers.py $(UPDATE) cuda/registers.txt $(NVCC_RELEASE) $^
sass: $(CUDA_SRC:%.cu=$(BUILD)/cuda/%.o)  ## instructions of a turn of the hot loops against cuda/budgets.txt
	@tools/sass.py $(UPDATE) cuda/budgets.txt $(NVCC_RELEASE) $(BUILD)/cuda/cuda
registers-update sass-update: UPDATE := --update
registers-update: registers  ## accepts those of today
sass-update: sass  ## accepts those of today

# One op in every table, and a kernel with a planted race; a test compares what they print with cuda/ONE_OP.md.
ONE_OP := tools/one_op tools/one_op_race
one-op: $(BUILD)/one_op $(BUILD)/check/one_op  ## an op by ref, cpu and emulated CUDA; a race that the checker finds
	@$(BUILD)/one_op; echo; $(BUILD)/check/one_op
$(BUILD)/one_op: $(ONE_OP:%=$(BUILD)/emu/%.o) $(filter-out $(BUILD)/emu/tests/%,$(cpu_EMU)) $(cpu_LIB)
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ $(LIBS) -o $@)
$(BUILD)/check/one_op: $(ONE_OP:%=$(BUILD)/check/emu/%.o) $(EMU_SRC:%.cpp=$(BUILD)/check/emu/%.o) $(cpu_LIB)
	$(call run,link $@,$(CXX) $(LDFLAGS) $^ $(LIBS) -o $@)
ifdef EMU_KERNELS
$(BUILD)/tests/pare_tests: | $(BUILD)/one_op
$(BUILD)/check/tests/pare_emu_tests: | $(BUILD)/check/one_op
readme: readme-one-op
readme-one-op: $(BUILD)/one_op $(BUILD)/check/one_op | readme-ref
	$(call between,cuda/ONE_OP.md,one op,$(BUILD)/one_op | sed 's/^./    &/')
	$(call between,cuda/ONE_OP.md,checked race,$(BUILD)/check/one_op | sed 's/^./    &/')
endif
