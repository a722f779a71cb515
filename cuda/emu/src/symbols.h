// Names for addresses: what the reports of the access checker say.
#pragma once
#include "internal.h"

namespace cuemu {

struct Symbol {
  uintptr_t offset;
  size_t size;
  std::string name;
};
// The executable's thread-local variables, by offset in their segment: the static shared variables are among them.
const std::vector<Symbol>& shared_variables();

// An instruction as a number: its offset in the executable, or, with the top bit set, a place in the source.
uint32_t place_of(uintptr_t pc);
uint32_t place_of(const Loc&);
std::string place_name(uint32_t place);  // "file.cu:12"; asks addr2line

struct Segment {
  char* begin;
  size_t bytes;
};
Segment thread_local_segment();  // of the executable

std::string memory_name(const void* p);  // "shared variable 's', byte 4 of 512"
std::string demangle(const std::string& symbol);

}  // namespace cuemu
