// Runs CUDA kernels on the host, one block after another, and checks what a GPU leaves unchecked: races in
// shared memory, copies nobody waited for, addresses outside of memory or misaligned, threads that do not
// meet, operands that tensor cores read on their own before they may, memory that a kernel started early may
// not touch yet. csrc/cuda/device.h is written on top of it.
//
//   emulation::global_memory.clear();
//   emulation::global_memory.add_readable("q", q, bytes);
//   emulation::global_memory.add_writable("out", out, bytes);
//   launch<Kernel>(blocks, shared_bytes, params, nullptr);   // throws std::runtime_error: the first error
//
// A block's threads are fibers of one OS thread. One runs until it has to wait for others; so every run is
// the same, and two accesses race not when they happen to collide but when no barrier orders them. The source
// line of an error: break on txl::emulation::fail in a debugger.
//
// TXL_EMULATION_BANKS=file counts bank conflicts: emulation_banks.h.
//
// Not emulated: time, registers, caches, atomics, static shared memory. Sanitizers do not
// know about the fibers. A thread that waits in a loop for another one hangs.
#pragma once

#include <cxxabi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "emulation_banks.h"

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(TXL_EMULATION_UCONTEXT)
#define TXL_EMULATION_ASM
#else  // correct, and some hundred times slower
#include <ucontext.h>
#endif

// Context switch: saves what a function must preserve, and the stack pointer to *from; continues at `to`.
// Local symbols: each object that includes this has its own.
#if defined(TXL_EMULATION_ASM) && defined(__x86_64__)
asm(R"(
    .pushsection .text
    .p2align 4
    .type txl_emulation_switch, @function
txl_emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rdx
    jmp *%rdx
    .size txl_emulation_switch, . - txl_emulation_switch
    .popsection
)");
#elif defined(TXL_EMULATION_ASM)
asm(R"(
    .pushsection .text
    .p2align 4
    .type txl_emulation_switch, %function
txl_emulation_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size txl_emulation_switch, . - txl_emulation_switch
    .popsection
)");
#endif
#if defined(TXL_EMULATION_ASM)
extern "C" void txl_emulation_switch(void** from, void* to);
#endif

namespace txl::emulation {

// ---------------------------------------------------------------------------------------------------------
// What the host sets

inline int from_environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

struct Options {
  // Threads from the last to the first: a result that depends on the order is a race this cannot see.
  bool reverse = from_environment("TXL_EMULATION_REVERSE", 0) != 0;
  // Two threads that write the same bytes of global memory in one launch are an error, and so is load_global
  // of what the launch has written: it may go by a cache that is not kept up to date.
  bool track_global_writes = false;
  int os_threads = from_environment("TXL_EMULATION_THREADS", 1);  // that share the blocks
};
inline Options options;

// The memory kernels may touch. Ranges may overlap.
struct GlobalMemory {
  struct Range {
    std::string name;
    uintptr_t begin, end;
    bool writable;
  };
  std::vector<Range> ranges;

  void clear() { ranges.clear(); }
  void add_readable(std::string name, const void* p, size_t bytes) { add(std::move(name), p, bytes, false); }
  void add_writable(std::string name, void* p, size_t bytes) { add(std::move(name), p, bytes, true); }
  // The same, NaN for a start.
  void add_uninitialised(std::string name, void* p, size_t bytes) {
    memset(p, 0xff, bytes);
    add_writable(std::move(name), p, bytes);
  }

 private:
  void add(std::string name, const void* p, size_t bytes, bool writable) {
    const auto begin = reinterpret_cast<uintptr_t>(p);
    ranges.push_back({std::move(name), begin, begin + bytes, writable});
  }
};
inline GlobalMemory global_memory;

// ---------------------------------------------------------------------------------------------------------
// Fibers

constexpr size_t kStackBytes = 128 * 1024;

struct Context {
#if defined(TXL_EMULATION_ASM)
  void* stack_pointer;

  // `stack` is the end of the stack, a multiple of 16.
  void start(char* stack, void (*function)()) {
    auto** top = reinterpret_cast<void**>(stack);
#if defined(__x86_64__)
    top -= 8;  // six registers, where to return to, and where that would return to
    memset(top, 0, 64);
    top[6] = reinterpret_cast<void*>(function);
#else
    top -= 20;
    memset(top, 0, 160);
    top[11] = reinterpret_cast<void*>(function);
#endif
    stack_pointer = top;
  }
  void switch_to(Context& to) { txl_emulation_switch(&stack_pointer, to.stack_pointer); }
#else
  ucontext_t state;

  void start(char* stack, void (*function)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack - kStackBytes / 2;  // enough, and within the stack
    state.uc_stack.ss_size = kStackBytes / 2;
    state.uc_link = nullptr;
    makecontext(&state, function, 0);
  }
  void switch_to(Context& to) { swapcontext(&state, &to.state); }
#endif
};

// Stacks with a page below each that must not be touched; kept for the blocks and launches to come.
class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  ~Stacks() {
    for (char* stack : stacks_) munmap(stack, kStackBytes);
  }

  // The end of stack i. Where it is within a page depends on i: the innermost frames of a warp would
  // otherwise all fall on the same few lines of the cache.
  char* end(size_t i) {
    while (stacks_.size() <= i) {
      void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (p == MAP_FAILED) throw std::bad_alloc();
      mprotect(p, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
      stacks_.push_back(static_cast<char*>(p));
    }
    return stacks_[i] + kStackBytes - i % 32 * 128;
  }

 private:
  std::vector<char*> stacks_;
};

// ---------------------------------------------------------------------------------------------------------
// State

// Not 0: an address that lacks shared_base() is out of bounds. A multiple of 128 and of no more.
constexpr uint32_t kSharedBase = 1152;
constexpr uint32_t kMaxShared = 227 * 1024;  // what a block can have on sm_90, the most of any so far

// Race detection. A block's clock goes one on at every barrier, of the block or of a warp; two accesses of
// different threads are ordered if a barrier of both lies between them: since the earlier one the block, or
// the warp if both are in it, had a barrier. This record of the accesses to two bytes (no access is smaller,
// all are aligned) tells exactly which later accesses race: no false alarms, none missed.
struct Shadow {
  uint32_t write_time = 0;   // of the last write; the writes before it are ordered before it
  uint32_t read_time = 0;    // of the last read
  uint32_t second_time = 0;  // of the last read by another thread of that reader's warp
  uint32_t many_time = 0;    // when threads of two warps had read with no barrier of the block in between
  uint16_t writer = 0, reader = 0;
  bool pending = false;  // the writer's copy has not been waited for
  bool engine = false;   // it was written by copy_box
  bool product = false;  // it was last read by warpgroup_mma
  bool leaving = false;  // of a box that was stored, and has not been waited for
};

struct Copy {
  const void* global;  // null: zeros
  uint32_t offset, group;

