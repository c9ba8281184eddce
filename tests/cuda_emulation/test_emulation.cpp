// Tests of the emulation: `test_emulation CASE` runs a case; exit status 0 if all is well, else 1 and the
// first error. Planted faults must end with the error that tests/test_cuda_emulation.py names. The kernels
// also compile with nvcc, as they use every intrinsic; those of warpgroups, TXL_TEST_WARPGROUPS, for sm_90a
// alone.
#include "../../csrc/cuda/copy_engine.h"
#include "../../csrc/cuda/tiles.h"

namespace txl::cuda {

// What a kernel gets wrong on purpose.
enum class Fault {
  none,
  no_barrier,       // between a write and a read, or, of a copy, after the wait
  only_sync_warp,   // where sync_threads is needed
  no_wait,          // for a copy, or a product
  late_wait,        // for one group too few
  reuse,            // no barrier between a read and the next write to the same place
  wrong_index,      // of a fragment
  pending_at_end,   // a copy, or a product, nobody waits for
  one_warp_only,    // at the barrier
  some_lanes_only,  // at a collective
  ends_early,
  // Of products of a warpgroup:
  no_fence,
  early_fence,  // before what was copied has arrived
  late_fence,   // after the start of the products
  no_begin,
  no_commit,
  one_warp_less,               // in one of the products
  one_warp_late,               // after a barrier that is behind the products for others
  overwrite,                   // what they read, before they were waited for
  overwrite_between_barriers,  // the same
  overwrite_left,              // the same, of a
  no_swizzle,                  // says the descriptor
  unaligned,                   // b's start, from which its places are counted
  // Of the copy engine:
  no_mbarrier,
  no_arrival,
  two_arrivals,
  wrong_parity,
  only_wait,    // no barrier behind it
  overwritten,  // the mbarrier
  read_without_fence,
  product_without_barrier,
  out_of_bounds,
  // Of boxes that are stored:
  one_lane_no_fence,
  write_before_wait,
  no_barrier_after_wait,
};

// out[16, 8] = a[16, k] b[k, 8] of one warp, k 16, or 8 of float32; `trans`: a and b are stored with the
// other dimension contiguous, 16-bit elements.
template <typename E, bool trans, Fault fault = Fault::none>
struct Product {
  struct Params {
    const E *a, *b;  // a [m, k], b [n, k]; trans: a [k, m], b [k, n]
    float* out;
  };
  static constexpr int kThreads = 32;
  static constexpr uint32_t kShared = 16 * 32 + 16 * 16;

  static TXL_DEVICE void run(const Params& p) {
    const uint32_t a_shared = shared_base(), b_shared = a_shared + 16 * 32;
    const int l = lane();
    constexpr int kWord = 4 / sizeof(E);  // elements
    copy_async_16(a_shared + 16 * l, p.a + 4 * kWord * l, true);
    if (l < 16) copy_async_16(b_shared + 16 * l, p.b + 4 * kWord * l, true);
    commit_copies();
    wait_copies<0>();
    if (fault != Fault::no_barrier) sync_warp();

    uint32_t a[4], b[2];
    const int j = l % 8, i = l / 8;  // row j of matrix i
    if (trans) {
      load_matrix_x4_trans(a, a_shared + 32 * (j + i / 2 * 8) + 16 * (i % 2));
      uint32_t b_twice[4];
      load_matrix_x4_trans(b_twice, b_shared + 16 * (j + i % 2 * 8));
      b[0] = b_twice[0], b[1] = b_twice[1];
    } else {
      load_matrix_x4(a, a_shared + 32 * (j + i % 2 * 8) + 16 * (i / 2));
      load_matrix_x2(b, b_shared + 32 * j + 16 * (i % 2));
    }
    if (fault == Fault::wrong_index) {
      const uint32_t kept = a[1];
      a[1] = a[2];
      a[2] = kept;
    }
    float d[4] = {1, 1, 1, 1};
    Sum<E> sum;
    sum.begin(d);
    sum.add(a, b);
    sum.add(a, b);
    sum.end(d);
    TXL_UNROLL_GPU
    for (int half = 0; half < 2; ++half) {
      float* to = p.out + (l / 4 + 8 * half) * 8 + l % 4 * 2;
      store_global(reinterpret_cast<float2*>(to), float2{d[2 * half], d[2 * half + 1]});
    }
  }
};

struct Shuffles {
  struct Params {
    float* f;
    int32_t* i;
    uint32_t* u;
    uint32_t* any;
    uint32_t* turned;
  };
  static constexpr int kThreads = 64;
  static constexpr uint32_t kShared = 0;

  static TXL_DEVICE void run(const Params& p) {
    const int t = thread_index();
    store_global(p.f + t, shuffle_xor(0.5f * static_cast<float>(t), 5));
    store_global(p.i + t, shuffle_xor(-t, 31));
    store_global(p.u + t, shuffle_xor(static_cast<uint32_t>(t), 3));
    const uint32_t row = static_cast<uint32_t>(t / 4 * 8 + t % 4 * 2);  // elements 8 row + column
    store_global(p.turned + t, transpose_matrix(row | (row + 1) << 16));
    store_global(p.any + t, (any(t == 40) ? 1u : 0u) + (any(t >= 0) ? 2u : 0u));
  }
};

// out[block, t] = the sum over tiles of x[block, tile, t], with two tiles in flight, each thread reading what
// a thread of another warp has copied.
template <Fault fault = Fault::none>
struct Pipeline {
  struct Params {
    const float* x;  // [blocks, count, 4]
    float* out;      // [blocks, kThreads, 4]
    int count;       // of float4, not a multiple of kThreads
  };
  static constexpr int kThreads = 128;
  static constexpr uint32_t kTile = 16 * kThreads, kShared = 2 * kTile;

  static TXL_DEVICE void copy(const Params& p, int tile) {
    const int i = tile * kThreads + thread_index();
    const bool valid = i < p.count;
    const float* from = valid ? p.x + (static_cast<int64_t>(block_index()) * p.count + i) * 4 : p.x;
    copy_async_16(shared_base() + tile % 2 * kTile + 16 * thread_index(), from, valid);
  }

  static TXL_DEVICE void run(const Params& p) {
    const int tiles = (p.count + kThreads - 1) / kThreads;
    const int reads = (thread_index() + 32) % kThreads;
    float4 sum{0, 0, 0, 0};
    copy(p, 0);
    commit_copies();
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile + 1 < tiles || fault == Fault::pending_at_end) copy(p, tile + 1);
      commit_copies();
      if (fault == Fault::late_wait)
        wait_copies<2>();
      else if (fault != Fault::no_wait)
        wait_copies<1>();
      if (fault == Fault::only_sync_warp)
        sync_warp();
      else if (fault != Fault::no_barrier)
        sync_threads();
      const float4 x = load_shared<float4>(shared_base() + tile % 2 * kTile + 16 * reads);
      sum = float4{sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
      if (fault != Fault::reuse) sync_threads();
    }
    store_global(reinterpret_cast<float4*>(p.out) + block_index() * kThreads + reads, sum);
  }
};

// Every thread writes one float and reads the one of thread t ^ partner.
template <int partner, Fault fault = Fault::none>
struct Exchange {
  struct Params {
    float* out;
  };
  static constexpr int kThreads = 64;
  static constexpr uint32_t kShared = 4 * kThreads;

  static TXL_DEVICE void barrier() {
    if (partner < 32 || fault == Fault::only_sync_warp)
      sync_warp();
    else
      sync_threads();
  }

  static TXL_DEVICE void run(const Params& p) {
    const int t = thread_index();
    const uint32_t mine = shared_base() + 4 * t, other = shared_base() + 4 * (t ^ partner);
    store_shared(mine, static_cast<float>(t));
    if (fault != Fault::no_barrier) barrier();
    const float x = load_shared<float>(other);
    if (fault != Fault::reuse) barrier();
    store_shared(mine, x + 1);
    store_global(p.out + t, load_shared<float>(mine));
  }
};

// Threads that do not meet.
template <Fault fault>
struct Meeting {
  struct Params {};
  static constexpr int kThreads = 64;

