// Functions of NCCL that pare calls: they are looked up at run time (cuda/runtime/nccl.cu), or stand in
// cuda/emu/src/nccl.cpp. NVIDIA's CUDA has no header of it.
#pragma once
#include <cstddef>

extern "C" {

typedef struct CUstream_st* cudaStream_t;  // as CUDA's

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t { ncclInt8 = 0, ncclFloat32 = 7, ncclBfloat16 = 9 };
struct ncclUniqueId {
  char internal[128];
};
typedef struct ncclComm* ncclComm_t;

ncclResult_t ncclGetVersion(int* version);  // 22105: 2.21.5
const char* ncclGetErrorString(ncclResult_t);
const char* ncclGetLastError(ncclComm_t);  // since 2.13: the last error of the process in words; the argument is unused
ncclResult_t ncclGetUniqueId(ncclUniqueId*);  // on one rank; the others are told it
// All ranks of the id call it, each with its device set.
ncclResult_t ncclCommInitRank(ncclComm_t*, int ranks, ncclUniqueId, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t);  // may wait for the other ranks of the machine to call it
ncclResult_t ncclCommAbort(ncclComm_t);    // waits for nobody; the others go on waiting for this rank
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t*);  // from any thread
// Calls between these are one: none of them waits for another.
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
// In the order of the stream.  A send and a receive of as many elements of one type meet.
ncclResult_t ncclSend(const void*, size_t count, ncclDataType_t, int to, ncclComm_t, cudaStream_t);
ncclResult_t ncclRecv(void*, size_t count, ncclDataType_t, int from, ncclComm_t, cudaStream_t);
// From the root's `from` to all; `to` may be `from`.
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t, int root, ncclComm_t,
                           cudaStream_t);
void* cuemu_nccl_symbol(const char* name);  // of the stand-in, as dlsym finds those of the library
}
