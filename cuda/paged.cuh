// Keys and values in pages, as kernels see them.
#pragma once
#include "attention.cuh"
#include "ops/paged.h"

namespace pare::PARE_CUDA {

// The pages, and the entries that are read or written: PagedRow.
template <class T>
struct Pages {
  T *k, *v;
  const int32_t* table;
  int64_t table_stride;
  const int4* queries;
  int n_queries, kv_heads, head_dim;
  __device__ __forceinline__ int32_t page(int64_t table_row, int slot) const {
    return table[table_row * table_stride + slot / kPageSlots];
  }
  __device__ __forceinline__ int64_t head(int64_t table_row, int slot, int h) const {  // number of (page, head)
    return int64_t{page(table_row, slot)} * kv_heads + h;
  }
  __device__ __forceinline__ T* k_at(int64_t head, int slot, int c) const {
    return k + (head * head_dim + c) * kPageSlots + slot % kPageSlots;
  }
  __device__ __forceinline__ T* v_at(int64_t head, int slot, int c) const {
    return v + (head * kPageSlots + slot % kPageSlots) * head_dim + c;
  }
};

template <class T>
Pages<T> pages_of(const char* op, const Tensor& k, const Tensor& v, const Tensor& table, const Tensor& queries) {
  expect_heads(op, k.shape[2], k.shape[1]);
  return {k.as<std::remove_const_t<T>>(),
          v.as<std::remove_const_t<T>>(),
          table.as<int32_t>(),
          table.stride[0],
          entries(op, queries),
          static_cast<int>(queries.shape[0]),
          static_cast<int>(k.shape[1]),
          static_cast<int>(k.shape[2])};
}

}  // namespace pare::PARE_CUDA