  static constexpr int bytes = 16;
};

struct TensorMap;

// Of emulation_boxes.h: a box that was started, one way or the other.
struct Box {
  const TensorMap* map;
  uint32_t address;
  int at[4];  // batch, head, row, channel
};

struct Thread {
  Context context;
  std::vector<Copy> copies;  // in the order of issue; the first `done` have arrived
  size_t done = 0;
  uint32_t groups = 0;           // committed
  bool may_access = true;        // global memory: not before await_previous where the launch was early
  std::vector<uint32_t> fences;  // when it came to fence_async_proxy
  std::vector<Box> stored;       // boxes, not waited for
};

// The barrier of those who wait for boxes.
struct Mbarrier {
  uint32_t offset;
  int arrivals, missing;  // of a phase, and still in this one
  uint32_t phase;
  std::vector<Box> boxes;
  std::vector<int> waiting;  // threads
};
constexpr uint64_t kMbarrierBytes = 0x7265697272616200;  // what lies in shared memory

// A product of a warpgroup, this warp's 16 rows of it, that has been started: see warpgroup_mma.
struct PendingProduct {
  float* d[32];
  uint32_t a[32][4];
  uint64_t shared_a, b;           // descriptors; no shared_a: a lies in registers
  uint32_t time, barrier, group;  // when it was started, the block's last barrier before
  bool bf16, transposed, add;
};

// The accumulators that pending products add to, as they were: until the end they are nobody's to use.
struct PendingSum {
  float* d[32];
  std::vector<float> value[32];
};

struct Warp {
  uint32_t ready;    // lanes that can run, without the one that does
  uint32_t arrived;  // lanes that wait at `op`, a collective of the warp
  uint32_t barrier;  // lanes that wait at sync_threads
  uint32_t ended;
  const char* op;
  uint32_t time;  // the clock at the warp's last barrier
  void* argument[32];

  bool products_begun;
  uint32_t product_groups;  // committed
  std::vector<PendingProduct> products;
  std::vector<PendingSum> sums;
  uint64_t all_products;  // a hash of them, in order, and of barriers: the same for a warpgroup's warps

  WarpBanks banks;
};

struct Launch {
  void (*body)(const void*);
  const void* params;
  std::string kernel;
  int threads;
  int64_t blocks;
  uint32_t shared_bytes;
  bool pdl;
  const char* count_banks;  // where to write how often; null: not counted

  std::atomic<int64_t> next{0}, boxes{0};  // boxes: copied
  std::atomic<bool> failed{false};
  std::mutex mutex;  // of what follows
  int64_t failed_block = 0;
  std::string error;                                      // of the first block that failed
  std::unordered_map<uintptr_t, uint64_t> global_writer;  // of each two bytes: block << 16 | thread
  BankCounts banks;
};

// One OS thread's: the block that it runs.
struct Machine {
  Launch* launch = nullptr;
  int64_t block = 0;
  int thread = 0;  // that runs
  std::string error;

  Context host;
  Stacks stacks;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Mbarrier> mbarriers;
  int at_barrier = 0, ended = 0;

  std::vector<unsigned char> shared;
  std::vector<Shadow> shadow;
  uint32_t now = 0, block_time = 0;  // the clock, and at the block's last barrier
  uint32_t start_time = 0;           // at the block's start
  size_t last_range = 0;

