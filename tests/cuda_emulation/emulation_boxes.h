// The copy engine (TMA) of the emulation: boxes of a tensor, copied to shared memory on their own, and the
// mbarriers that tell when they have come; or from shared memory to the tensor. Included by emulation.h.
//
// A box arrives, and is read, as late as can be: when a thread waits for the end of the phase that it belongs
// to, and all arrivals are there. Until then nobody may touch where it goes; after it only the thread that
// started it, until a barrier of the block: to others it is a write of now. That is stricter than a GPU,
// where every thread that has waited may read.
//
// What the engine writes over must have been written by itself, or before a fence_async_proxy by the thread
// that wrote it and a barrier of the block; and it must have been read so too, or by products of warpgroups
// (of several readers only the last is looked at). The mbarrier must have been made so.
//
// A box that is stored is read as late as can be, too: when the thread that stored it waits for that. Until
// then nobody may write there, and what is read must have been written before a fence_async_proxy by the
// thread that wrote it, and a barrier with the one that stores.
//
// Not seen: another number of bytes expected than copied, which on a GPU is never waited out.
#pragma once

namespace txl::emulation {

// Of elements of 16 bits.
struct TensorMap {
  unsigned char* data;
  int64_t size[4], stride[3];  // batch, heads, rows, channels; bytes
  uint32_t box_rows, box_heads, box_channels;
};

// In reverse it is another thread that is elected: nobody knows which.
inline int elected_lane() { return options.reverse ? 31 : 0; }
TXL_COLLECTIVE inline bool elected(bool first_warp) {
  char nothing;
  meet("elected", &nothing, [](char**) {});
  return first_warp && machine->thread % 32 == elected_lane();
}

// ---- mbarriers ----

inline Mbarrier& mbarrier_at(uint32_t address) {
  Machine& m = *machine;
  const uint32_t offset = address - kSharedBase;
  for (Mbarrier& barrier : m.mbarriers) {
    if (barrier.offset != offset) continue;
    if (memcmp(m.shared.data() + offset, &kMbarrierBytes, sizeof(kMbarrierBytes)) != 0)
      fail(m.thread, "the mbarrier at +%u was overwritten", offset);
    const Shadow& s = m.shadow[offset / 2];
    if (s.writer != m.thread && s.write_time >= m.block_time)
      race("use of an mbarrier", m.thread, offset, 8, "mbarrier_init", s.writer);
    return barrier;
  }
  fail(m.thread, "there is no mbarrier at +%u", offset);
}

inline void mbarrier_init(uint32_t address, int arrivals) {
  Machine& m = *machine;
  const uint32_t offset = address - kSharedBase;
  for (const Mbarrier& barrier : m.mbarriers)
    if (barrier.offset == offset) fail(m.thread, "mbarrier_init: there is one at +%u", offset);
  memcpy(access_shared<Access::write, 8>(m.thread, address), &kMbarrierBytes, sizeof(kMbarrierBytes));
  m.mbarriers.push_back({offset, arrivals, arrivals, 0, {}, {}});
}

inline void mbarrier_arrive(uint32_t address) {
  Machine& m = *machine;
  Mbarrier& barrier = mbarrier_at(address);
  if (barrier.missing == 0) fail(m.thread, "mbarrier_arrive: one arrival too many");
  if (--barrier.missing > 0) return;
  for (int thread : barrier.waiting) m.warps[thread / 32].ready |= 1u << thread % 32;
  barrier.waiting.clear();
}

// f(its place in shared memory, where it is of the tensor; null: outside) for each element of a box.
template <typename F>
void each_element(const Box& box, F f) {
  const TensorMap& map = *box.map;
  const uint32_t row_bytes = map.box_channels * 2;
  for (uint32_t n = 0; n < map.box_heads * map.box_rows * map.box_channels; ++n) {
    const uint32_t straight = box.address + 2 * n;
    const int64_t of_box = n / map.box_channels, head = of_box / map.box_rows, row = of_box % map.box_rows;
    const int64_t at[4] = {box.at[0], box.at[1] + head, box.at[2] + row,
                           box.at[3] + int64_t{n % map.box_channels}};
    unsigned char* global = map.data + 2 * at[3];
    bool inside = at[3] >= 0 && at[3] < map.size[3];
    for (int d = 0; d < 3; ++d) inside &= at[d] >= 0 && at[d] < map.size[d], global += at[d] * map.stride[d];
    f(straight ^ (straight >> 3 & (row_bytes - 16)), inside ? global : nullptr);
  }
}

inline void deliver(const Box& box) {
  Machine& m = *machine;
  each_element(box, [&](uint32_t address, const unsigned char* from) {
    uint16_t element = 0;
    if (from) {
      check_global(from, 2, false, "copy_box");
      memcpy(&element, from, 2);
    }
    memcpy(m.shared.data() + address - kSharedBase, &element, 2);
    Shadow& s = m.shadow[(address - kSharedBase) / 2];
    s.write_time = m.now;
    s.pending = false;
  });
}

TXL_COLLECTIVE inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  Machine& m = *machine;
  while ((mbarrier_at(address).phase & 1) == parity) {
    Mbarrier& barrier = mbarrier_at(address);
    if (barrier.missing == 0) {
      for (const Box& box : barrier.boxes) deliver(box);
      barrier.boxes.clear();
      barrier.missing = barrier.arrivals;
      ++barrier.phase;
    } else {
      barrier.waiting.push_back(m.thread);
      wait();
    }
  }
}