  static TXL_DEVICE void run(const Params&) {
    if (fault == Fault::ends_early && thread_index() == 5) return;
    if (fault == Fault::some_lanes_only && lane() >= 16) any(true);
    if (fault == Fault::one_warp_only) {
      if (lane() < 16) sync_threads();
      sync_warp();
    }
    sync_threads();
  }
};

// Each type through global and shared memory, and the conversions.
struct Convert {
  struct Params {
    const float* x;  // [kThreads]
    uint16_t *as_bf16, *as_f16;
    float *from_bf16, *from_f16, *exp2, *log2, *sums;
    uint32_t *packed_bf16, *packed_f16;
  };
  static constexpr int kThreads = 32;
  static constexpr uint32_t kShared = 16 * kThreads;

  static TXL_DEVICE void run(const Params& p) {
    const int t = thread_index();
    const uint32_t address = shared_base() + 16 * t;
    const float x = load_global(p.x + t);
    store_shared(address, from_float<bf16>(x));
    store_global(p.as_bf16 + t, load_shared<uint16_t>(address));
    store_shared(address, from_float<f16>(x));
    const f16 h = load_shared<f16>(address);
    store_global(p.as_f16 + t, h.bits);
    store_global(p.from_bf16 + t, to_float(from_float<bf16>(x)));
    store_global(p.from_f16 + t, to_float(h));
    store_global(p.exp2 + t, exp2_fast(x));
    store_global(p.log2 + t, log2_fast(x));

    const float2 x2 = load_global(reinterpret_cast<const float2*>(p.x) + t / 2);
    const float4 x4 = load_global(reinterpret_cast<const float4*>(p.x) + t / 4);
    store_shared(address, bf16{load_global(reinterpret_cast<const uint16_t*>(p.x) + 2 * t + 1)});
    store_global(p.sums + t, x2.x + x4.y + to_float(load_shared<bf16>(address)));

    store_shared(address, float2{to_float(from_float<bf16>(x)), to_float(from_float<bf16>(-x))});
    const uint2 two = load_shared<uint2>(address);
    store_shared(address, uint4{two.x, two.y, 0, 0});
    const uint4 four = load_shared<uint4>(address);
    store_global(p.packed_bf16 + t, pack<bf16>(bits<float>(four.x), bits<float>(four.y)));
    store_global(p.packed_f16 + t, pack<f16>(to_float(from_float<f16>(x)), -1));
  }
};

// A matrix in shared memory as a warpgroup's products read it, in panels of 64 elements of 16 bits of all
// rows. PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout", 128-byte swizzle: atoms of eight
// rows by eight units of 16 bytes, of which unit j of row i is number 8 i + (j xor i). Of the places of atoms
// every kSpread-th is used: with 2 neither stride of a descriptor is what a program would take for granted.
template <int kRows, int kWidth, int kSpread = 1>
struct Swizzled {
  static constexpr uint32_t kNextRows = 1024 * kSpread, kNextPanel = kRows / 8 * kNextRows;
  static constexpr uint32_t kBytes = kWidth / 64 * kNextPanel;

  uint32_t start;

  TXL_DEVICE uint32_t at(int row, int unit) const {
    return start + row / 8 * kNextRows + unit / 8 * kNextPanel + 16 * (row % 8 * 8 + (unit % 8 ^ row % 8));
  }
  template <int kThreads, typename E>
  TXL_DEVICE void copy(const E* from) const {
    constexpr int kUnits = kWidth / 8;
    for (int i = thread_index(); i < kRows * kUnits; i += kThreads)
      copy_async_16(at(i / kUnits, i % kUnits), from + 8 * i, true);
    commit_copies();
  }
};

// assigned = a b, added = 1 + a b: two groups in flight. kSharedA: a is read from shared memory, not
// from registers.
template <typename E, bool kTransposed, int kColumns, int kDepth, int kSpread = 1, Fault fault = Fault::none,
          bool kSharedA = false>
struct WarpgroupProduct {
  struct Params {
    const E *a, *b;           // a [64, depth], b [columns, depth]; transposed: [depth, columns]
    float *assigned, *added;  // [64, columns]
  };
  using A = Swizzled<64, kDepth, (kSharedA ? kSpread : 1)>;
  using B = Swizzled<kTransposed ? kDepth : kColumns, kTransposed ? kColumns : kDepth, kSpread>;
  static constexpr int kThreads = 128, kSteps = kDepth / 16, kTiles = kColumns / 8;
  static constexpr uint32_t kShared = 1024 + A::kBytes + B::kBytes;

  // PTX ISA, "Matrix Descriptor Format".
  template <bool kByRows, typename Operand>
  static TXL_DEVICE uint64_t descriptor(Operand x, int step) {
    constexpr uint32_t kNextRows = Operand::kNextRows, kNextPanel = Operand::kNextPanel;
    const uint32_t offset = kByRows ? 2 * step * kNextRows : step / 4 * kNextPanel + step % 4 * 32;
    const uint32_t start = x.start + (fault == Fault::wrong_index ? 0 : offset);
    const uint64_t swizzle = fault == Fault::no_swizzle ? 0 : 1;
    return swizzle << 62 | uint64_t{kNextRows >> 4} << 32 | uint64_t{kNextPanel >> 4} << 16 |
           (start & 0x3ffff) >> 4;
  }

  template <bool kAdd>
  static TXL_DEVICE void add_step(float (&d)[kTiles][4], const uint32_t (&a)[kSteps][4], A a_shared, B b,
                                  int step) {
    if constexpr (kSharedA)
      warpgroup_mma<E, kAdd>(d, descriptor<false>(a_shared, step), descriptor<false>(b, step));
    else
      warpgroup_mma<E, kTransposed, kAdd>(d, a[step], descriptor<kTransposed>(b, step));
  }

  template <bool kAdd>
  static TXL_DEVICE void start(float (&d)[kTiles][4], const uint32_t (&a)[kSteps][4], A a_shared, B b) {
    if (fault != Fault::no_begin) warpgroup_begin();
    add_step<kAdd>(d, a, a_shared, b, 0);
    TXL_UNROLL_GPU
    for (int step = 1; step < kSteps; ++step)
      if (fault != Fault::one_warp_less || warp() != 2 || step != 2) add_step<true>(d, a, a_shared, b, step);
    if (fault != Fault::no_commit || !kAdd) warpgroup_commit();
  }

  static TXL_DEVICE void store(float* out, const float (&d)[kTiles][4]) {
    TXL_UNROLL_GPU
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int n = i / 2, half = i % 2;
      float* to = out + (16 * warp() + lane() / 4 + 8 * half) * kColumns + 8 * n + lane() % 4 * 2;
      store_global(reinterpret_cast<float2*>(to), float2{d[n][2 * half], d[n][2 * half + 1]});
    }
  }

  static TXL_DEVICE void run(const Params& p) {
    const uint32_t base = fault == Fault::unaligned ? shared_base() : (shared_base() + 1023) / 1024 * 1024;
    const A a_shared{base};
    const B b_shared{base + A::kBytes};
    a_shared.template copy<kThreads>(p.a);
    b_shared.template copy<kThreads>(p.b);
    wait_copies<1>();
    sync_threads();
    uint32_t a[kSteps][4];
    TXL_UNROLL_GPU
    for (int step = 0; step < kSteps; ++step)
      load_matrix_x4(a[step], a_shared.at(16 * warp() + lane() % 16, 2 * step + lane() / 16));
    float assigned[kTiles][4], added[kTiles][4];
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; ++n)
      for (int i = 0; i < 4; ++i) assigned[n][i] = 5, added[n][i] = 1;

    if (fault == Fault::early_fence) fence_async_proxy();
    wait_copies<0>();
    if (fault != Fault::no_fence && fault != Fault::early_fence && fault != Fault::late_fence)
      fence_async_proxy();
    if (fault != Fault::no_barrier) sync_threads();
    start<false>(assigned, a, a_shared, b_shared);
    if (fault == Fault::one_warp_late && warp() == 2) sync_threads();
    start<true>(added, a, a_shared, b_shared);
    if (fault == Fault::one_warp_late && warp() != 2) sync_threads();
    if (fault == Fault::late_fence) fence_async_proxy(), sync_threads();
    if (fault == Fault::overwrite_between_barriers) sync_threads();
    if (fault == Fault::overwrite || fault == Fault::overwrite_between_barriers)
      if (thread_index() == 40) store_shared(b_shared.at(3, 2), 0.0f);
    if (fault == Fault::overwrite_left && thread_index() == 40) store_shared(a_shared.at(3, 2), 0.0f);
    if (fault == Fault::overwrite_between_barriers) sync_threads();
    if (fault != Fault::no_wait) warpgroup_wait<1>();
    store(p.assigned, assigned);
    if (fault != Fault::pending_at_end) warpgroup_wait<0>();
    store(p.added, added);
  }
};