  Warp& warp() { return warps[thread / 32]; }
};
inline thread_local Machine* machine = nullptr;

// Ends the launch: leaves the fibers as they are and goes back to the host.
[[noreturn]] __attribute__((noinline, cold, format(printf, 2, 3))) inline void fail(int thread,
                                                                                    const char* format, ...) {
  Machine& m = *machine;
  char what[512];
  va_list list;
  va_start(list, format);
  vsnprintf(what, sizeof(what), format, list);
  va_end(list);
  char where[96];
  snprintf(where, sizeof(where),
           ", block %lld, thread %d (warp %d, lane %d): ", static_cast<long long>(m.block), thread,
           thread / 32, thread % 32);
  m.error = "kernel " + m.launch->kernel + where + what;
  m.threads[m.thread].context.switch_to(m.host);
  __builtin_unreachable();
}

// ---------------------------------------------------------------------------------------------------------
// Scheduling

inline int first_of(uint32_t lanes) {
  return options.reverse ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
}

// After a switch the processor mispredicts the returns from what was called before it. So what waits is
// inlined into the kernel, and the switch jumps where it could return: 6 ns instead of 20.
#define TXL_COLLECTIVE __attribute__((always_inline))

// Runs another thread until this one is ready again: of the same warp if there is one, or of the next warp.
TXL_COLLECTIVE inline void wait() {
  Machine& m = *machine;
  Context& from = m.threads[m.thread].context;
  const int count = static_cast<int>(m.warps.size());
  int w = m.thread / 32;
  for (int tried = 0; m.warps[w].ready == 0; ++tried) {
    if (tried == count) fail(m.thread, "deadlock: no thread can run");
    w = options.reverse ? (w == 0 ? count : w) - 1 : (w == count - 1 ? 0 : w + 1);
  }
  const int lane = first_of(m.warps[w].ready);
  m.warps[w].ready &= ~(1u << lane);
  m.thread = w * 32 + lane;
  from.switch_to(m.threads[m.thread].context);
}

[[noreturn]] __attribute__((noinline, cold)) inline void fail_meeting(const char* op) {
  const Machine& m = *machine;
  const Warp& w = m.warps[m.thread / 32];
  const int start = m.thread / 32 * 32;
  if (w.ended != 0)
    fail(m.thread, "divergence: at %s while thread %d has ended", op, start + first_of(w.ended));
  if (w.arrived != 0)
    fail(m.thread, "divergence: at %s while thread %d waits at %s", op, start + first_of(w.arrived), w.op);
  fail(m.thread, "divergence: at %s while thread %d waits at sync_threads", op, start + first_of(w.barrier));
}

// What the lanes of a warp have accessed until they met.
__attribute__((noinline)) inline void count_banks(Warp& warp) {
  Launch& launch = *machine->launch;
  const std::lock_guard<std::mutex> lock(launch.mutex);
  warp.banks.count(launch.banks);
}

// A collective of the warp: its lanes meet, the last one computes for all. It orders no memory.
template <typename Argument, typename Compute>
TXL_COLLECTIVE inline void meet(const char* op, Argument* argument, Compute compute) {
  Warp& w = machine->warp();
  const bool differs = w.arrived != 0 && w.op != op && strcmp(w.op, op) != 0;
  if (differs || (w.barrier | w.ended) != 0) fail_meeting(op);
  const int lane = machine->thread % 32;
  w.op = op;
  w.argument[lane] = argument;
  w.arrived |= 1u << lane;
  if (w.arrived != 0xffffffffu) return wait();
  if (machine->launch->count_banks) count_banks(w);
  compute(reinterpret_cast<Argument**>(w.argument));
  w.arrived = 0;
  w.ready = ~(1u << lane);
}

TXL_COLLECTIVE inline void sync_warp() {
  char nothing;
  meet("sync_warp", &nothing, [](char**) { machine->warp().time = ++machine->now; });
}

TXL_COLLECTIVE inline void sync_threads() {
  Machine& m = *machine;
  if ((m.warp().arrived | m.warp().ended) != 0) fail_meeting("sync_threads");
  if (m.ended != 0) fail(m.thread, "divergence: at sync_threads while %d threads have ended", m.ended);
  m.warp().barrier |= 1u << m.thread % 32;
  if (++m.at_barrier < m.launch->threads) return wait();
  m.at_barrier = 0;
  m.block_time = ++m.now;
  for (Warp& w : m.warps) {
    if (m.launch->count_banks) count_banks(w);
    w.barrier = 0;
    w.ready = 0xffffffffu;
    w.time = m.now;
  }
  m.warp().ready &= ~(1u << m.thread % 32);
}

inline void end_thread() {
  Machine& m = *machine;
  Warp& w = m.warp();
  const Thread& t = m.threads[m.thread];
  if (t.done < t.copies.size())
    fail(m.thread, "ends with a copy not waited for, to shared +%u", t.copies[t.done].offset);
  if (!t.stored.empty()) fail(m.thread, "ends with a store_box not waited for");
  if (!w.products.empty()) fail(m.thread, "ends with a product of a warpgroup not waited for");
  if (w.arrived != 0)
    fail(m.thread, "divergence: ends while thread %d waits at %s", m.thread / 32 * 32 + first_of(w.arrived),
         w.op);
  if (m.at_barrier != 0) {
    int waits = 0;
    while ((m.warps[waits / 32].barrier >> waits % 32 & 1) == 0) ++waits;
    fail(m.thread, "divergence: ends while thread %d waits at sync_threads", waits);
  }
  w.ended |= 1u << m.thread % 32;
  if (m.launch->count_banks && w.ended == 0xffffffffu) count_banks(w);
  if (++m.ended == m.launch->threads) {
    for (size_t i = 0; i < m.warps.size(); ++i)
      if (m.warps[i].all_products != m.warps[i / 4 * 4].all_products)
        fail(static_cast<int>(32 * i), "divergence: other products of a warpgroup than warp %zu", i / 4 * 4);
    for (const Mbarrier& barrier : m.mbarriers)
      if (!barrier.boxes.empty()) fail(m.thread, "ends with a box not waited for");
    m.threads[m.thread].context.switch_to(m.host);
  }
  wait();
}

inline void fiber() {
  std::string error;
  try {
    machine->launch->body(machine->launch->params);
  } catch (const std::exception& e) {
    error = e.what();
  }
  if (!error.empty()) fail(machine->thread, "exception: %s", error.c_str());
  end_thread();
}

// The block is m.block. Returns whether it went well.
inline bool run_block(Machine& m) {
  const Launch& launch = *m.launch;
  if (m.now > 0xf0000000u) {  // far from running over within a block
    m.now = 0;
    m.shadow.clear();
  }
  m.shared.resize(launch.shared_bytes);
  m.shadow.resize(launch.shared_bytes / 2 + 1);
  memset(m.shared.data(), 0xff, m.shared.size());  // NaN, for every type
  m.block_time = m.start_time = ++m.now;           // what other blocks did is ordered before
  m.at_barrier = m.ended = 0;
  m.mbarriers.clear();
  m.error.clear();
  m.warps.assign(launch.threads / 32, Warp{});
  for (Warp& w : m.warps) {
    w.ready = 0xffffffffu;
    w.time = m.now;
  }
  if (m.threads.size() < static_cast<size_t>(launch.threads)) m.threads.resize(launch.threads);
  for (int i = 0; i < launch.threads; ++i) {
    Thread& t = m.threads[i];
    t.context.start(m.stacks.end(i), fiber);
    t.copies.clear();
    t.fences.clear();
    t.stored.clear();
    t.done = t.groups = 0;
    t.may_access = !launch.pdl;
  }
  m.thread = options.reverse ? launch.threads - 1 : 0;
  m.warp().ready &= ~(1u << m.thread % 32);
  m.host.switch_to(m.threads[m.thread].context);
  if (m.error.empty()) return true;
  m.shadow.clear();  // it has copies pending
  return false;
}

inline void run_blocks(Launch& launch) {
  static thread_local Machine own;
  machine = &own;
  own.launch = &launch;
  // Blocks are handed out in order, and none before a failed one is left out: the error reported is the same
  // for any number of OS threads.
  while (!launch.failed && (own.block = launch.next++) < launch.blocks) {
    if (run_block(own)) continue;
    const std::lock_guard<std::mutex> lock(launch.mutex);
    if (!launch.failed || own.block < launch.failed_block) {
      launch.failed_block = own.block;
      launch.error = own.error;
    }
    launch.failed = true;
  }
  machine = nullptr;
}

inline void run(void (*body)(const void*), const void* params, const std::type_info& kernel, int threads,
                int64_t blocks, uint32_t shared_bytes, bool pdl = false) {
  Launch launch;
  char* readable = abi::__cxa_demangle(kernel.name(), nullptr, nullptr, nullptr);
  launch.kernel = readable ? readable : kernel.name();
  std::free(readable);
  launch.body = body;
  launch.params = params;
  launch.threads = threads;
  launch.blocks = blocks;
  launch.shared_bytes = shared_bytes;
  launch.pdl = pdl;
  launch.count_banks = std::getenv("TXL_EMULATION_BANKS");
  if (machine) throw std::runtime_error("kernel " + launch.kernel + ": launched by a kernel");
  if (blocks < 0 || blocks > 0x7fffffff)
    throw std::runtime_error("kernel " + launch.kernel + ": " + std::to_string(blocks) + " blocks");
  if (shared_bytes > kMaxShared)
    throw std::runtime_error("kernel " + launch.kernel + ": " + std::to_string(shared_bytes) +
                             " bytes of shared memory");
  std::vector<std::thread> others;
  for (int i = 1; i < options.os_threads && i < blocks; ++i)
    others.emplace_back([&launch] { run_blocks(launch); });
  run_blocks(launch);
  for (std::thread& other : others) other.join();
  if (const char* path =
          std::getenv("TXL_EMULATION_TRACE")) {  // of every launch: kernel|boxes|threads|shared
    std::FILE* file = std::fopen(path, "a");
    if (!file) throw std::runtime_error(std::string("TXL_EMULATION_TRACE=") + path + " cannot be written");
    std::fprintf(file, "%s|%lld|%d|%u\n", launch.kernel.c_str(), static_cast<long long>(launch.boxes),
                 threads, shared_bytes);
    std::fclose(file);
  }
  if (const char* path = launch.count_banks) {
    std::FILE* file = std::fopen(path, "a");
    if (!file) throw std::runtime_error(std::string("TXL_EMULATION_BANKS=") + path + " cannot be written");
    write_bank_counts(file, launch.kernel.c_str(), launch.banks);
    std::fclose(file);
  }
  if (launch.failed) throw std::runtime_error(launch.error);
}

inline int thread_index() { return machine->thread; }
inline int block_index() { return static_cast<int>(machine->block); }
inline void await_previous() { machine->threads[machine->thread].may_access = true; }
inline void release_next() {}

// ---------------------------------------------------------------------------------------------------------
// Shared memory

[[noreturn]] __attribute__((noinline, cold)) inline void race(const char* what, int thread, uint32_t offset,
                                                              int bytes, const char* other_what, int other) {
  const char* barrier = thread / 32 == other / 32 ? "sync_warp or sync_threads" : "sync_threads";
  if (other == thread)  // the record has kept one of several readers, this thread
    fail(thread, "race: shared %s of %d bytes at +%u after a %s by another thread, no barrier in between",
         what, bytes, offset, other_what);
  fail(thread, "race: shared %s of %d bytes at +%u after a %s by thread %d, no %s in between", what, bytes,
       offset, other_what, other, barrier);
}

// Where the bytes are, if the thread may access them now.
enum class Access { read, write, copy };

template <Access access, int bytes>
unsigned char* access_shared(int thread, uint32_t address) {
  static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "2, 4, 8, 16 bytes");
  Machine& m = *machine;
  const char* what = access == Access::read ? "read" : access == Access::write ? "write" : "copy";
  const uint32_t offset = address - kSharedBase, size = m.launch->shared_bytes;
  if (offset > size || size - offset < bytes)
    fail(thread, "shared %s of %d bytes at %+lld is out of bounds: there are %u", what, bytes,
         static_cast<long long>(address) - kSharedBase, size);
  if (address % bytes != 0) fail(thread, "shared %s of %d bytes at +%u is misaligned", what, bytes, offset);

