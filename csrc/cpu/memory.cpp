#include "memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

namespace txl {

struct alignas(64) Memory::Block {
  size_t bytes;  // with this
};

namespace {

// Calls that need more than the default do not notice that memory is fresh.
size_t most_kept_as_asked() {
#if defined(TXL_SANITIZED)
  return 0;  // a block is as long as was asked for, so that what lies behind it is guarded
#else
  const char* asked = std::getenv("TXL_CPU_KEPT_MB");
  if (!asked || !*asked) return 64 << 20;
  char* end = nullptr;
  const long megabytes = std::strtol(asked, &end, 10);
  if (*end || megabytes < 0)
    throw std::runtime_error("TXL_CPU_KEPT_MB is '" + std::string(asked) +
                             "', but must be a number of megabytes, 0 or more: the working memory that is "
                             "kept between calls; unset it to keep up to 64");
  return static_cast<size_t>(megabytes) << 20;
#endif
}

// Whole pages of the system's, which has them back when they are freed: malloc keeps what is freed below its
// last block, and the next, larger one comes on top of that. Where nothing is kept it is malloc's, so that
// whoever watches that or fills it sees what is used.
void* fresh(size_t bytes) {
  if (Memory::most_kept() == 0) return std::aligned_alloc(64, bytes);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

void release(void* memory, size_t bytes) {
  if (Memory::most_kept() == 0)
    std::free(memory);
  else
    munmap(memory, bytes);
}

// One block for the process, or none while a call has it. No lock, which a fork could leave closed.
std::atomic<void*> kept{nullptr};

}  // namespace

size_t Memory::most_kept() {
  static const size_t most = most_kept_as_asked();
  return most;
}

Memory::Memory(size_t bytes) {
  bytes = (bytes + 2 * sizeof(Block) - 1) / sizeof(Block) * sizeof(Block);  // whole lines, one for the record
  block_ = static_cast<Block*>(kept.exchange(nullptr));
  if (block_ && block_->bytes < bytes) {
    release(block_, block_->bytes);
    block_ = nullptr;
  }
  if (!block_) {
    void* memory = fresh(bytes);
    if (!memory) throw std::bad_alloc();
    block_ = new (memory) Block{bytes};
  }
  data = reinterpret_cast<char*>(block_ + 1);
}

Memory::~Memory() {
  void* none = nullptr;
  if (block_->bytes > most_kept() || !kept.compare_exchange_strong(none, block_))
    release(block_, block_->bytes);
}

}  // namespace txl
