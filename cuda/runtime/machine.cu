// See machine.cuh.
#include <cstdlib>
#include <optional>
#include <unordered_map>

#include "ptx90.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

Machine found;
std::unordered_map<const void*, size_t> allowed;  // bytes of shared memory, by kernel

// 1 if it is the code of 9.0a that the device runs: on 9.0 it may also be that of 8.0, compiled by the driver.
#ifndef CUEMU
__global__ void is_of_90a(int* answer) {
#ifdef PARE_SM90A
  *answer = 1;
#else
  *answer = 0;
#endif
}
#endif
bool code_of_90a() {
#ifdef CUEMU
  return cuemu::settings().code == 90;
#else
  int *answer = nullptr, is = 0;
  check_cuda(cudaMalloc(&answer, sizeof is), "the device");
  launch("the first kernel", is_of_90a, {.grid = 1, .block = 1}, {}, answer);
  check_cuda(cudaMemcpy(&is, answer, sizeof is, cudaMemcpyDeviceToHost), "the first kernel");
  check_cuda(cudaFree(answer), "the device");
  return is != 0;
#endif
}

// A variable of the environment that is 0 or 1, if it is there.
std::optional<bool> set_by(const char* variable, const char* meaning) {
  const char* set = std::getenv(variable);
  if (!set) return {};
  const std::string s = set;
  if (s != "0" && s != "1") fail(variable, "=", s, ": ", meaning);
  return s == "1";
}

#ifndef CUEMU
// By default a kernel is loaded when it is first launched: in the middle of a run, with memory that is then missing.
// Kernels that cannot be loaded now (before CUDA 12.4 the driver cannot list them) are loaded then.
void load_kernels() {
  const auto of_driver = [](const char* name, auto& f) {
    cudaDriverEntryPointQueryResult result;
    void* p = nullptr;
    if (cudaGetDriverEntryPointByVersion(name, &p, 12040, cudaEnableDefault, &result) != cudaSuccess)
      cudaGetLastError();  // clears it
    f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(p);
    return p != nullptr;
  };
  decltype(&cuFuncGetModule) module_of;
  decltype(&cuModuleGetFunctionCount) count;
  decltype(&cuModuleEnumerateFunctions) list;
  decltype(&cuFuncLoad) load;
  if (!of_driver("cuFuncGetModule", module_of) || !of_driver("cuModuleGetFunctionCount", count) ||
      !of_driver("cuModuleEnumerateFunctions", list) || !of_driver("cuFuncLoad", load))
    return;
  for (const void* kernel : source_files()) {
    cudaFunction_t first = nullptr;
    check_cuda(cudaGetFuncBySymbol(&first, kernel), "loading the kernels");
    CUmodule module = nullptr;
    unsigned n = 0;
    if (module_of(&module, first) != CUDA_SUCCESS || count(&n, module) != CUDA_SUCCESS) continue;
    std::vector<CUfunction> all(n);
    if (list(all.data(), n, module) != CUDA_SUCCESS) continue;
    for (CUfunction f : all) load(f);
  }
}
#endif

int count_devices() {
  int count = 0;
  const cudaError_t e = cudaGetDeviceCount(&count);
  if (e != cudaSuccess || count == 0)
    fail("no CUDA device", e == cudaSuccess ? "" : cat(" (", cudaGetErrorString(e), ")"),
         ": run on a machine that has one, or with --device cpu");
  return count;
}

Machine find_machine(int device) {
  cudaDeviceProp p;
  check_cuda(cudaGetDeviceProperties(&p, device), "the device");
  Machine m{.name = cat(p.name, ", compute capability ", p.major, ".", p.minor),
            .shared_memory = p.sharedMemPerBlockOptin,
            .multiprocessors = p.multiProcessorCount,
            .wgmma = false,
            .launches_early = false,
            .chooses_wgmma = false};
  if (p.major < 8) fail(m.name, ": 8.0 at least is needed, for bfloat16; run with --device cpu");
#ifndef CUEMU
  cudaFuncAttributes attributes;
  if (const cudaError_t no = cudaFuncGetAttributes(&attributes, is_of_90a); no != cudaSuccess) {
    cudaGetLastError();  // clears it
    fail(m.name, ": this program has no code that it runs (", cudaGetErrorString(no),
         "); build it there by `make cuda ARCH=native`, or update the driver");
  }
  load_kernels();
#endif
  const bool is_90 = p.major == 9 && p.minor == 0;
  m.wgmma = is_90 && code_of_90a();
  const std::optional<bool> set = set_by("PARE_WGMMA", "1 to compute with wgmma, 0 to compute with mma.sync");
  if (set.value_or(false) && !m.wgmma)
    fail("PARE_WGMMA=1: ", is_90 ? "this program was built without the code of 9.0a; make cuda ARCH=90a"
                                 : cat(m.name, ": wgmma is of compute capability 9.0"));
  m.launches_early = m.wgmma && set_by("PARE_EARLY",
                                       "1 to launch kernels early, 0 to launch each when the one "
                                       "before has ended")
                                    .value_or(true);
  m.chooses_wgmma = m.wgmma && set.value_or(true);
  return m;
}

}  // namespace

#ifndef CUEMU
std::vector<const void*>& source_files() {
  static std::vector<const void*> all;
  return all;
}

std::vector<LostArrival**>& watched_files() {
  static std::vector<LostArrival**> all;
  return all;
}

namespace {
LostArrival* noted = nullptr;
void start_watchdog() {
  if (noted) return;
  check_cuda(cudaMallocHost(&noted, sizeof *noted), "watchdog");
  noted->is = 0;
  for (LostArrival** on_device : watched_files())
    check_cuda(cudaMemcpyToSymbol(static_cast<const void*>(on_device), &noted, sizeof noted), "watchdog");
}
}  // namespace

std::string lost_arrival_report() {
  if (!noted || !noted->is) return "";
  const std::string who = cat("watchdog: thread ", noted->thread, " of block (", noted->block[0], ", ", noted->block[1],
                              ", ", noted->block[2], ") waits for ever for ");
  if (noted->byte == kLostTurn) return who + cat("turn ", noted->parity);
  return who + cat("the mbarrier at byte ", noted->byte, " of shared memory, parity ", noted->parity);
}
#endif

const Machine& machine() {
  if (found.name.empty()) open(self(), DeviceComm::any);
  return found;
}

void open(Comm& comm, DeviceComm by) {
  const int count = count_devices(), device = comm.node_rank() % count;
  check_cuda(cudaSetDevice(device), "the device");
  found = find_machine(device);
#ifndef CUEMU
  start_watchdog();
#endif
  if (comm.ranks() > 1) connect(comm, by);
}

std::string describe() {
  const Machine& m = machine();
  return cat(m.name, m.wgmma ? m.chooses_wgmma ? ", by wgmma" : ", by mma.sync" : "");
}

void allow_shared_memory(const char* op, const void* kernel, size_t bytes) {
  const Machine& m = machine();
  if (bytes > m.shared_memory)
    fail(m.name, ": ", op, " needs ", bytes, " bytes of shared memory for a block, which has ", m.shared_memory);
  size_t& most = allowed[kernel];
  if (bytes <= most) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), op);
  most = bytes;
}

}  // namespace pare::PARE_CUDA
