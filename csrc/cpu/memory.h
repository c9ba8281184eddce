// The memory of a call. What the last call had is kept for the next one: memory fresh from the system comes
// page by page, each of them zeroed, and that is up to a third of the time of a short call.
#pragma once

#include <cstddef>

namespace txl {

class Memory {
 public:
  // Throws std::bad_alloc, and what most_kept does.
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // How much is kept at most, of one call. Throws std::runtime_error where TXL_CPU_KEPT_MB is not a number.
  static size_t most_kept();

  char* data;  // on a cache line

 private:
  struct Block;
  Block* block_;
};

}  // namespace txl