  // An access of this warp is ordered before if it is older than warp_time, any other if older than
  // block_time.
  const int warp = thread / 32;
  const uint32_t block_time = m.block_time, warp_time = m.warps[warp].time;
  for (Shadow *s = &m.shadow[offset / 2], *end = s + bytes / 2; s != end; ++s) {
    if (s->pending)
      fail(thread, "shared %s of %d bytes at +%u: copy not waited for, by thread %d", what, bytes, offset,
           s->writer);
    if (s->writer != thread && s->write_time >= (s->writer / 32 == warp ? warp_time : block_time))
      race(what, thread, offset, bytes, "write", s->writer);
    if constexpr (access == Access::read) {
      if (s->reader != thread && s->read_time >= block_time) {
        if (s->reader / 32 == warp)
          s->second_time = s->read_time;
        else
          s->many_time = m.now;
      }
      s->reader = static_cast<uint16_t>(thread);
      s->read_time = m.now;
      s->product = false;
    } else {
      if (s->leaving)
        fail(thread, "shared %s of %d bytes at +%u, from where a store_box has not been waited for", what,
             bytes, offset);
      const bool same_warp = s->reader / 32 == warp;
      const bool raced =
          s->many_time >= block_time ||
          (same_warp ? s->reader == thread ? s->second_time >= warp_time : s->read_time >= warp_time
                     : s->read_time >= block_time);
      if (raced) race(what, thread, offset, bytes, "read", s->reader);
      s->writer = static_cast<uint16_t>(thread);
      s->write_time = m.now;
      s->pending = access == Access::copy;
      s->engine = false;
    }
  }
  return m.shared.data() + offset;
}

// The same for an instruction of the thread that runs, which is the place that this returns to.
template <Access access, int bytes>
__attribute__((noinline)) unsigned char* access_own(uint32_t address) {
  Machine& m = *machine;
  if (m.launch->count_banks) {
    const char* what = access == Access::read ? "read" : access == Access::write ? "write" : "copy";
    const auto at = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    m.warp().banks.add({what, bytes, at}, m.thread % 32, address);
  }
  return access_shared<access, bytes>(m.thread, address);
}

// Rows of 16 bytes, eight to a matrix, by an instruction that the warp has met for.
template <typename Lane>
__attribute__((noinline)) void count_matrices(const char* what, int matrices, Lane** lane) {
  const BankSite site{what, 16, reinterpret_cast<uintptr_t>(__builtin_return_address(0))};
  Launch& launch = *machine->launch;
  const std::lock_guard<std::mutex> lock(launch.mutex);
  for (int i = 0; i < matrices; ++i) {
    uint32_t rows[8];
    for (int row = 0; row < 8; ++row) rows[row] = lane[8 * i + row]->address;
    count_passes(launch.banks[site], rows, 8, 16);
  }
}

inline uint32_t shared_base() { return kSharedBase; }

template <typename T>
TXL_COLLECTIVE inline T load_shared(uint32_t address) {
  T value;
  memcpy(&value, access_own<Access::read, sizeof(T)>(address), sizeof(T));
  return value;
}

template <typename T>
TXL_COLLECTIVE inline void store_shared(uint32_t address, T value) {
  memcpy(access_own<Access::write, sizeof(T)>(address), &value, sizeof(T));
}