// Rows of a tensor by the copy engine, two boxes at a time, the second one's place 64 rows on: read as they
// are, and by a product that sums up their first 16 channels.
template <Fault fault = Fault::none>
struct Boxes {
  static constexpr int kTimes = 3, kRows = 2 * kBoxRows;
  struct Params {
    TensorMap map;
    int batch, head, row[kTimes];
    bf16* out;    // [times, rows, 64]
    float* sums;  // [times, kBoxRows], of the first box
  };
  static constexpr int kThreads = 128;
  static constexpr uint32_t kShared = 1024 + 2 * kBoxBytes + 8;

  static TXL_DEVICE void run(const Params& p) {
    const uint32_t base = (shared_base() + 1023) / 1024 * 1024 + (fault == Fault::unaligned ? 128 : 0);
    const uint32_t mbarrier = (shared_base() + 1023) / 1024 * 1024 + 2 * kBoxBytes;
    store_shared(base + static_cast<uint32_t>(thread_index()) * 16, 1.0f);
    if (elected(warp() == 0) && fault != Fault::no_mbarrier) mbarrier_init(mbarrier, 1);
    if (fault != Fault::no_fence) fence_async_proxy();
    if (fault != Fault::no_barrier) sync_threads();
    for (int n = 0; n < kTimes; ++n) {
      if (elected(warp() == 0)) {
        copy_box(base, p.map, 0, p.row[n], p.head, p.batch, mbarrier);
        copy_box(base + kBoxBytes, p.map, 0, p.row[n] + kBoxRows, p.head, p.batch, mbarrier);
        if (fault != Fault::no_arrival) mbarrier_arrive(mbarrier);
        if (fault == Fault::two_arrivals) mbarrier_arrive(mbarrier);
      }
      if (fault == Fault::overwritten && thread_index() == 5) store_shared(mbarrier, 0.0f);
      if (fault == Fault::pending_at_end && n == kTimes - 1) return;
      const int parity = (n + (fault == Fault::wrong_parity ? 1 : 0)) % 2;
      if (fault != Fault::no_wait) mbarrier_wait(mbarrier, static_cast<uint32_t>(parity));
      if (fault != Fault::only_wait && fault != Fault::product_without_barrier) sync_threads();
      if (fault == Fault::product_without_barrier) sync_warp();
      add_up(p, base, n);
      for (int i = thread_index(); i < kRows * 64; i += kThreads) {
        const uint32_t straight = base + static_cast<uint32_t>(i) * 2;
        store_global(p.out + n * kRows * 64 + i, load_shared<bf16>(straight ^ (straight >> 3 & 0x70)));
      }
      if (fault != Fault::read_without_fence) fence_async_proxy();
      if (fault != Fault::reuse) sync_threads();
    }
  }

  static TXL_DEVICE void add_up(const Params& p, uint32_t base, int n) {
    if (fault == Fault::only_wait) return;
    float d[kBoxRows / 8][4];
    const uint32_t one = pack<bf16>(1, 1), a[4] = {one, one, one, one};
    warpgroup_begin();
    warpgroup_mma<bf16, false, false>(d, a, uint64_t{1} << 62 | uint64_t{64} << 32 | (base & 0x3ffff) / 16);
    warpgroup_commit();
    warpgroup_wait<0>();
    if (thread_index() >= 4) return;  // all rows of d are the same
    for (int i = 0; i < kBoxRows / 8; ++i)
      for (int x = 0; x < 2; ++x) store_global(p.sums + n * kBoxRows + 8 * i + lane() * 2 + x, d[i][x]);
  }
};

// Rows of 16 channels to a tensor by the copy engine, 64 of each warp at a time, turned on their way: the
// registers have channels for rows.
template <Fault fault = Fault::none>
struct StoredBoxes {
  static constexpr int kTimes = 2, kRows = 64;
  struct Params {
    TensorMap map;
    const bf16* x;  // [warps, times, rows, 16]
    int batch, head, row,
        channel;  // of the first box; the next of a warp lies kRows behind, warps side by side
  };
  static constexpr int kThreads = 64;
  static constexpr uint32_t kBytes = kRows * 32, kShared = 256 + 2 * kBytes;

  static TXL_DEVICE void run(const Params& p) {
    const uint32_t base = (shared_base() + 255) / 256 * 256 + static_cast<uint32_t>(warp()) * kBytes +
                          (fault == Fault::unaligned ? 128 : 0);
    const int of_matrix = lane() % 8 + lane() / 16 * 8, piece = lane() / 8 % 2;
    const bool swizzled = fault != Fault::no_swizzle && of_matrix / 4 % 2 == 1;
    const uint32_t to = base + static_cast<uint32_t>(of_matrix * 32 + (swizzled ? 1 - piece : piece) * 16);
    const bool late = fault == Fault::late_fence;
    for (int n = 0; n < kTimes; ++n) {
      if (fault != Fault::write_before_wait) wait_stored();
      if (fault != Fault::no_barrier_after_wait) sync_warp();
      for (int first = 0; first < kRows; first += 16) {
        uint32_t r[4];
        for (int i = 0; i < 4; ++i) {  // rows first + 8 (i / 2) + 2 (lane % 4) and the next of one channel
          const bf16* const from = p.x +
                                   ((warp() * kTimes + n) * kRows + first + i / 2 * 8 + lane() % 4 * 2) * 16 +
                                   i % 2 * 8 + lane() / 4;
          r[i] = pack<bf16>(to_float(load_global(from)), to_float(load_global(from + 16)));
        }
        store_matrix_x4_trans(to + static_cast<uint32_t>(first) * 32, r);
      }
      if (fault != Fault::no_fence && !late && !(fault == Fault::one_lane_no_fence && lane() == 9))
        fence_async_proxy();
      if (fault != Fault::no_barrier) sync_warp();
      if (late) fence_async_proxy();
      store_box(p.map, p.channel + 16 * warp(), p.row + kRows * n, p.head, p.batch, base);
    }
    if (fault != Fault::pending_at_end) wait_stored();
  }
};

}  // namespace txl::cuda

#if defined(__CUDACC__)

namespace txl::cuda {

// To be compiled, not run.
template <class... Kernels>
void launch_each() {
  (launch<Kernels>(1, Kernels::kShared, {}, nullptr), ...);
}
template void launch_each<Product<bf16, false>, Product<f16, false>, Product<f32, false>, Product<bf16, true>,
                          Product<f16, true>, Shuffles, Pipeline<>, Exchange<1>, Exchange<32>, Convert>();
#if defined(TXL_TEST_WARPGROUPS)
template void launch_each<
    WarpgroupProduct<bf16, false, 64, 64>, WarpgroupProduct<f16, false, 64, 128>,
    WarpgroupProduct<bf16, false, 8, 64>, WarpgroupProduct<f16, true, 64, 64>,
    WarpgroupProduct<bf16, true, 128, 64>, WarpgroupProduct<bf16, false, 32, 64, 1, Fault::none, true>,
    WarpgroupProduct<f16, false, 64, 128, 1, Fault::none, true>, Boxes<>, StoredBoxes<>>();
#endif

}  // namespace txl::cuda

#else

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "../../csrc/cuda/workspace.h"
#include "emulation_memory.h"

