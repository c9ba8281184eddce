// Work items on the caller's threads.
#pragma once

#include <atomic>

#include "cpu.h"
#include "util.h"

namespace txl::TXL_LEVEL {

// Runs f(item, thread) for every item on the caller's pool, items in order of growing number.
template <class F>
TXL_INLINE void parallel_items(const Pool& pool, int64_t items, F f) {
  if (items == 0) return;
  struct Context {
    F& f;
    int64_t items;
    std::atomic<int64_t> next{0};
  } context{f, items};
  pool.run(
      static_cast<int>(min(pool.threads, items)),
      [](void* c, int thread) {
        Context& ctx = *static_cast<Context*>(c);
        for (int64_t i; (i = ctx.next.fetch_add(1, std::memory_order_relaxed)) < ctx.items;) ctx.f(i, thread);
      },
      &context);
}

}  // namespace txl::TXL_LEVEL
