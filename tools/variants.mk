# Objects of the same sources under other flags: cpu (the program), asan, check (the emulator's access checker), fuzz,
# clang.  The Makefile includes it.
cpu_FLAGS = -O$(O) $(if $(ODR),-flto -ffat-lto-objects)
# (-Wmaybe-uninitialized: GCC finds it in its own <regex> when sanitizers are on.)
asan_FLAGS = -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer \
  $(call if_gcc,-Wno-maybe-uninitialized)
# Instrumented like for ThreadSanitizer, but linked with the checker instead; -O1 and no-tree-sra keep accesses whole.
check_FLAGS := -O2 -DCUEMU_CHECK
check_KERNEL_FLAGS := -O1 -fsanitize=thread $(call if_gcc,-fno-tree-sra)
fuzz_FLAGS := -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined \
  -D_GLIBCXX_EXTERN_TEMPLATE=0
# Checks syntax only, with the headers of the tests; a stamp replaces the object.
clang_FLAGS := -O0 -fsyntax-only -fpch-instantiate-templates -Wcomma
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
	$$(call run,$(1) $(i): $$<,$$(CXX) $$(CXXFLAGS) $$($(1)_FLAGS) $($(i)_FLAGS) -DPARE_ISA=$(i) \
	  -c $$< -o $$@ $$($(1)_THEN))
)
$(2)/emu/%.o: %.cu | $$(DEPS_DONE)
	$$(call run,$(1) emu: $$<,$$(CXX) $$(EMUFLAGS) $$($(1)_FLAGS) $$($(1)_KERNEL_FLAGS) -x c++ \
	  -c $$< -o $$@ $$($(1)_THEN))
$(2)/emu/%.o: %.cpp | $$(DEPS_DONE)
	$$(call run,$(1) emu: $$<,$$(CXX) $$(EMUFLAGS) $$($(1)_FLAGS) -c $$< -o $$@ $$($(1)_THEN))
$(2)/data/presets.o: $(BUILD)/data/presets.inc
$(2)/src/app/version.o: $(BUILD)/commit.inc
$(2)/pare: $$($(1)_LIB) $$($(1)_APP)
	$$(call run,link $$@,$$(CXX) $$($(1)_FLAGS) $$(LDFLAGS) $$^ $$(LIBS) -o $$@)
$(2)/%.h.gch: %.h | $$(DEPS_DONE)
	$$(call run,$(1): $$<,$$(CXX) $$(CXXFLAGS) $$(filter-out -fsyntax-only,$$($(1)_FLAGS)) -x c++-header \
	  -c $$< -o $$@)
$$($(1)_TEST): $(2)/tests/headers.h.gch
$$($(1)_TEST): private CXXFLAGS += -Itests -include $(2)/tests/headers.h
$(1)_PARSED := $$(LIB_SRC:%.cpp=$(2)/%.o) $$($(1)_APP) $$(if $$($(1)_KERNEL_FLAGS),,$$($(1)_EMU))
$(1)_HEADERS := $(2)/$(if $(filter clang,$(1)),tests/headers,src/base/std).h
$$($(1)_PARSED): $$($(1)_HEADERS).gch
$$($(1)_PARSED): private CXXFLAGS += -include $$($(1)_HEADERS)
$(2)/tests/pare_tests: $$($(1)_LIB) $$($(1)_TEST) $$($(1)_EMU)
	$$(call run,link $$@,$$(CXX) $$($(1)_FLAGS) $$(LDFLAGS) $$^ -lgtest $$(LIBS) -o $$@)
endef
EMUFLAGS = -Icuda/emu/include $(CXXFLAGS) -Icuda -Wno-unknown-pragmas -fno-strict-aliasing \
  $(call if_gcc,-ftrivial-auto-var-init=pattern)
$(eval $(call variant,cpu,$(BUILD)))
$(foreach v,asan check fuzz clang,$(eval $(call variant,$(v),$(BUILD)/$(v))))
# Cold code compiles faster at -O1.
COLD := tests/% src/app/% src/run/% src/base/toml src/base/json% data/% model/hf/%
$(COLD:%=$(BUILD)/%.o): private override O := 1