using namespace txl::cuda;
namespace emulation = txl::emulation;

static std::mt19937 generator(1);

static int random_below(int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); }

static void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

template <typename T>
static void readable(const char* name, const std::vector<T>& v) {
  emulation::global_memory.add_readable(name, v.data(), v.size() * sizeof(T));
}
template <typename T>
static void writable(const char* name, std::vector<T>& v) {
  emulation::global_memory.add_writable(name, v.data(), v.size() * sizeof(T));
}

// Small integers, up to these: every sum is exact, in any order.
template <typename E, bool trans, Fault fault = Fault::none>
static void product(int left_limit, int right_limit) {
  using K = Product<E, trans, fault>;
  constexpr int kDepth = 32 / sizeof(E);
  float left[16][kDepth], right[kDepth][8];
  std::vector<E> a(16 * kDepth), b(8 * kDepth);
  std::vector<float> out(128);
  const auto draw = [](int limit) { return static_cast<float>(random_below(2 * limit + 1) - limit) / 4; };
  for (int k = 0; k < kDepth; ++k) {
    for (int m = 0; m < 16; ++m) {
      left[m][k] = draw(left_limit);
      a[trans ? 16 * k + m : kDepth * m + k] = from_float<E>(left[m][k]);
    }
    for (int n = 0; n < 8; ++n) {
      right[k][n] = draw(right_limit);
      b[trans ? 8 * k + n : kDepth * n + k] = from_float<E>(right[k][n]);
    }
  }
  readable("a", a);
  readable("b", b);
  writable("out", out);
  launch<K>(1, K::kShared, {a.data(), b.data(), out.data()}, nullptr);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += left[m][k] * right[k][n];
      require(out[8 * m + n] == 1 + 2 * sum, "the product differs");
    }
  }
}

template <typename E, bool trans, Fault fault = Fault::none>
static void product() {
  product<E, trans, fault>(32, 32);
}

// Two more bits than a tf32 has, on one side and on the other.
static void product_f32() {
  product<f32, false>(8191, 16);
  emulation::global_memory.clear();
  product<f32, false>(16, 8191);
}

struct NotTf32 {
  struct Params {};
  static constexpr int kThreads = 32;

  static TXL_DEVICE void run(const Params&) {
    const uint32_t a[4] = {0x3f800001u, 0, 0, 0}, b[2] = {};
    float d[4] = {};
    mma_tf32(d, a, b);
  }
};
// What row 0 and column 0 of a product of tf32 come to, from `start` on: its eight terms are `terms`.
struct OneSum {
  struct Params {
    float start, terms[8], *out;
  };
  static constexpr int kThreads = 32;

  static TXL_DEVICE void run(const Params& p) {
    uint32_t a[4] = {}, b[2] = {};
    float d[4] = {p.start, 0, 0, 0};
    if (lane() < 4) {
      a[0] = bits<uint32_t>(p.terms[lane()]), a[2] = bits<uint32_t>(p.terms[lane() + 4]);
      b[0] = b[1] = bits<uint32_t>(1.0f);
    }
    mma_tf32(d, a, b);
    if (lane() == 0) store_global(p.out, d[0]);
  }
};
static void product_cut_off() {
  const auto sum = [](float start, std::initializer_list<float> terms) {
    std::vector<float> out(1);
    OneSum::Params p{start, {}, out.data()};
    std::copy(terms.begin(), terms.end(), p.terms);
    emulation::global_memory.clear();
    writable("out", out);
    launch<OneSum>(1, 0, p, nullptr);
    return out[0];
  };
  constexpr float kNext = 0x1.000002p0f, kBefore = 0x1.fffffep-1f, kInfinity = INFINITY;
  const auto requires_sum = [](float found, float expected) { require(found == expected, "not cut off so"); };
  requires_sum(sum(1, {0x1.8p-24f}), 1);  // not to the nearest
  requires_sum(sum(-1, {-0x1.8p-24f}), -1);
  requires_sum(sum(1, {-0x1p-24f}), kBefore);
  requires_sum(sum(1, {0x1p-24f, 0x1p-24f}), kNext);  // there is a bit more while it is added up,
  requires_sum(sum(1, {0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f}), 1);  // but not two,
  requires_sum(sum(1, {-0x1p-25f}), 1);
  requires_sum(sum(1, {0x1p-24f, 0, 0, 0, 0x1p-24f}), 1);  // and not from four to the next four
  requires_sum(sum(0x1p-24f, {1, 0x1p-24f}), kNext);       // the sum so far is one of them
  requires_sum(sum(0x1p100f, {0x1p76f, 0x1p76f}), 0x1p100f * kNext);
  requires_sum(sum(0, {0x1p-90f, -0x1p-100f}), 0x1p-90f - 0x1p-100f);
  requires_sum(sum(0, {kInfinity, 1}), kInfinity);
  requires_sum(sum(0x1.fffffep127f, {0x1.ffcp127f}), kInfinity);
  require(std::isnan(sum(0, {NAN, 1})) && std::isnan(sum(-kInfinity, {kInfinity})), "NaN");
}

static void product_not_tf32() { launch<NotTf32>(1, 0, {}, nullptr); }

static void shuffles() {
  std::vector<float> f(64);
  std::vector<int32_t> i(64);
  std::vector<uint32_t> u(64), any(64), turned(64);
  writable("f", f);
  writable("i", i);
  writable("u", u);
  writable("any", any);
  writable("turned", turned);
  launch<Shuffles>(1, Shuffles::kShared, {f.data(), i.data(), u.data(), any.data(), turned.data()}, nullptr);
  for (int t = 0; t < 64; ++t) {
    require(f[t] == 0.5f * static_cast<float>(t ^ 5), "shuffle_xor of float");
    require(i[t] == -(t ^ 31), "shuffle_xor of int32_t");
    require(u[t] == static_cast<uint32_t>(t ^ 3), "shuffle_xor of uint32_t");
    require(any[t] == (t < 32 ? 2u : 3u), "any");
    const uint32_t column = static_cast<uint32_t>(t / 32 * 64 + t % 4 * 16 + t % 32 / 4);
    require(turned[t] == (column | (column + 8) << 16), "transpose_matrix");
  }
}

template <Fault fault = Fault::none>
static std::vector<float> pipeline() {
  using K = Pipeline<fault>;
  constexpr int blocks = 7, count = 5 * 128 - 37;
  std::vector<float> x(blocks * count * 4 + 4), out(blocks * K::kThreads * 4), expected(out.size());
  for (float& v : x) v = static_cast<float>(random_below(1000));
  const float* aligned = x.data() + (16 - reinterpret_cast<uintptr_t>(x.data()) % 16) % 16 / 4;
  for (int block = 0; block < blocks; ++block)
    for (int i = 0; i < count * 4; ++i)
      expected[block * K::kThreads * 4 + i % (K::kThreads * 4)] += aligned[block * count * 4 + i];
  readable("x", x);
  writable("out", out);
  launch<K>(blocks, K::kShared, {aligned, out.data(), count}, nullptr);
  require(out == expected, "the sums differ");
  return out;
}

// Small integers, as above.
template <typename E, bool kTransposed, int kColumns, int kDepth, int kSpread = 1, Fault fault = Fault::none,
          bool kSharedA = false>
static void warpgroup_product() {
  using K = WarpgroupProduct<E, kTransposed, kColumns, kDepth, kSpread, fault, kSharedA>;
  emulation::global_memory.clear();
  std::vector<E> a(64 * kDepth), b(kColumns * kDepth);
  for (auto* v : {&a, &b})
    for (E& x : *v) x = from_float<E>(static_cast<float>(random_below(65) - 32) / 4);
  std::vector<float> assigned(64 * kColumns), added(assigned.size());
  readable("a", a);
  readable("b", b);
  writable("assigned", assigned);
  writable("added", added);
  launch<K>(2, K::kShared, {a.data(), b.data(), assigned.data(), added.data()}, nullptr);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      float sum = 0;
      for (int k = 0; k < kDepth; ++k)
        sum += to_float(a[kDepth * m + k]) * to_float(b[kTransposed ? kColumns * k + n : kDepth * n + k]);
      require(assigned[kColumns * m + n] == sum, "the product differs");
      require(added[kColumns * m + n] == 1 + sum, "the sum with the product differs");
    }
  }
}