// ---------------------------------------------------------------------------------------------------------
// Global memory

inline bool allowed(const GlobalMemory::Range& range, uintptr_t begin, int bytes, bool write) {
  return begin >= range.begin && begin < range.end && range.end - begin >= static_cast<size_t>(bytes) &&
         (range.writable || !write);
}

[[noreturn]] __attribute__((noinline, cold)) inline void fail_global(const char* what, uintptr_t begin,
                                                                     int bytes) {
  const auto& ranges = global_memory.ranges;
  const int thread = machine->thread;
  if (ranges.empty()) fail(thread, "global %s: no global memory is registered", what);
  const GlobalMemory::Range* near = nullptr;
  uintptr_t distance = UINTPTR_MAX;
  for (const auto& range : ranges) {
    if (allowed(range, begin, bytes, false))
      fail(thread, "global %s of %d bytes at '%s' +%zu, which is read-only", what, bytes, range.name.c_str(),
           static_cast<size_t>(begin - range.begin));
    const uintptr_t d = begin < range.begin ? range.begin - begin : begin < range.end ? 0 : begin - range.end;
    if (d < distance) {
      distance = d;
      near = &range;
    }
  }
  fail(thread, "global %s of %d bytes at %p is out of bounds: nearest is '%s' %+lld, which has %zu bytes",
       what, bytes, reinterpret_cast<void*>(begin), near->name.c_str(),
       static_cast<long long>(begin - near->begin), static_cast<size_t>(near->end - near->begin));
}

inline void check_global(const void* p, int bytes, bool write, const char* what) {
  Machine& m = *machine;
  const auto begin = reinterpret_cast<uintptr_t>(p);
  if (begin % bytes != 0) fail(m.thread, "global %s of %d bytes at %p is misaligned", what, bytes, p);
  if (!m.threads[m.thread].may_access)
    fail(m.thread, "global %s of %d bytes before await_previous, in a launch with pdl", what, bytes);
  const auto& ranges = global_memory.ranges;
  if (m.last_range < ranges.size() && allowed(ranges[m.last_range], begin, bytes, write)) return;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (allowed(ranges[i], begin, bytes, write)) {
      m.last_range = i;
      return;
    }
  }
  fail_global(what, begin, bytes);
}

inline void track_global(const void* p, int bytes, bool write) {
  Machine& m = *machine;
  const uint64_t self = static_cast<uint64_t>(m.block) << 16 | static_cast<uint64_t>(m.thread);
  uint64_t other = self;
  bool written = false;
  {
    const std::lock_guard<std::mutex> lock(m.launch->mutex);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p) / 2;
    for (uintptr_t i = begin; i < begin + static_cast<uintptr_t>(bytes / 2); ++i) {
      const auto found = m.launch->global_writer.find(i);
      if (found != m.launch->global_writer.end()) {
        written = true;
        if (found->second != self) other = found->second;
      } else if (write) {
        m.launch->global_writer.emplace(i, self);
      }
    }
  }
  if (write ? other != self : written)
    fail(m.thread, "global %s of %d bytes at %p, where block %lld, thread %d of this launch has written",
         write ? "write" : "read", bytes, p, static_cast<long long>(other >> 16),
         static_cast<int>(other & 0xffff));
}

template <typename T>
T load_global(const T* p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8, 16 bytes");
  check_global(p, sizeof(T), false, "read");
  if (options.track_global_writes) track_global(p, sizeof(T), false);
  T value;
  memcpy(&value, static_cast<const void*>(p), sizeof(T));
  return value;
}

template <typename T>
void store_global(T* p, T value) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8, 16 bytes");
  check_global(p, sizeof(T), true, "write");
  if (options.track_global_writes) track_global(p, sizeof(T), true);
  memcpy(static_cast<void*>(p), &value, sizeof(T));
}

// The bytes arrive, and are read, as late as can be: when the thread waits for their group. Until then nobody
// may touch the destination; after it only this thread, until a barrier: to others it is a write of now.
TXL_COLLECTIVE inline void copy_async_16(uint32_t shared, const void* global, bool valid) {
  constexpr int bytes = Copy::bytes;
  Machine& m = *machine;
  Thread& t = m.threads[m.thread];
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0)  // also where it is not read: no need to find out
    fail(m.thread, "global copy of %d bytes at %p is misaligned", bytes, global);
  if (valid) check_global(global, bytes, false, "copy");
  memset(access_own<Access::copy, bytes>(shared), 0xff, bytes);
  t.copies.push_back({valid ? global : nullptr, shared - kSharedBase, t.groups});
}

inline void commit_copies() { ++machine->threads[machine->thread].groups; }

template <int n>
void wait_copies() {
  Machine& m = *machine;
  Thread& t = m.threads[m.thread];
  for (; t.done < t.copies.size() && t.copies[t.done].group + n < t.groups; ++t.done) {
    const Copy& copy = t.copies[t.done];
    unsigned char* to = m.shared.data() + copy.offset;
    if (copy.global)
      memcpy(to, copy.global, copy.bytes);
    else
      memset(to, 0, copy.bytes);
    for (Shadow *s = &m.shadow[copy.offset / 2], *end = s + copy.bytes / 2; s != end; ++s) {
      s->write_time = m.now;
      s->pending = false;
    }
  }
  if (t.done == t.copies.size()) {
    t.copies.clear();
    t.done = 0;
  }
}

// ---------------------------------------------------------------------------------------------------------
// Conversions

inline uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

inline float float_from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

