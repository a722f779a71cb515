// A shared library that the program can do without: it is looked for when it is asked for.
#pragma once
#include <dlfcn.h>

#include <initializer_list>
#include <string>
#include <type_traits>

namespace pare {

class Library {
 public:
  // The first of these names that the loader finds, in LD_LIBRARY_PATH among other places.
  explicit Library(std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (!library_ && !(library_ = dlopen(name, RTLD_NOW)) && why_.empty()) why_ = dlerror();
  }
  explicit operator bool() const { return library_ != nullptr; }
  const std::string& why_not() const { return why_; }  // the loader's message for the first name

  // Null: it has no function of that name.
  template <class F>
  void find(F& function, const char* name) const {
    function = library_ ? reinterpret_cast<std::decay_t<F>>(dlsym(library_, name)) : nullptr;
  }

 private:
  void* library_ = nullptr;  // stays open to the end of the program
  std::string why_;
};

}  // namespace pare