template <Fault fault, bool kSharedA = false>
static void warpgroup_fault() {
  warpgroup_product<bf16, false, 64, 64, 1, fault, kSharedA>();
}

template <typename E>
static void warpgroup_products() {
  warpgroup_product<E, false, 8, 64>();
  warpgroup_product<E, false, 64, 64>();
  warpgroup_product<E, false, 64, 128>();
  warpgroup_product<E, false, 64, 128, 2>();
  warpgroup_product<E, false, 128, 64>();
  warpgroup_product<E, true, 64, 64>();
  warpgroup_product<E, true, 64, 128>();
  warpgroup_product<E, true, 128, 64>();
  warpgroup_product<E, true, 128, 64, 2>();
  warpgroup_product<E, false, 32, 64, 1, Fault::none, true>();
  warpgroup_product<E, false, 64, 64, 1, Fault::none, true>();
  warpgroup_product<E, false, 64, 128, 2, Fault::none, true>();
}

// A tensor of which heads lie between rows, and boxes (of rows of that many heads) that lie outside of it in
// part.
template <Fault fault = Fault::none, int kHeadsOfBox = 1>
static void boxes() {
  using K = Boxes<fault>;
  emulation::global_memory.clear();
  constexpr int64_t kBatch = 2, kHeads = 3, kRows = 150, kChannels = 40, kPitch = 48;
  std::vector<bf16> memory(kBatch * kRows * kHeads * kPitch + 8);
  for (bf16& x : memory) x = from_float<bf16>(static_cast<float>(random_below(65) - 32));
  const bf16* x = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16 / 2;
  typename K::Params p{{}, 1, 2, {-5, 60, 200}, nullptr, nullptr};
  constexpr int kRowsOfBox = kBoxRows / kHeadsOfBox;
  require(!make_tensor_map(p.map, x,
                           {{kBatch, kHeads, kRows, kChannels},
                            {kRows * kHeads * kPitch * 2, kPitch * 2, kHeads * kPitch * 2},
                            kRowsOfBox,
                            kHeadsOfBox}),
          "the tensor is refused");
  std::vector<bf16> out(K::kTimes * K::kRows * 64);
  std::vector<float> sums(K::kTimes * kBoxRows);
  p.out = out.data(), p.sums = sums.data();
  const size_t less = fault == Fault::out_of_bounds ? 200 : 0;
  emulation::global_memory.add_readable("x", memory.data(), (memory.size() - less) * sizeof(bf16));
  writable("out", out);
  writable("sums", sums);
  launch<K>(2, K::kShared, p, nullptr);
  for (int n = 0; n < K::kTimes; ++n) {
    for (int row = 0; row < K::kRows; ++row) {
      float sum = 0;
      for (int channel = 0; channel < 64; ++channel) {
        const int of_box = row % kBoxRows, head = p.head + of_box / kRowsOfBox;
        const int64_t i = p.row[n] + row / kBoxRows * kBoxRows + of_box % kRowsOfBox;
        const bool inside = i >= 0 && i < kRows && head < kHeads && channel < kChannels;
        const float expected =
            inside ? to_float(x[((p.batch * kRows + i) * kHeads + head) * kPitch + channel]) : 0.0f;
        require(to_float(out[(n * K::kRows + row) * 64 + channel]) == expected, "an element differs");
        if (channel < 16) sum += expected;
      }
      if (row < kBoxRows) require(sums[n * kBoxRows + row] == sum, "a sum differs");
    }
  }
}

// A tensor of which heads lie between rows, and boxes that lie outside of it in part.
template <Fault fault = Fault::none>
static void stored_boxes() {
  using K = StoredBoxes<fault>;
  emulation::global_memory.clear();
  constexpr int64_t kBatch = 2, kHeads = 3, kRows = 150, kChannels = 40, kPitch = 48;
  constexpr int kWarps = K::kThreads / 32;
  std::vector<bf16> memory(kBatch * kRows * kHeads * kPitch + 8), x(kWarps * K::kTimes * K::kRows * 16);
  for (bf16& element : x) element = from_float<bf16>(static_cast<float>(random_below(65) + 1));
  bf16* to = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16 / 2;
  typename K::Params p{{}, x.data(), 1, 2, 40, 16};
  require(!make_tensor_map(p.map, to,
                           {{kBatch, kHeads, kRows, kChannels},
                            {kRows * kHeads * kPitch * 2, kPitch * 2, kHeads * kPitch * 2},
                            K::kRows,
                            1,
                            fault == Fault::wrong_index ? 64 : 16}),
          "the tensor is refused");
  readable("x", x);
  const size_t less = fault == Fault::out_of_bounds ? 200 : 0;
  emulation::global_memory.add_writable("to", memory.data(), (memory.size() - less) * sizeof(bf16));
  launch<K>(1, K::kShared, p, nullptr);
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t channel = 0; channel < kPitch; ++channel) {
          float expected = 0;
          const int64_t n = (row - p.row) / K::kRows, warp = (channel - p.channel) / 16;
          if (b == p.batch && h == p.head && row >= p.row && n < K::kTimes && channel >= p.channel &&
              channel < kChannels)
            expected = to_float(
                x[static_cast<size_t>(((warp * K::kTimes + n) * K::kRows + (row - p.row) % K::kRows) * 16 +
                                      (channel - p.channel) % 16)]);
          require(to_float(to[((b * kRows + row) * kHeads + h) * kPitch + channel]) == expected,
                  "an element differs");
        }
}

static void what_has_boxes() {
  require(has_boxes({{1, 1, 4, 16}, {3, 0, 32}}), "strides of what there is but one of");
  require(has_boxes({{2, 3, 4, 16}, {512, 32, 96}}), "heads between rows");
  require(!has_boxes({{1, 2, 2, 16}, {64, 0, 32}}), "a stride of 0");
  require(!has_boxes({{1, 1, 2, 16}, {64, 64, 40}}), "a stride that is no multiple of 16");
  require(!has_boxes({{1, 1, 2, 16}, {64, 64, 16}}), "rows that overlap");
  require(!has_boxes({{2, 1, 2, 16}, {int64_t{1} << 40, 64, 32}}), "a stride too long");
  require(!has_boxes({{1, 1, 0, 16}, {64, 64, 32}}), "no rows");
}

template <int partner, Fault fault = Fault::none>
static void exchange() {
  using K = Exchange<partner, fault>;
  std::vector<float> out(K::kThreads);
  writable("out", out);
  launch<K>(2, K::kShared, {out.data()}, nullptr);
  for (int t = 0; t < K::kThreads; ++t)
    require(out[t] == static_cast<float>((t ^ partner) + 1), "out differs");
}

template <Fault fault>
static void meeting() {
  launch<Meeting<fault>>(1, 0, {}, nullptr);
}

// A kernel of one line for what takes no more.
template <class Body>
struct Line {
  using Params = Body;
  static constexpr int kThreads = 32;
  static void run(const Params& body) { body(); }
};
template <class Body>
static void line(uint32_t shared_bytes, const Body& body, int64_t blocks = 1, bool pdl = false) {
  launch<Line<Body>>(blocks, shared_bytes, body, nullptr, pdl);
}

static void uninitialised() {
  std::vector<float> out(3 * 32);
  writable("out", out);
  float* p = out.data();
  line(64, [p] {
    const int t = thread_index();
    store_global(p + t, load_shared<float>(shared_base()));
    store_global(p + 32 + t, to_float(load_shared<bf16>(shared_base() + 4)));
    store_global(p + 64 + t, to_float(load_shared<f16>(shared_base() + 62)));
  });
  for (float x : out) require(std::isnan(x), "not NaN");
}