inline float float_from_f16(uint16_t h) {
  // The exponent is moved by a product, which also normalizes what was below the normal numbers.
  const float magnitude = float_of((h & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;  // infinity, NaN
  return float_of(float_bits(magnitude) | special | (h & 0x8000u) << 16);
}

inline uint16_t bf16_from_float(float x) {
  const uint32_t u = float_bits(x);
  if (x != x) return 0x7fff;  // the one NaN that cvt gives
  return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

inline uint16_t f16_from_float(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u, u = float_bits(x) & 0x7fffffffu;
  uint32_t h;
  if (x != x) return 0x7fff;
  if (u >= 0x477ff000u)  // 65520 and more
    h = 0x7c00;
  else if (u < 0x38800000u)  // below the normal numbers: the sum's last bit is the last bit of those
    h = float_bits(float_of(u) + 0.5f) - 0x3f000000u;
  else
    h = (u - 0x38000000u + 0xfffu + (u >> 13 & 1)) >> 13;
  return static_cast<uint16_t>(h | sign);
}

inline uint32_t tf32(float x) {
  if (x != x) return 0x7fffffff;
  const uint32_t u = float_bits(x);
  return (u & 0x7f800000u) == 0x7f800000u ? u : (u + 0x1000u) & ~0x1fffu;
}

constexpr float kSmallestNormal = 0x1p-126f;
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < kSmallestNormal ? 0.0f : y;
}
inline float log2_fast(float x) { return std::log2(std::fabs(x) < kSmallestNormal ? 0.0f : x); }

// ---------------------------------------------------------------------------------------------------------
// Collectives of a warp

struct Shuffle {
  uint32_t value;
  int source;
};

template <typename T>
TXL_COLLECTIVE inline T shuffle_xor(T x, int mask) {
  static_assert(sizeof(T) == 4, "float, int32_t, uint32_t");
  Shuffle mine{0, (machine->thread ^ mask) % 32};
  memcpy(&mine.value, &x, sizeof(x));
  meet("shuffle_xor", &mine, [](Shuffle** lane) {
    uint32_t sent[32];
    for (int i = 0; i < 32; ++i) sent[i] = lane[i]->value;
    for (int i = 0; i < 32; ++i) lane[i]->value = sent[lane[i]->source];
  });
  memcpy(&x, &mine.value, sizeof(x));
  return x;
}

TXL_COLLECTIVE inline int uniform(int x) {
  meet("uniform", &x, [](int** lane) {
    for (int i = 1; i < 32; ++i)
      if (*lane[i] != *lane[0])
        fail(machine->thread, "uniform: %d in lane %d, %d in lane 0", *lane[i], i, *lane[0]);
  });
  return x;
}

TXL_COLLECTIVE inline bool any(bool x) {
  meet("any", &x, [](bool** lane) {
    bool result = false;
    for (int i = 0; i < 32; ++i) result |= *lane[i];
    for (int i = 0; i < 32; ++i) *lane[i] = result;
  });
  return x;
}

struct Matrices {
  uint32_t address;
  uint32_t* r;
};

// A read of a row counts as one by the lane that gave its address.
template <int count, bool trans>
TXL_COLLECTIVE inline void load_matrix(uint32_t* r, uint32_t row_address) {
  constexpr const char* op = count == 2 ? "load_matrix_x2"
                             : trans    ? "load_matrix_x4_trans"
                                        : "load_matrix_x4";
  Matrices mine{row_address, r};
  meet(op, &mine, [](Matrices** lane) TXL_COLLECTIVE {
    const int first = machine->thread / 32 * 32;
    if (machine->launch->count_banks) count_matrices("read_matrix", count, lane);
    for (int i = 0; i < count; ++i) {
      uint16_t matrix[8][8];
      for (int row = 0; row < 8; ++row)
        memcpy(matrix[row], access_shared<Access::read, 16>(first + 8 * i + row, lane[8 * i + row]->address),
               16);
      for (int l = 0; l < 32; ++l) {
        const int row = l / 4, column = l % 4 * 2;
        const uint32_t lower = trans ? matrix[column][row] : matrix[row][column];
        const uint32_t upper = trans ? matrix[column + 1][row] : matrix[row][column + 1];
        lane[l]->r[i] = lower | upper << 16;
      }
    }
  });
}

// A write of a row, likewise.
TXL_COLLECTIVE inline void store_matrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  struct Stored {
    uint32_t address;
    const uint32_t* r;
  } mine{row_address, r};
  meet("store_matrix_x4_trans", &mine, [](Stored** lane) TXL_COLLECTIVE {
    const int first = machine->thread / 32 * 32;
    if (machine->launch->count_banks) count_matrices("write_matrix", 4, lane);
    for (int i = 0; i < 4; ++i)
      for (int row = 0; row < 8; ++row) {
        uint16_t elements[8];
        for (int n = 0; n < 8; ++n)
          elements[n] = static_cast<uint16_t>(lane[4 * n + row / 2]->r[i] >> row % 2 * 16);
        const int by = 8 * i + row;
        memcpy(access_shared<Access::write, 16>(first + by, lane[by]->address), elements, 16);
      }
  });
}

TXL_COLLECTIVE inline uint32_t transpose_matrix(uint32_t x) {
  meet("transpose_matrix", &x, [](uint32_t** lane) {
    uint32_t sent[32];
    for (int l = 0; l < 32; ++l) sent[l] = *lane[l];
    const auto element = [&](int row, int column) {
      return sent[row * 4 + column / 2] >> column % 2 * 16 & 0xffff;
    };
    for (int l = 0; l < 32; ++l) *lane[l] = element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16;
  });
  return x;
}

// d[16, 8] += left[16, kDepth] right[kDepth, 8] as tensor cores do it, those of the A100, which are the least
// exact of all that the kernels run on (Fasi, Higham, Mikaitis, Pranesh 2021, "Numerical behavior of NVIDIA
// tensor cores"; Khattak, Mikaitis 2025, "Accurate models of NVIDIA tensor cores"). Of 16 bytes of operands
// at a time the exact products and the sum so far are cut off one bit below the last place of the largest,
// and added; the sum is cut off where a float ends. Differences: what is below 2^-124 is lost.
template <int kDepth>
inline void add_products(float (*d)[8], const float (*left)[kDepth], const float (*right)[8]) {
  typedef float Row __attribute__((vector_size(16)));
  typedef int32_t Bits __attribute__((vector_size(16)));
  constexpr int kTogether = kDepth / 2;
  constexpr int32_t kExponent = 0x7f800000, kPlaces = 24 << 23, kLeast = 27 << 23;
  const auto as_bits = [](Row x) { return reinterpret_cast<Bits>(x); };
  const auto as_row = [](Bits x) { return reinterpret_cast<Row>(x); };
  const auto choose = [](Bits condition, Bits x, Bits y) { return (condition & x) | (~condition & y); };
  for (int column = 0; column < 8; column += 4) {
    Row of_right[kDepth];
    for (int k = 0; k < kDepth; ++k) memcpy(&of_right[k], right[k] + column, sizeof(Row));
    for (int row = 0; row < 16; ++row) {
      Row sum;
      memcpy(&sum, d[row] + column, sizeof(Row));
      for (int k = 0; k < kDepth; k += kTogether) {
        Row term[kTogether + 1], rounded = sum;
        Bits largest = as_bits(sum) & 0x7fffffff;
        term[kTogether] = sum;
        for (int n = 0; n < kTogether; ++n) {
          term[n] = left[row][k + n] * of_right[k + n];
          rounded += term[n];
          const Bits size = as_bits(term[n]) & 0x7fffffff;
          largest = choose(size > largest, size, largest);
        }
        const Bits exponent = largest & kExponent;
        const Bits place = choose(exponent > kLeast, exponent, Bits{} + kLeast) - kPlaces;
        const Row scale = as_row((254 << 23) - place);  // 1 / place
        Bits total = {};
        for (const Row& x : term) total += __builtin_convertvector(x * scale, Bits);
        // To the nearest float, and where that is further from 0 to the one before it.
        const Row nearest = __builtin_convertvector(total, Row);
        const Bits back = __builtin_convertvector(nearest, Bits);
        const Bits too_far = choose(total < 0, back<total, back> total);  // -1 or 0
        const Row cut_off = as_row(as_bits(nearest) + too_far) * as_row(place);
        sum = as_row(choose(exponent == kExponent, as_bits(rounded), as_bits(cut_off)));
      }
      memcpy(d[row] + column, &sum, sizeof(Row));
    }
  }
}

struct Product {
  float* d;
  const uint32_t *a, *b;
};

// With D of the lanes: element i of a lane's is row group + i / 2 * 8, column in_group * 2 + i % 2.
template <int kDepth>
inline void add_to_lanes(Product** lane, const float (*left)[kDepth], const float (*right)[8]) {
  float sum[16][8];
  const auto each = [&](auto f) {
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) f(sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2], lane[l]->d[i]);
  };
  each([](float& x, float y) { x = y; });
  add_products<kDepth>(sum, left, right);
  each([](float x, float& y) { y = x; });
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": element i of a lane's fragment, two
// to a register.
template <bool is_bf16>
TXL_COLLECTIVE inline void mma_half(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Product mine{d, a, b};
  meet(is_bf16 ? "mma_half<bf16>" : "mma_half<f16>", &mine, [](Product** lane) {
    float left[16][16], right[16][8];
    const auto element = [](const uint32_t* r, int i) {
      const auto h = static_cast<uint16_t>(r[i / 2] >> i % 2 * 16);
      return is_bf16 ? float_from_bf16(h) : float_from_f16(h);
    };
    for (int l = 0; l < 32; ++l) {
      const int group = l / 4, in_group = l % 4;
      for (int i = 0; i < 8; ++i)
        left[group + i / 2 % 2 * 8][in_group * 2 + i % 2 + i / 4 * 8] = element(lane[l]->a, i);
      for (int i = 0; i < 4; ++i) right[in_group * 2 + i % 2 + i / 2 * 8][group] = element(lane[l]->b, i);
    }
    add_to_lanes<16>(lane, left, right);
  });
}

