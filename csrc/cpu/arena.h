// The memory of one call of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "memory.h"

namespace txl::TXL_LEVEL {

// A fixed number of small records. (std::vector would do, but its functions are shared between the objects of
// all levels.)
template <typename T>
class Array {
 public:
  explicit Array(int64_t size) : data_(new T[static_cast<size_t>(size)]()), size_(size) {}
  ~Array() { delete[] data_; }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T& operator[](int64_t i) { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  int64_t size() const { return size_; }

 private:
  T* data_;
  int64_t size_;
};

// A block of memory for one call, carved into arrays that start on cache lines.
class Arena {
 public:
  explicit Arena(size_t bytes) : memory_(bytes), next_(memory_.data) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <typename T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return p;
  }
  template <typename T>
  static size_t bytes(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

  // A thread's record of arrays, listed once: `list(record, visit)` calls visit(pointer, count) for each of
  // its arrays. Far from other records: what a core stores row by row, at a stride of kilobytes, makes it
  // fetch that many rows more, for itself alone, and a neighbour's arrays would be taken from their thread.
  template <class Record, class List>
  static size_t record_bytes(List list) {
    Record record{};
    size_t total = kGapBytes;
    list(record,
         [&](auto*& p, int64_t count) { total += bytes<std::remove_reference_t<decltype(*p)>>(count); });
    return total;
  }
  template <class Record, class List>
  void take_record(Record& record, List list) {
    next_ += kGapBytes;
    list(record, [&](auto*& p, int64_t count) { p = take<std::remove_reference_t<decltype(*p)>>(count); });
  }

 private:
  static constexpr size_t kGapBytes = 128 << 10;

  Memory memory_;
  char* next_;
};

}  // namespace txl::TXL_LEVEL