// Rounds x by a search through all values of the type, in order of size; to even: to the even number of
// those.
static uint16_t nearest(float x, float (*value)(uint16_t), uint16_t infinity) {
  const double magnitude = std::fabs(static_cast<double>(x));
  int lo = 0, hi = infinity;
  while (hi - lo > 1) (value(static_cast<uint16_t>((lo + hi) / 2)) <= magnitude ? lo : hi) = (lo + hi) / 2;
  // What follows the largest number, had it one more bit of exponent.
  const double below = value(static_cast<uint16_t>(lo)),
               above = hi == infinity ? 2 * below - value(static_cast<uint16_t>(lo - 1))
                                      : value(static_cast<uint16_t>(hi));
  const double up = above - magnitude, down = magnitude - below;
  const int rounded = std::isinf(x) ? infinity : down < up ? lo : up < down ? hi : lo % 2 == 0 ? lo : hi;
  return static_cast<uint16_t>(rounded | (std::signbit(x) ? 0x8000 : 0));
}

static void conversions() {
  std::vector<float> x;
  for (int i = 0; i < 50000; ++i) x.push_back(emulation::float_of(static_cast<uint32_t>(generator())));
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float b = to_float(bf16{static_cast<uint16_t>(h)}), f = to_float(f16{static_cast<uint16_t>(h)});
    for (const float at : {b, f}) {
      const uint32_t u = emulation::float_bits(at);
      // Itself, halfway to the next and next to halfway, for both types.
      for (const uint32_t add : {0u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u})
        x.push_back(emulation::float_of(u + add));
    }
    require(std::isnan(b) ? (h & 0x7fff) > 0x7f80 : from_float<bf16>(b).bits == h, "bf16 and back");
    require(std::isnan(f) ? (h & 0x7fff) > 0x7c00 : from_float<f16>(f).bits == h, "f16 and back");
  }
  for (const float v : x) {
    if (std::isnan(v)) {
      require(from_float<bf16>(v).bits == 0x7fff && from_float<f16>(v).bits == 0x7fff, "NaN");
      continue;
    }
    require(from_float<bf16>(v).bits == nearest(v, emulation::float_from_bf16, 0x7f80), "to bf16");
    require(from_float<f16>(v).bits == nearest(v, emulation::float_from_f16, 0x7c00), "to f16");
  }
  require(to_float(f16{0x3555}) == 0x1.554p-2f && to_float(f16{1}) == 0x1p-24f, "from f16");
  require(from_float<f16>(65519.99f).bits == 0x7bff && from_float<f16>(65520).bits == 0x7c00, "f16 overflow");
  require(from_float<bf16>(3.4e38f).bits == 0x7f80, "bf16 overflow");
  for (const float v : x) {
    if (std::isnan(v)) continue;
    const float high = emulation::float_of(tf32(v)), step = std::ldexp(1.0f, std::ilogb(v) - 10);
    // To the nearest of 10 explicit bits, away from zero from halfway on; below the normal numbers, by bits.
    const bool normal = std::isfinite(v) && std::fabs(v) >= 0x1p-120f && std::fabs(v) < 0x1p126f;
    if (normal) require(high == std::round(v / step) * step, "to tf32");
    const Split<1> split({bits<uint32_t>(v)});
    require(split.high[0] == tf32(v), "the high part");
    if (!normal || std::fabs(v) < 0x1p-90f) continue;
    const float low = emulation::float_of(split.low[0]);
    require((split.low[0] & 0x1fff) == 0 && std::fabs(v - high - low) <= step * 0x1p-12f, "the low part");
  }
  require(std::isnan(emulation::float_of(tf32(NAN))) && tf32(INFINITY) == 0x7f800000u, "tf32, not finite");
  require(pack<bf16>(1, -2) == 0xc0003f80u && pack<f16>(1, -2) == 0xc0003c00u, "pack");

  const float inf = std::numeric_limits<float>::infinity();
  require(exp2_fast(-inf) == 0 && exp2_fast(inf) == inf && exp2_fast(3) == 8, "exp2_fast");
  require(exp2_fast(-126) > 0 && exp2_fast(-126.5f) == 0 && std::isnan(exp2_fast(NAN)), "exp2_fast flushes");
  require(log2_fast(8) == 3 && log2_fast(0) == -inf && log2_fast(0x1p-127f) == -inf, "log2_fast");
  require(std::isnan(log2_fast(-1)), "log2_fast of what is negative");
}

static void convert() {
  std::vector<float> x(32), from_bf16(32), from_f16(32), exp2(32), log2(32), sums(32);
  std::vector<uint16_t> as_bf16(32), as_f16(32);
  std::vector<uint32_t> packed_bf16(32), packed_f16(32);
  for (int i = 0; i < 32; ++i) x[i] = 0.37f * static_cast<float>(i - 7);
  readable("x", x);
  for (auto* v : {&from_bf16, &from_f16, &exp2, &log2, &sums}) writable("floats", *v);
  for (auto* v : {&as_bf16, &as_f16}) writable("elements", *v);
  for (auto* v : {&packed_bf16, &packed_f16}) writable("packed", *v);
  launch<Convert>(1, Convert::kShared,
                  {x.data(), as_bf16.data(), as_f16.data(), from_bf16.data(), from_f16.data(), exp2.data(),
                   log2.data(), sums.data(), packed_bf16.data(), packed_f16.data()},
                  nullptr);
  for (int i = 0; i < 32; ++i) {
    const uint16_t b = from_float<bf16>(x[i]).bits, f = from_float<f16>(x[i]).bits;
    require(as_bf16[i] == b && as_f16[i] == f, "elements");
    require(from_bf16[i] == to_float(bf16{b}) && from_f16[i] == to_float(f16{f}), "floats");
    require(packed_bf16[i] == (b | static_cast<uint32_t>(b ^ 0x8000) << 16), "pairs of bf16");
    require(packed_f16[i] == (f | 0xbc000000u), "pairs of f16");
    require(exp2[i] == std::exp2(x[i]), "exp2");
    const float high_half = emulation::float_of(emulation::float_bits(x[i]) & 0xffff0000u);
    require(sums[i] == x[i / 2 * 2] + x[i / 4 * 4 + 1] + high_half, "loads of 8, 16 and 2 bytes");
    require(x[i] < 0 ? std::isnan(log2[i]) : log2[i] == std::log2(x[i]), "log2");
  }
}

static void same_in_any_order() {
  const auto run = [] {
    generator.seed(3);
    emulation::global_memory.clear();
    product<bf16, false>();
    shuffles();
    warpgroup_product<f16, true, 128, 64>();
    boxes();
    return pipeline();
  };
  const std::vector<float> forward = run();
  emulation::options.reverse = true;
  require(run() == forward, "the reverse order of threads gives another result");
  emulation::options.os_threads = 3;
  require(run() == forward, "three OS threads give another result");
}

// The first error in the order of blocks, whatever runs first.
static void first_failing_block() {
  emulation::options.os_threads = 3;
  const auto fails = [] {
    if (block_index() % 50 == 20) load_shared<float>(0);
  };
  line(64, fails, 200);
}

// Random reads and writes between random barriers: a race is reported if and only if two of them conflict, by
// comparing all pairs.
struct Accesses {
  static constexpr int kThreads = 64;
  enum Kind { read, write, warp_barrier, block_barrier };
  struct Step {
    Kind kind;
    int thread, place;  // of a barrier of a warp: any thread of it
  };
  using Params = std::vector<Step>;

  static void run(const Params& steps) {
    const int t = thread_index();
    for (const Step& step : steps) {
      const uint32_t address = shared_base() + 2 * step.place;
      if (step.kind == block_barrier) sync_threads();
      if (step.kind == warp_barrier && step.thread / 32 == t / 32) sync_warp();
      if (step.kind == read && step.thread == t) load_shared<uint16_t>(address);
      if (step.kind == write && step.thread == t) store_shared<uint16_t>(address, 1);
    }
  }

