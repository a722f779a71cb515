#include "symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>

extern "C" char __executable_start;

namespace cuemu {
namespace {

std::vector<Symbol> read_thread_locals() {
  std::vector<Symbol> found;
  const int file = open("/proc/self/exe", O_RDONLY);
  struct stat status;
  if (file < 0 || fstat(file, &status)) return found;
  const size_t bytes = static_cast<size_t>(status.st_size);
  auto* image = static_cast<const char*>(mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0));
  close(file);
  if (image == MAP_FAILED) return found;
  auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  for (int i = 0; i < header->e_shnum; i++) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    auto* symbols = reinterpret_cast<const Elf64_Sym*>(image + sections[i].sh_offset);
    const char* names = image + sections[sections[i].sh_link].sh_offset;
    for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
      if (ELF64_ST_TYPE(symbols[k].st_info) == STT_TLS && symbols[k].st_shndx)
        found.push_back({symbols[k].st_value, symbols[k].st_size, names + symbols[k].st_name});
  }
  munmap(const_cast<char*>(image), bytes);
  std::sort(found.begin(), found.end(), [](const Symbol& a, const Symbol& b) { return a.offset < b.offset; });
  return found;
}

std::vector<Loc>& locs() {
  static auto& all = *new std::vector<Loc>;
  return all;
}

// The line of the outermost inlined function that is not the emulator's own header, innermost first.
std::string ask_addr2line(uint32_t offset) {
  char exe[256] = {}, command[400], line[512];
  if (readlink("/proc/self/exe", exe, sizeof exe - 1) < 0) return "?";
  std::snprintf(command, sizeof command, "addr2line -ie %s 0x%x", exe, offset - 1);  // of the call, not what follows
  FILE* pipe = popen(command, "r");
  if (!pipe) return "?";
  std::string first, best;
  while (std::fgets(line, sizeof line, pipe)) {
    std::string l(line);
    l.resize(std::min(l.find('\n'), l.find(" (")));
    const bool own = l.find("/emu/include/") != std::string::npos;
    if (const size_t slash = l.rfind('/'); slash != std::string::npos) l.erase(0, slash + 1);
    if (first.empty()) first = l;
    if (!own && best.empty()) best = l;
  }
  pclose(pipe);
  return best.empty() ? first : best;
}

}  // namespace

const std::vector<Symbol>& shared_variables() {
  static const auto& all = *new std::vector<Symbol>(read_thread_locals());
  return all;
}

uint32_t place_of(uintptr_t pc) { return static_cast<uint32_t>(pc - reinterpret_cast<uintptr_t>(&__executable_start)); }
uint32_t place_of(const Loc& l) {
  static auto& known = *new std::map<std::pair<const char*, int>, uint32_t>;
  const auto [it, fresh] = known.try_emplace({l.file, l.line}, static_cast<uint32_t>(locs().size()));
  if (fresh) locs().push_back(l);
  return 0x80000000u | it->second;
}
std::string place_name(uint32_t place) {
  if (!(place >> 31)) {
    static auto& known = *new std::map<uint32_t, std::string>;  // asking takes a while
    const auto [it, fresh] = known.try_emplace(place);
    if (fresh) it->second = ask_addr2line(place);
    return it->second;
  }
  const Loc& l = locs()[place & 0x7fffffff];
  return std::string(file_name(l)) + ":" + std::to_string(l.line);
}

Segment thread_local_segment() {
  Segment s{};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; i++)
          if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data)
            *static_cast<Segment*>(out) = {static_cast<char*>(info->dlpi_tls_data), info->dlpi_phdr[i].p_memsz};
        return 1;  // the first object is the executable
      },
      &s);
  return s;
}

std::string demangle(const std::string& symbol) {
  int status;
  char* text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  std::string s = text ? text : symbol;
  std::free(text);
  return s;
}

std::string memory_name(const void* p) {
  const auto* c = static_cast<const char*>(p);
  auto place = [](const std::string& what, ptrdiff_t byte, size_t of) {
    return what + ", byte " + std::to_string(byte) + " of " + std::to_string(of);
  };
  if (const Block* b = g_cluster.holder(p))
    return place((b == g_block ? "" : "another block's ") + std::string("dynamic shared memory"), c - b->smem,
                 b->smem_bytes);
  static const Segment local = thread_local_segment();
  if (c >= local.begin && c < local.begin + local.bytes) {
    const size_t offset = static_cast<size_t>(c - local.begin);
    for (const Symbol& s : shared_variables())
      if (offset >= s.offset && offset < s.offset + s.size) {
        std::string name = demangle(s.name);
        if (const size_t colon = name.rfind("::"); colon != std::string::npos) name.erase(0, colon + 2);
        return place("shared variable '" + name + "'", static_cast<ptrdiff_t>(offset - s.offset), s.size);
      }
    return "the gap between shared variables";
  }
  for (const Alloc& a : g_allocs)
    if (c >= a.p && c < a.p + a.bytes) return place("device memory", c - a.p, a.bytes);
  char s[32];
  std::snprintf(s, sizeof s, "address %p", p);
  return s;
}

}  // namespace cuemu
