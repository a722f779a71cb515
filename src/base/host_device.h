// Marks functions that both host code and kernels call.
#pragma once

#ifdef __CUDACC__
#define PARE_HOST_DEVICE __host__ __device__
#else
#define PARE_HOST_DEVICE
#endif