  static bool races(const Params& steps) {
    for (size_t j = 0; j < steps.size(); ++j) {
      if (steps[j].kind > write) continue;
      bool block_ordered = false, warp_ordered = false;
      for (size_t i = j; i-- > 0;) {
        const bool same_warp = steps[i].thread / 32 == steps[j].thread / 32;
        if (steps[i].kind == block_barrier) block_ordered = true;
        if (steps[i].kind == warp_barrier && same_warp) warp_ordered = true;
        if (steps[i].kind > write || steps[i].place != steps[j].place) continue;
        if (steps[i].thread == steps[j].thread || (steps[i].kind == read && steps[j].kind == read)) continue;
        if (!block_ordered && !(same_warp && warp_ordered)) return true;
      }
    }
    return false;
  }
};

static void random_races() {
  int with = 0, without = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    const int threads[] = {1, 2, 3, 33, 34};  // few, so that they collide
    Accesses::Params steps(4 + random_below(14));
    for (auto& step : steps) {
      const int kind = random_below(10);
      step.kind = kind < 4   ? Accesses::read
                  : kind < 6 ? Accesses::write
                  : kind < 9 ? Accesses::warp_barrier
                             : Accesses::block_barrier;
      step.thread = threads[random_below(5)];
      step.place = random_below(2);
    }
    emulation::options.reverse = trial % 2 != 0;
    std::string error;
    try {
      launch<Accesses>(1, 4, steps, nullptr);
    } catch (const std::runtime_error& e) {
      error = e.what();
    }
    const bool raced = error.find(": race: ") != std::string::npos;
    require(error.empty() || raced, error);
    require(raced == Accesses::races(steps), raced ? "false alarm: " + error : "a race is missed");
    ++(raced ? with : without);
  }
  require(with > 500 && without > 500, "too few of one kind");
}

// tests/test_cuda_emulation.py knows what is counted.
static void banks() {
  line(4096, [] {
    const auto at = [](int bytes_apart) {
      return shared_base() + static_cast<uint32_t>(bytes_apart * lane());
    };
    store_shared(at(4), 1.0f);
    sync_warp();
    store_shared(at(128), 1.0f);
    sync_warp();
    load_shared<float>(at(0));
    if (lane() < 16) load_shared<float>(at(8));
    load_shared<uint16_t>(at(2));
    load_shared<float2>(at(8));
    load_shared<float2>(at(16));
    load_shared<float4>(at(16));
    load_shared<float4>(at(32));
    for (int n = 0; n <= lane(); ++n) load_shared<float>(at(64));
    uint32_t r[4];
    load_matrix_x4(r, at(16));
    load_matrix_x4(r, at(128));
  });
}

static void global_faults(const std::string& which) {
  // Apart, so that what lies behind one is not the other.
  alignas(16) static float memory[256];
  float *x = memory + 32, *out = memory + 128;
  if (which != "nothing_registered") {
    emulation::global_memory.add_readable("x", x, 32 * sizeof(float));
    emulation::global_memory.add_writable("out", out, 32 * sizeof(float));
  }
  if (which == "read_out_of_bounds") line(0, [x] { load_global(x + 1 + lane()); });
  if (which == "partly_out_of_bounds") {
    emulation::global_memory.clear();
    emulation::global_memory.add_readable("x", x, 31 * sizeof(float));
    line(0, [x] { load_global(reinterpret_cast<float4*>(x) + lane() % 8); });
  }
  if (which == "write_out_of_bounds") line(0, [out] { store_global(out - 1 + lane(), 1.0f); });
  if (which == "early") line(0, [x] { load_global(x + lane()); }, 1, true);
  if (which == "early_write")
    line(
        0,
        [out] {
          if (lane() != 5) await_previous();
          store_global(out + lane(), 1.0f);
        },
        1, true);
  if (which == "early_but_waits")
    line(
        0,
        [x, out] {
          await_previous();
          release_next();
          store_global(out + lane(), load_written(x + lane()));
        },
        1, true);
  if (which == "write_read_only") line(0, [x] { store_global(x + lane(), 1.0f); });
  if (which == "misaligned") line(0, [x] { load_global(reinterpret_cast<float2*>(x + lane())); });
  if (which == "nothing_registered") line(0, [x] { load_global(x + lane()); });
  if (which == "copy_out_of_bounds" || which == "copy_not_valid")
    line(512, [x, valid = which == "copy_out_of_bounds"] {
      copy_async_16(shared_base() + 16 * lane(), x + 4 * lane(), valid || lane() < 8);
      commit_copies();
      wait_copies<0>();
    });
  if (which == "copy_misaligned")
    line(512, [x] {
      copy_async_16(shared_base() + 16 * lane(), x + 2 * lane(), false);
      commit_copies();
      wait_copies<0>();
    });
  emulation::options.track_global_writes = true;
  if (which == "written_twice") line(0, [out] { store_global(out + lane() % 31, 1.0f); });
  if (which == "written_by_two_blocks") line(0, [out] { store_global(out + lane(), 1.0f); }, 2);
  if (which == "read_after_write")
    line(0, [out] {
      store_global(out + lane(), 1.0f);
      store_global(out + lane(), load_global(out + lane()));
    });
}

static void shared_faults(const std::string& which) {
  const uint32_t address = shared_base();
  if (which == "out_of_bounds") line(124, [=] { store_shared(address + 4 * lane(), 1.0f); });
  if (which == "partly_out_of_bounds") line(122, [=] { load_shared<float>(address + 4 * lane()); });
  if (which == "before_the_start") line(128, [=] { load_shared<float>(address - 4); });
  if (which == "without_base") line(128, [=] { load_shared<float>(4 * lane()); });
  if (which == "misaligned") line(1024, [=] { load_shared<float2>(address + 4 * lane()); });
  if (which == "matrix_misaligned")
    line(1024, [=] {
      uint32_t r[4];
      load_matrix_x4(r, address + 24 * lane());
    });
  if (which == "matrix_out_of_bounds")
    line(16 * 17, [=] {
      uint32_t r[4];
      load_matrix_x4(r, address + 16 * lane());
    });
  alignas(16) static const float x[128] = {};
  if (which == "copy_out_of_bounds") {
    emulation::global_memory.add_readable("x", x, sizeof(x));
    line(480, [=] {
      copy_async_16(address + 16 * lane(), x + 4 * lane(), true);
      commit_copies();
      wait_copies<0>();
    });
  }
  if (which == "write_to_pending") {
    emulation::global_memory.add_readable("x", x, sizeof(x));
    line(512, [=] {
      copy_async_16(address + 16 * lane(), x + 4 * lane(), true);
      commit_copies();
      store_shared(address + 16 * lane(), 1.0f);
    });
  }
  if (which == "too_much") line(228 * 1024, [] {});
}

static void collective_faults(const std::string& which) {
  if (which == "two_collectives") line(0, [] { lane() == 7 ? any(true) : (shuffle_xor(1.0f, 1), true); });
  if (which == "collective_and_end")
    line(0, [] {
      if (lane() != 7) any(true);
    });
  if (which == "end_and_collective")
    line(0, [] {
      if (lane() != 0) any(true);
    });
  if (which == "not_uniform") line(0, [] { uniform(lane()); });
  if (which == "exception") line(0, [] { throw std::runtime_error("thrown by the kernel"); });
}

// A tensor as a call's memory is told of it.
struct FakeTensor {
  std::vector<float>& values;
  bool contiguous = true;

  int64_t numel() const { return static_cast<int64_t>(values.size()); }
  int64_t dim() const { return 1; }
  int64_t size(int64_t) const { return numel(); }
  int64_t stride(int64_t) const { return 1; }
  size_t element_size() const { return sizeof(float); }
  void* data_ptr() const { return values.data(); }
  bool is_contiguous() const { return contiguous; }
};
enum class Use { operand, result };