// ---- Boxes ----

// Fails unless what was last done there is done for the engine too.
inline void check_proxy(uint32_t offset, const char* what) {
  Machine& m = *machine;
  const Shadow& s = m.shadow[offset / 2];
  const auto check = [&](int thread, uint32_t time, const char* done) {
    if (time < m.start_time) return;  // by another block
    if (!fenced(thread, time, m.block_time))
      fail(m.thread, "copy_box: %s +%u, which thread %d has %s without a fence_async_proxy and a barrier",
           what, offset, thread, done);
  };
  if (!s.engine) check(s.writer, s.write_time, "written");
  if (!s.product) check(s.reader, s.read_time, "read");
}

inline void copy_box(uint32_t address, const TensorMap& map, int channel, int row, int head, int batch,
                     uint32_t mbarrier) {
  Machine& m = *machine;
  if (map.box_channels != 64) fail(m.thread, "copy_box: of %u channels", map.box_channels);
  if (address % 1024 != 0) fail(m.thread, "copy_box: to %u, which is no multiple of 1024", address);
  Mbarrier& barrier = mbarrier_at(mbarrier);
  if (barrier.missing == 0) fail(m.thread, "copy_box: all have arrived in this phase");
  check_proxy(barrier.offset, "the mbarrier at");
  for (uint32_t n = 0; n < map.box_heads * map.box_rows * 128; n += 16) {
    const uint32_t offset = address + n - kSharedBase;
    if (offset < m.launch->shared_bytes) check_proxy(offset, "writes to");
    memset(access_shared<Access::copy, 16>(m.thread, address + n), 0xff, 16);
    for (uint32_t i = offset / 2; i < offset / 2 + 8; ++i) m.shadow[i].engine = true;
  }
  barrier.boxes.push_back({&map, address, {batch, head, row, channel}});
  ++m.launch->boxes;
}

TXL_COLLECTIVE inline void store_box(const TensorMap& map, int channel, int row, int head, int batch,
                                     uint32_t address) {
  Box mine{&map, address, {batch, head, row, channel}};
  meet("store_box", &mine, [](Box** lane) {
    Machine& m = *machine;
    const int thread = m.thread / 32 * 32 + elected_lane();
    const Box& box = *lane[elected_lane()];
    if (box.map->box_channels != 16) fail(thread, "store_box: of %u channels", box.map->box_channels);
    if (box.address % 256 != 0) fail(thread, "store_box: from %u, which is no multiple of 256", box.address);
    each_element(box, [&](uint32_t at, const unsigned char*) {
      access_shared<Access::read, 2>(thread, at);
      Shadow& s = m.shadow[(at - kSharedBase) / 2];
      const uint32_t barrier = s.writer / 32 == thread / 32 ? m.warp().time : m.block_time;
      if (s.write_time >= m.start_time && !s.engine && !fenced(s.writer, s.write_time, barrier))
        fail(thread,
             "store_box reads +%u, which thread %d has written without a fence_async_proxy and a barrier",
             at - kSharedBase, s.writer);
      s.leaving = true;
    });
    m.threads[thread].stored.push_back(box);
  });
}

inline void wait_stored() {
  Machine& m = *machine;
  for (const Box& box : m.threads[m.thread].stored)
    each_element(box, [&](uint32_t at, unsigned char* to) {
      const unsigned char* from = access_shared<Access::read, 2>(m.thread, at);
      m.shadow[(at - kSharedBase) / 2].leaving = false;
      if (!to) return;
      check_global(to, 2, true, "store_box");
      if (options.track_global_writes) track_global(to, 2, true);
      memcpy(to, from, 2);
    });
  m.threads[m.thread].stored.clear();
}

}  // namespace txl::emulation