// PTX ISA, "Matrix Fragments for mma.m16n8k8": those of .tf32.
TXL_COLLECTIVE inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Product mine{d, a, b};
  meet("mma_tf32", &mine, [](Product** lane) {
    float left[16][8], right[8][8];
    // The tensor cores do not look at the other bits; NaN has them, and stays what it is without.
    const auto element = [](uint32_t x) {
      if ((x & 0x1fffu) != 0 && float_of(x) == float_of(x))
        fail(machine->thread, "mma_tf32: an operand is not a tf32: %08x", x);
      return float_of(x);
    };
    for (int l = 0; l < 32; ++l) {
      const int group = l / 4, in_group = l % 4;
      for (int i = 0; i < 4; ++i) left[group + i % 2 * 8][in_group + i / 2 * 4] = element(lane[l]->a[i]);
      for (int i = 0; i < 2; ++i) right[in_group + i * 4][group] = element(lane[l]->b[i]);
    }
    add_to_lanes<8>(lane, left, right);
  });
}

// ---------------------------------------------------------------------------------------------------------
// Products of a warpgroup: four warps, of which each has 16 of the 64 rows of `d` and `a` in its registers.
// The operand b, and a if it lies there, too, is read from shared memory, and the sum written to d, as late
// as can be: at warpgroup_wait. Until then d is NaN. What tensor cores read on their own must have been
// written before the product was started, with a fence_async_proxy by the thread that wrote it, then a
// barrier. Not seen: a program that changes registers of `a`, or of d between warpgroup_begin and the
// product, while they are not its own.

// The calling thread's writes to shared memory can be seen by what reads it on its own.
inline void fence_async_proxy() { machine->threads[machine->thread].fences.push_back(++machine->now); }

TXL_COLLECTIVE inline void warpgroup_begin() {
  char nothing;
  meet("warpgroup_begin", &nothing, [](char**) { machine->warp().products_begun = true; });
}

// Whether the thread has called fence_async_proxy after `time`, before the barrier.
inline bool fenced(int thread, uint32_t time, uint32_t barrier) {
  const auto& fences = machine->threads[thread].fences;
  const auto fence = std::upper_bound(fences.begin(), fences.end(), time);
  return fence != fences.end() && *fence <= barrier;
}

// The 16 bytes of an operand at an address, by a lane of the warp whose product it is.
inline const unsigned char* access_product(const PendingProduct& product, int thread, uint32_t address) {
  Machine& m = *machine;
  const unsigned char* bytes = access_shared<Access::read, 16>(thread, address);
  const uint32_t offset = address - kSharedBase;
  for (Shadow *s = &m.shadow[offset / 2], *end = s + 8; s != end; ++s) {
    s->product = true;
    if (s->write_time < m.start_time) continue;  // by another block
    if (s->write_time >= product.time)
      fail(s->writer, "race: shared write of +%u after warpgroup_mma was told to read it", offset);
    if (s->engine) {
      if (s->write_time >= product.barrier)
        fail(thread, "warpgroup_mma reads +%u, which a copy_box has written, without a barrier", offset);
      continue;
    }
    if (!fenced(s->writer, s->write_time, product.barrier))
      fail(thread,
           "warpgroup_mma reads +%u, which thread %d has written without a fence_async_proxy and a barrier",
           offset, s->writer);
  }
  return bytes;
}

struct WarpgroupProduct {
  float* d;
  const uint32_t* a;     // null: in shared memory
  uint64_t shared_a, b;  // 0: in registers
};

