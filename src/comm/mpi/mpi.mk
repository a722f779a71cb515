# Ranks that mpirun starts.  `make MPI=mpich mpi` builds with MPICH into build/mpi-mpich.
MPI ?= openmpi
MPI_DIR := $(BUILD)/mpi$(if $(filter-out openmpi,$(MPI)),-$(MPI))
MPI_SETS = OMPI_CXX='$(CXX)' MPICH_CXX='$(CXX)'
# mpicxx or mpirun: Debian's name, or that of a cluster.
MPI_OF = $(or $(shell command -v $(1).$(MPI)),$(shell command -v $(1)))
MPI_PACKAGES = lib$(MPI)-dev $(if $(filter openmpi,$(MPI)),openmpi-bin,mpich)
MPI_CXX = $(if $(call MPI_OF,mpicxx),,$(error $(MPI) is missing: sudo apt-get install -y $(MPI_PACKAGES)))\
  $(MPI_SETS) $(call MPI_OF,mpicxx)
$(MPI_DIR)/comm.o: src/comm/mpi/mpi.cpp
	$(call run,mpi: $<,$(MPI_CXX) -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(CXXFLAGS) -O$(O) -c $< -o $@)
MPI_OBJ = $(MPI_DIR)/comm.o $(cpu_LIB) $(filter-out $(BUILD)/emu/tests/%,$(cpu_EMU))
mpi: $(MPI_DIR)/pare  ## build/mpi/pare: for several ranks, on cpu and emu
$(MPI_DIR)/pare: $(cpu_APP) $(MPI_OBJ)
	$(call run,link $@,$(MPI_CXX) $(LDFLAGS) $^ $(LIBS) -o $@)
# STATIC=1: no shared libraries but libc, libm and MPI's.
mpi-cuda: $(MPI_DIR)-cuda/pare  ## build/mpi-cuda/pare: for several ranks, on cpu and cuda
MPI_CUDA := $(cpu_APP) $(MPI_DIR)/comm.o $(cpu_LIB) $(CUDA_SRC:%.cu=$(BUILD)/cuda/%.o)
$(MPI_DIR)-cuda/pare: $(MPI_CUDA) | $(filter %.o,$(CUDA_LIBS))
	$(call run,link $@,$(MPI_SETS) $(NVCC) -ccbin $(call MPI_OF,mpicxx) $(LDFLAGS:%=-Xcompiler %) $(GENCODE) $^ \
	  $(CUDA_LIBS) -o $@)

$(MPI_DIR)/tests/%: $(BUILD)/tests/mpi/%.o $(BUILD)/tests/main.o $(MPI_OBJ)
	$(call run,link $@,$(MPI_CXX) $(LDFLAGS) $^ -lgtest $(LIBS) -o $@)
mpi-test: mpi $(MPI_DIR)/tests/in_ranks $(MPI_DIR)/tests/programs  ## tests of several ranks
	tools/mpi_test.sh $(call MPI_OF,mpirun) $(MPI_DIR)

# The same on other kernels.  $(call mpi_checked,variant,flags of its program)
define mpi_checked
$(MPI_DIR)/tests/in_ranks_$(1): $(BUILD)/tests/mpi/in_ranks.o $(BUILD)/tests/main.o $(MPI_DIR)/comm.o $(cpu_LIB) \
    $(filter-out $(BUILD)/$(1)/emu/tests/%,$($(1)_EMU))
	$$(call run,link $$@,$$(MPI_CXX) $$(LDFLAGS) $(2) $$^ -lgtest $$(LIBS) -o $$@)
endef
$(eval $(call mpi_checked,check))
$(eval $(call mpi_checked,asan,$$(asan_FLAGS)))
MPI_CHECKED := $(MPI_DIR)/tests/in_ranks_check $(MPI_DIR)/tests/in_ranks_asan
mpi-check: $(MPI_CHECKED)  ## tests of ranks on devices, their kernels as in `check` and `asan-ops`
	tools/mpi_test.sh $(call MPI_OF,mpirun) $(MPI_DIR) checked