static void calls(const std::string& which) {
  std::vector<float> q(32, 1), out(32, 2), strided(32, 3);
  emulation::Memory memory;
  memory.add(FakeTensor{q}, "q", Use::operand);
  memory.add(FakeTensor{out}, "out", Use::result);
  memory.add(FakeTensor{strided, false}, "strided", Use::result);
  float *from = q.data(), *to = out.data();
  if (which == "results")
    require(q[31] == 1 && std::isnan(out[0]) && std::isnan(out[31]) && strided[31] == 3, "what is there");
  if (which == "operand_written") line(0, [from] { store_global(from + lane(), 1.0f); });
  if (which == "written_twice") line(0, [to] { store_global(to + lane() % 31, 1.0f); });
  if (which == "beyond_a_part") {
    txl::Problem p{};
    p.B = 1, p.H = 2, p.L = p.K = 70, p.N = 70, p.D = 64, p.r_zero = 69;
    p.set_reach(true, -1, -1);
    txl::Backward t{};
    t.du.data = t.dv_bias.data = to;
    std::vector<float> floats(static_cast<size_t>(Workspace(p, t, 2, 64, 1 << 20, nullptr).floats));
    const Workspace w(p, t, 2, 64, 1 << 20, floats.data());
    float* const end = w.du_parts + 2 * 3 * 64;  // of two heads of three blocks of 32 keys
    line(0, [end] { store_global(end - 31 + lane(), 1.0f); });
  }
}

static void run_case(const std::string& name) {
  const size_t dot = name.find('.');
  const std::string group = name.substr(0, dot), which = dot == std::string::npos ? "" : name.substr(dot + 1);
  if (group == "call") return calls(which);
  if (group == "global") return global_faults(which);
  if (group == "shared") return shared_faults(which);
  if (group == "collective") return collective_faults(which);
  const struct {
    const char* name;
    void (*run)();
  } cases[] = {
      {"product_bf16", product<bf16, false>},
      {"product_f16", product<f16, false>},
      {"product_f32", product_f32},
      {"product_trans_bf16", product<bf16, true>},
      {"product_trans_f16", product<f16, true>},
      {"product_wrong_index", product<bf16, false, Fault::wrong_index>},
      {"product_wrong_index_f32", product<f32, false, Fault::wrong_index>},
      {"product_cut_off", product_cut_off},
      {"product_not_tf32", product_not_tf32},
      {"product_no_barrier", product<f16, false, Fault::no_barrier>},
      {"shuffles", shuffles},
      {"pipeline", [] { pipeline(); }},
      {"pipeline_no_wait", [] { pipeline<Fault::no_wait>(); }},
      {"pipeline_late_wait", [] { pipeline<Fault::late_wait>(); }},
      {"pipeline_no_barrier", [] { pipeline<Fault::no_barrier>(); }},
      {"pipeline_only_sync_warp", [] { pipeline<Fault::only_sync_warp>(); }},
      {"pipeline_reuse", [] { pipeline<Fault::reuse>(); }},
      {"pipeline_pending_at_end", [] { pipeline<Fault::pending_at_end>(); }},
      {"warpgroup_bf16", warpgroup_products<bf16>},
      {"warpgroup_f16", warpgroup_products<f16>},
      {"warpgroup_no_fence", warpgroup_fault<Fault::no_fence>},
      {"warpgroup_early_fence", warpgroup_fault<Fault::early_fence>},
      {"warpgroup_late_fence", warpgroup_fault<Fault::late_fence>},
      {"warpgroup_no_barrier", warpgroup_fault<Fault::no_barrier>},
      {"warpgroup_no_begin", warpgroup_fault<Fault::no_begin>},
      {"warpgroup_no_commit", warpgroup_fault<Fault::no_commit>},
      {"warpgroup_no_wait", warpgroup_fault<Fault::no_wait>},
      {"warpgroup_pending_at_end", warpgroup_fault<Fault::pending_at_end>},
      {"warpgroup_one_warp_less", warpgroup_fault<Fault::one_warp_less>},
      {"warpgroup_one_warp_late", warpgroup_fault<Fault::one_warp_late>},
      {"warpgroup_overwrite", warpgroup_fault<Fault::overwrite>},
      {"warpgroup_overwrite_between_barriers", warpgroup_fault<Fault::overwrite_between_barriers>},
      {"warpgroup_overwrite_left", warpgroup_fault<Fault::overwrite_left, true>},
      {"warpgroup_no_fence_left", warpgroup_fault<Fault::no_fence, true>},
      {"warpgroup_wrong_index_left", warpgroup_fault<Fault::wrong_index, true>},
      {"warpgroup_no_swizzle", warpgroup_fault<Fault::no_swizzle>},
      {"warpgroup_wrong_index", warpgroup_fault<Fault::wrong_index>},
      {"warpgroup_unaligned", warpgroup_fault<Fault::unaligned>},
      {"boxes", boxes<>},
      {"boxes_of_heads", boxes<Fault::none, 8>},
      {"boxes_of_what", what_has_boxes},
      {"boxes_no_mbarrier", boxes<Fault::no_mbarrier>},
      {"boxes_no_fence", boxes<Fault::no_fence>},
      {"boxes_no_barrier", boxes<Fault::no_barrier>},
      {"boxes_no_arrival", boxes<Fault::no_arrival>},
      {"boxes_two_arrivals", boxes<Fault::two_arrivals>},
      {"boxes_overwritten", boxes<Fault::overwritten>},
      {"boxes_no_wait", boxes<Fault::no_wait>},
      {"boxes_wrong_parity", boxes<Fault::wrong_parity>},
      {"boxes_only_wait", boxes<Fault::only_wait>},
      {"boxes_product_without_barrier", boxes<Fault::product_without_barrier>},
      {"boxes_read_without_fence", boxes<Fault::read_without_fence>},
      {"boxes_reuse", boxes<Fault::reuse>},
      {"boxes_pending_at_end", boxes<Fault::pending_at_end>},
      {"boxes_unaligned", boxes<Fault::unaligned>},
      {"boxes_out_of_bounds", boxes<Fault::out_of_bounds>},
      {"stored_boxes", stored_boxes<>},
      {"stored_boxes_no_fence", stored_boxes<Fault::no_fence>},
      {"stored_boxes_one_lane_no_fence", stored_boxes<Fault::one_lane_no_fence>},
      {"stored_boxes_late_fence", stored_boxes<Fault::late_fence>},
      {"stored_boxes_no_barrier", stored_boxes<Fault::no_barrier>},
      {"stored_boxes_write_before_wait", stored_boxes<Fault::write_before_wait>},
      {"stored_boxes_no_barrier_after_wait", stored_boxes<Fault::no_barrier_after_wait>},
      {"stored_boxes_pending_at_end", stored_boxes<Fault::pending_at_end>},
      {"stored_boxes_no_swizzle", stored_boxes<Fault::no_swizzle>},
      {"stored_boxes_wrong_index", stored_boxes<Fault::wrong_index>},
      {"stored_boxes_unaligned", stored_boxes<Fault::unaligned>},
      {"stored_boxes_out_of_bounds", stored_boxes<Fault::out_of_bounds>},
      {"exchange_warp", exchange<1>},
      {"exchange_warp_no_barrier", exchange<1, Fault::no_barrier>},
      {"exchange_warp_reuse", exchange<1, Fault::reuse>},
      {"exchange_block", exchange<32>},
      {"exchange_block_no_barrier", exchange<32, Fault::no_barrier>},
      {"exchange_block_only_sync_warp", exchange<32, Fault::only_sync_warp>},
      {"exchange_block_reuse", exchange<32, Fault::reuse>},
      {"meeting", meeting<Fault::none>},
      {"meeting_one_warp_only", meeting<Fault::one_warp_only>},
      {"meeting_some_lanes_only", meeting<Fault::some_lanes_only>},
      {"meeting_ends_early", meeting<Fault::ends_early>},
      {"uninitialised", uninitialised},
      {"conversions", conversions},
      {"convert", convert},
      {"same_in_any_order", same_in_any_order},
      {"first_failing_block", first_failing_block},
      {"random_races", random_races},
      {"banks", banks},
  };
  for (const auto& c : cases)
    if (name == c.name) return c.run();
  throw std::runtime_error("no such case");
}

int main(int count, char** arguments) {
  try {
    run_case(count > 1 ? arguments[1] : "");
  } catch (const std::exception& e) {
    printf("%s\n", e.what());
    return 1;
  }
  return 0;
}

#endif