template <bool is_bf16, bool transposed, bool add, int tiles>
TXL_COLLECTIVE inline void start_product(WarpgroupProduct mine) {
  meet("warpgroup_mma", &mine, [](WarpgroupProduct** lane) {
    Machine& m = *machine;
    Warp& w = m.warp();
    if (!w.products_begun) fail(m.thread, "warpgroup_mma without a warpgroup_begin since the last wait");
    if (m.launch->threads % 128 != 0)
      fail(m.thread, "warpgroup_mma in a block of %d threads", m.launch->threads);
    const uint64_t a = lane[0]->shared_a, b = lane[0]->b;
    const auto check = [&](uint64_t descriptor) {
      if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
        fail(m.thread, "warpgroup_mma: only descriptors of the 128-byte swizzle without a base offset");
    };
    if (a) check(a);
    check(b);
    PendingProduct product{{}, {}, a, b, m.now, m.block_time, w.product_groups, is_bf16, transposed, add};
    for (int l = 0; l < 32; ++l) {
      if (lane[l]->b != b || lane[l]->shared_a != a)
        fail(m.thread, "warpgroup_mma: lanes have different descriptors");
      product.d[l] = lane[l]->d;
      if (!a) memcpy(product.a[l], lane[l]->a, sizeof(product.a[l]));
    }
    bool known = false;
    for (const PendingSum& sum : w.sums) known |= sum.d[0] == lane[0]->d;
    if (!known) {
      w.sums.emplace_back();
      for (int l = 0; l < 32; ++l) {
        w.sums.back().d[l] = lane[l]->d;
        w.sums.back().value[l].assign(lane[l]->d, lane[l]->d + 4 * tiles);
        memset(lane[l]->d, 0xff, sizeof(float) * 4 * tiles);
      }
    }
    w.products.push_back(product);
    const uint64_t kind = static_cast<uint64_t>(tiles) << 2 | transposed << 1 | add;
    w.all_products = ((w.all_products + a + b + m.block_time) ^ kind) * 0x9e3779b97f4a7c15u;
  });
}

// PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout": d[64, 8 tiles] += a[64, 16] b[16, 8
// tiles]. b: a matrix descriptor. Rows of 128 bytes, eight of which are 1,024 bytes, in which the pieces of
// 16 bytes have changed places: bits 4 to 6 of an address by bits 7 to 9. A row has 16 rows of b in 32 bytes
// from the start on, and stands for a column (transposed: 64 columns, and stands for a row; the next 64 are
// LBO further). SBO: from eight rows to the next.
template <bool is_bf16, bool transposed, bool add, int tiles>
TXL_COLLECTIVE inline void warpgroup_mma(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t b) {
  start_product<is_bf16, transposed, add, tiles>({&d[0][0], a, 0, b});
}
// a: a descriptor, too; a row has 16 columns of it.
template <bool is_bf16, bool add, int tiles>
TXL_COLLECTIVE inline void warpgroup_mma(float (&d)[tiles][4], uint64_t a, uint64_t b) {
  start_product<is_bf16, false, add, tiles>({&d[0][0], nullptr, a, b});
}

inline void compute(const PendingProduct& product, PendingSum& sum) {
  const int columns = static_cast<int>(sum.value[0].size()) * 2, first = machine->thread / 32 * 32;
  const auto number = [&](uint16_t h) { return product.bf16 ? float_from_bf16(h) : float_from_f16(h); };
  // 16 bytes of row `row` of what a descriptor says, 64 elements of it LBO further than those before. A lane
  // at a time reads.
  uint16_t piece[8];
  const auto read = [&](uint64_t descriptor, uint32_t row, uint32_t element) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    const uint32_t straight =
        field(0) + row / 8 * field(32) + row % 8 * 128 + element / 64 * field(16) + element % 64 * 2;
    memcpy(piece,
           access_product(product, first + static_cast<int>(row % 32), straight ^ (straight >> 3 & 0x70)),
           16);
  };
  float right[32][16][8];  // by 8 columns
  if (product.transposed) {
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < columns; n += 8) {
        read(product.b, k, n);
        for (int i = 0; i < 8; ++i) right[n / 8][k][i] = number(piece[i]);
      }
  } else {
    for (int n = 0; n < columns; ++n)
      for (int k = 0; k < 16; k += 8) {
        read(product.b, n, k);
        for (int i = 0; i < 8; ++i) right[n / 8][k + i][n % 8] = number(piece[i]);
      }
  }
  float left[16][16];
  if (product.shared_a) {
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 16; k += 8) {
        read(product.shared_a, first / 32 % 4 * 16 + m, k);
        for (int i = 0; i < 8; ++i) left[m][k + i] = number(piece[i]);
      }
  } else {
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 8; ++i)
        left[l / 4 + i / 2 % 2 * 8][l % 4 * 2 + i % 2 + i / 4 * 8] =
            number(static_cast<uint16_t>(product.a[l][i / 2] >> i % 2 * 16));
  }
  for (int n = 0; n < columns / 8; ++n) {
    float total[16][8] = {};
    const auto each = [&](auto f) {
      for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i) f(total[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2], sum.value[l][4 * n + i]);
    };
    if (product.add) each([](float& x, float y) { x = y; });
    add_products<16>(total, left, right[n]);
    each([](float x, float& y) { y = x; });
  }
}

TXL_COLLECTIVE inline void warpgroup_commit() {
  char nothing;
  meet("warpgroup_commit", &nothing, [](char**) { ++machine->warp().product_groups; });
}

template <int n>
TXL_COLLECTIVE inline void warpgroup_wait() {
  char nothing;
  meet("warpgroup_wait", &nothing, [](char**) {
    Warp& w = machine->warp();
    w.products_begun = false;
    size_t done = 0;
    for (; done < w.products.size() && w.products[done].group + n < w.product_groups; ++done)
      for (PendingSum& sum : w.sums)
        if (sum.d[0] == w.products[done].d[0]) compute(w.products[done], sum);
    w.products.erase(w.products.begin(), w.products.begin() + static_cast<std::ptrdiff_t>(done));
    for (size_t i = 0; i < w.sums.size();) {
      PendingSum& sum = w.sums[i];
      bool pending = false;
      for (const PendingProduct& product : w.products) pending |= product.d[0] == sum.d[0];
      if (pending) {
        ++i;
        continue;
      }
      for (int l = 0; l < 32; ++l) memcpy(sum.d[l], sum.value[l].data(), sum.value[l].size() * sizeof(float));
      w.sums.erase(w.sums.begin() + static_cast<std::ptrdiff_t>(i));
    }
  });
}

}  // namespace txl::emulation

#include "emulation_boxes.h"
