// Banks of shared memory, 32 of 4 bytes: how often a kernel's accesses must ask it ("passes"), and how often
// they would if no two lanes wanted different words of one bank ("least").
//
// Lanes run one after the other, so what they access at once is put together afterwards: between two places
// where a warp meets, the n-th time that each lane comes to the same instruction. A GPU takes a warp's
// accesses of up to 4 bytes together, of 8 bytes half a warp at a time, of 16 a quarter; a matrix of ldmatrix
// or stmatrix is eight rows of 16 bytes. Not counted: what tensor cores and the copy engine access. Where
// lanes leave out an access in some turns of a loop, those of different turns are put together, and may seem
// to conflict.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

namespace txl::emulation {

// What is counted, of one instruction of the emulated kernel.
struct BankSite {
  const char* what;  // read, write, copy, read_matrix, write_matrix
  int bytes;         // of a lane
  uintptr_t at;      // in the library that holds the kernel

  bool operator<(const BankSite& other) const {
    return std::tie(at, what, bytes) < std::tie(other.at, other.what, other.bytes);
  }
};

struct BankCount {
  int64_t passes = 0, least = 0;
};
typedef std::map<BankSite, BankCount> BankCounts;

// One pass or more for lanes whose accesses are taken together.
inline void count_passes(BankCount& count, const uint32_t* addresses, int lanes, int bytes) {
  std::vector<uint32_t> words;
  for (int i = 0; i < lanes; ++i)
    for (int n = 0; n < std::max(bytes / 4, 1); ++n) words.push_back(addresses[i] / 4 + n);
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  int of_bank[32] = {}, most = 0;
  for (const uint32_t word : words) most = std::max(most, ++of_bank[word % 32]);
  count.passes += most;
  count.least += (static_cast<int>(words.size()) + 31) / 32;
}

// The accesses of a warp since it met last.
class WarpBanks {
 public:
  void add(const BankSite& site, int lane, uint32_t address) { accesses_.push_back({site, lane, address}); }

  void count(BankCounts& counts) {
    if (accesses_.empty()) return;
    std::map<std::pair<BankSite, int>, int> times;  // of a lane at a place
    std::map<std::pair<BankSite, int>, std::vector<std::pair<int, uint32_t>>> at_once;
    for (const Access& access : accesses_) {
      const int time = times[{access.site, access.lane}]++;
      at_once[{access.site, time}].push_back({access.lane, access.address});
    }
    for (auto& [key, lanes] : at_once) {
      const BankSite& site = key.first;
      std::sort(lanes.begin(), lanes.end());
      const int together = site.bytes <= 4 ? 32 : 128 / site.bytes;
      for (size_t i = 0; i < lanes.size();) {
        uint32_t addresses[32];
        const int group = lanes[i].first / together;
        int n = 0;
        for (; i < lanes.size() && lanes[i].first / together == group; ++i) addresses[n++] = lanes[i].second;
        count_passes(counts[site], addresses, n, site.bytes);
      }
    }
    accesses_.clear();
  }

 private:
  struct Access {
    BankSite site;
    int lane;
    uint32_t address;
  };
  std::vector<Access> accesses_;
};

// Lines "kernel|what|bytes|place in the library|passes|least".
inline void write_bank_counts(std::FILE* file, const char* kernel, const BankCounts& counts) {
  for (const auto& [site, count] : counts) {
    Dl_info library;
    const bool known = dladdr(reinterpret_cast<void*>(site.at), &library) != 0;
    const uintptr_t base = known ? reinterpret_cast<uintptr_t>(library.dli_fbase) : 0;
    std::fprintf(file, "%s|%s|%d|%#llx|%lld|%lld\n", kernel, site.what, site.bytes,
                 static_cast<unsigned long long>(site.at - base), static_cast<long long>(count.passes),
                 static_cast<long long>(count.least));
  }
}

}  // namespace txl::emulation
