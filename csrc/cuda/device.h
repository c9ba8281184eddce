// What a kernel needs from the machine, sm_80 and later: under nvcc PTX, otherwise the emulation, so that one
// kernel source runs on the GPU and, slowly but checked, on a host without one. The host compiler finds
// emulation.h by -I tests/cuda_emulation.
//
// A kernel is a struct; blocks and grids have one dimension, shared memory is dynamic only:
//
//   struct Kernel {
//     struct Params { ... };                     // pointers, sizes
//     static constexpr int kThreads = 128;       // of a block, a multiple of 32
//     static TXL_DEVICE void run(const Params&);
//   };
//   launch<Kernel>(blocks, shared_bytes, params, stream);
//
// Programmatic dependent launch: launch<Kernel>(..., pdl = true), of code that was compiled for sm_90 or
// later, may begin while the kernel before it in the stream still runs, once all of that one's blocks have
// called release_next() or ended. Kernel has to call await_previous() before it touches global memory, and to
// read by load_written what the other wrote.
//
// Kernels live in this namespace: float2 and its like are then the same name for both compilers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define TXL_DEVICE __device__ __forceinline__
#define TXL_UNROLL_GPU _Pragma("unroll")
#else
#include "emulation.h"
#define TXL_DEVICE inline __attribute__((always_inline))  // see TXL_COLLECTIVE
#define TXL_UNROLL_GPU                                    // nothing to gain
#endif

namespace txl::cuda {

// The elements. Those of 16 bits, as bits: storage, and the tag that names an instruction's element type.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
using f32 = float;
template <typename E>
constexpr bool is_bf16 = std::is_same_v<E, bf16>;
template <typename E>
constexpr bool is_half = is_bf16<E> || std::is_same_v<E, f16>;

template <typename To, typename From>
TXL_DEVICE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

// How many blocks of a kernel a multiprocessor has to have room for. 0: the compiler chooses, and may spill
// for one more.
template <class K>
constexpr int kLeastBlocks = 0;

#if defined(__CUDACC__)

using ::float2;
using ::float4;
using ::uint2;
using ::uint4;

TXL_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
TXL_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }

TXL_DEVICE void sync_threads() { __syncthreads(); }
TXL_DEVICE void sync_warp() { __syncwarp(); }  // orders memory within the warp; shuffles and votes do not

// Of programmatic dependent launch; without it they do nothing. Until the kernel before has ended and what it
// wrote can be read; and: the kernel behind may begin.
TXL_DEVICE void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TXL_DEVICE void release_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All 32 lanes take part. T: float, int32_t, uint32_t.
template <typename T>
TXL_DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
// x, which is the same in all lanes: so the compiler knows.
TXL_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
TXL_DEVICE bool any(bool x) { return __any_sync(0xffffffffu, x) != 0; }

// Shared memory is addressed in PTX's shared space: 32-bit byte addresses, not pointers. A multiple of 128.
TXL_DEVICE uint32_t shared_base() {
  extern __shared__ __align__(128) unsigned char txl_shared_memory[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(txl_shared_memory));
}

// T of 2, 4, 8 or 16 bytes; address a multiple of its size. Every access to memory clobbers "memory", or the
// compiler could move it over a barrier.
template <typename T>
TXL_DEVICE T load_shared(uint32_t address) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8, 16 bytes");
  if constexpr (sizeof(T) == 2) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return bits<T>(x);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return bits<T>(x);
  } else if constexpr (sizeof(T) == 8) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return bits<T>(x);
  } else {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return bits<T>(x);
  }
}

template <typename T>
TXL_DEVICE void store_shared(uint32_t address, T value) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8, 16 bytes");
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(bits<uint16_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(bits<uint32_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const uint2 x = bits<uint2>(value);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
  } else {
    const uint4 x = bits<uint4>(value);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
  }
}

// 8x8 matrices of 16-bit elements, one per register. Lane 8 i + j gives the address of row j of matrix i
// (16 bytes, a multiple of 16); lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, the first
// in the lower half; _trans: those elements of column l / 4. Of x2, lanes 0 to 15 give the addresses.
TXL_DEVICE void load_matrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
TXL_DEVICE void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
TXL_DEVICE void load_matrix_x2(uint32_t (&r)[2], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row_address)
               : "memory");
}

// Writes what load_matrix_x4_trans would read: sm_90.
TXL_DEVICE void store_matrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Of such a matrix, from the lane's two elements of a row, those of the column.
TXL_DEVICE uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d[16, 8] += a[16, 16] b[16, 8]. With g = lane / 4, t = lane % 4 the lane holds
//   d[i]: row g + 8 (i / 2), column 2 t + i % 2
//   a[i]: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next
//   b[i]: rows 2 t + 8 i and the next, column g
template <typename E>
TXL_DEVICE void mma_half(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(is_half<E>, "bf16 or f16");
  if constexpr (is_bf16<E>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// ---- Warpgroups: sm_90a ----
//
// Four neighbouring warps, the first a multiple of four, together. Before a product, every thread that wrote
// what it reads from shared memory has called fence_async_proxy (copy_engine.h's copies need none), then all
// have met at a barrier.
TXL_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// After the last write of registers that the next products read or add to.
TXL_DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products since the last commit become one group.
TXL_DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most n groups, the last ones, are unfinished.
template <int n>
TXL_DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// Starts d[64, 8 kTiles] = a[64, 16] b[16, 8 kTiles], kAdd: += of it. Each warp has 16 rows of d and of a, in
// the places of mma_half; until the product has been waited for, both are the tensor cores': nothing may
// write them, and nothing read d. Backward does read a meanwhile, which tensor cores only read, too: PTX ISA
// leaves it undefined, on an H200 results were right. b is read from shared memory, from where a descriptor
// says (tiles.h: Panels); kTransposed: it lies there by rows.
#define TXL_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define TXL_D4(n) TXL_D(n), TXL_D(n + 1), TXL_D(n + 2), TXL_D(n + 3)
#define TXL_D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TXL_D32 TXL_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TXL_D64                                                                             \
  TXL_D32                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TXL_WGMMA(columns, type) "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " "
#define TXL_OF_ELEMENT(product) \
  {                             \
    if constexpr (is_bf16<E>)   \
      product("bf16");          \
    else                        \
      product("f16");           \
  }
template <typename E, bool kTransposed, bool kAdd, int kTiles>
TXL_DEVICE void warpgroup_mma(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(is_half<E> && (kTiles == 1 || kTiles == 8 || kTiles == 16),
                "bf16 or f16; 8, 64, 128 columns");
#define TXL_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd), "n"(kTransposed)
#define TXL_WGMMA_8(type)                                                                    \
  asm volatile(TXL_WGMMA("8", type) "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, %9, 1, 1, %10;" \
               : TXL_D(0)                                                                    \
               : TXL_A)
#define TXL_WGMMA_64(type)                                                                   \
  asm volatile(TXL_WGMMA("64", type) TXL_D32 "}, {%32, %33, %34, %35}, %36, %37, 1, 1, %38;" \
               : TXL_D4(0), TXL_D4(4)                                                        \
               : TXL_A)
#define TXL_WGMMA_128(type)                                                                   \
  asm volatile(TXL_WGMMA("128", type) TXL_D64 "}, {%64, %65, %66, %67}, %68, %69, 1, 1, %70;" \
               : TXL_D4(0), TXL_D4(4), TXL_D4(8), TXL_D4(12)                                  \
               : TXL_A)
  if constexpr (kTiles == 1)
    TXL_OF_ELEMENT(TXL_WGMMA_8)
  else if constexpr (kTiles == 8)
    TXL_OF_ELEMENT(TXL_WGMMA_64)
  else
    TXL_OF_ELEMENT(TXL_WGMMA_128)
#undef TXL_A
#undef TXL_WGMMA_8
#undef TXL_WGMMA_64
#undef TXL_WGMMA_128
}
// The same, but a lies in shared memory, too, as b does if it is not transposed.
template <typename E, bool kAdd, int kTiles>
TXL_DEVICE void warpgroup_mma(float (&d)[kTiles][4], uint64_t a, uint64_t b) {
  static_assert(is_half<E> && (kTiles == 4 || kTiles == 8), "bf16 or f16; 32 or 64 columns");
#define TXL_A "l"(a), "l"(b), "n"(kAdd)
#define TXL_WGMMA_32(type) \
  asm volatile(TXL_WGMMA("32", type) TXL_D16 "}, %16, %17, %18, 1, 1, 0, 0;" : TXL_D4(0) : TXL_A)
#define TXL_WGMMA_64(type) \
  asm volatile(TXL_WGMMA("64", type) TXL_D32 "}, %32, %33, %34, 1, 1, 0, 0;" : TXL_D4(0), TXL_D4(4) : TXL_A)
  if constexpr (kTiles == 4)
    TXL_OF_ELEMENT(TXL_WGMMA_32)
  else
    TXL_OF_ELEMENT(TXL_WGMMA_64)
#undef TXL_A
#undef TXL_WGMMA_32
#undef TXL_WGMMA_64
}
#undef TXL_D
#undef TXL_D4
#undef TXL_D16
#undef TXL_D32
#undef TXL_D64
#undef TXL_WGMMA
#undef TXL_OF_ELEMENT

// The nearest number of 10 explicit bits (ties away from zero): a float32, whose lower 13 bits are 0.
TXL_DEVICE uint32_t tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// d[16, 8] += a[16, 8] b[8, 8] of tf32. As above, but
//   a[i]: row g + 8 (i % 2), column t + 4 (i / 2)
//   b[i]: row t + 4 i, column g
TXL_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Starts a copy of 16 bytes, both addresses multiples of 16; zeros where not valid, and the global address
// is then not read. What was copied is there for the copying thread after wait_copies, for other threads
// after a barrier that follows it.
TXL_DEVICE void copy_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}
// The thread's copies since its last commit become one group, even if there are none.
TXL_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most n of the thread's groups, the last ones, are unfinished.
template <int n>
TXL_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

// T of 2, 4, 8 or 16 bytes, p a multiple of its size. load_global takes the read-only path: nothing may write
// there while the kernel runs.
template <typename T>
TXL_DEVICE T load_global(const T* p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8, 16 bytes");
  if constexpr (sizeof(T) == 2) {
    return bits<T>(__ldg(reinterpret_cast<const unsigned short*>(p)));
  } else if constexpr (sizeof(T) == 4) {
    return bits<T>(__ldg(reinterpret_cast<const unsigned int*>(p)));
  } else if constexpr (sizeof(T) == 8) {
    return bits<T>(__ldg(reinterpret_cast<const uint2*>(p)));
  } else {
    return bits<T>(__ldg(reinterpret_cast<const uint4*>(p)));
  }
}

// The same of what this thread, and no other, writes later, or of what the kernel before wrote
// (await_previous).
template <typename T>
TXL_DEVICE T load_written(const T* p) {
  return *p;
}

template <typename T>
TXL_DEVICE void store_global(T* p, T value) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "2, 4, 8, 16 bytes");
  const size_t address = __cvta_generic_to_global(p);
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(bits<uint16_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(bits<uint32_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const uint2 x = bits<uint2>(value);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(x.x), "r"(x.y) : "memory");
  } else {
    const uint4 x = bits<uint4>(value);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
  }
}

// Rounds to nearest even; overflow to infinity; NaN stays NaN.
template <typename E>
TXL_DEVICE E half_from_float(float x) {
  static_assert(is_half<E>, "bf16 or f16");
  E y;
  if constexpr (is_bf16<E>) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  }
  return y;
}

// Two elements in a register, lo in the lower half, as mma takes them.
template <typename E>
TXL_DEVICE uint32_t pack(float lo, float hi) {
  static_assert(is_half<E>, "bf16 or f16");
  uint32_t y;
  if constexpr (is_bf16<E>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  }
  return y;
}

TXL_DEVICE float to_float(bf16 x) { return bits<float>(static_cast<uint32_t>(x.bits) << 16); }
TXL_DEVICE float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// To some two units in the last place; results below the normal numbers are 0. exp2_fast(-inf) = 0.
TXL_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Rounded once.
TXL_DEVICE float multiply_add(float x, float y, float z) { return __fmaf_rn(x, y, z); }
// NaN stays NaN.
TXL_DEVICE float at_most_0(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}
// log2_fast(0) = -inf, and so for what is below the normal numbers.
TXL_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class K>
__global__ void __launch_bounds__(K::kThreads, kLeastBlocks<K>)
    entry(const __grid_constant__ typename K::Params p) {
  K::run(p);
}

#if !defined(__CUDACC_RTC__)  // which has no host
// An error of the runtime, which would keep it otherwise, and report it of a later call.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}
#endif

// No blocks, no launch. On a host without CUDA: runs the emulation, returns 0 or throws std::runtime_error.
template <class K>
cudaError_t launch(int64_t blocks, uint32_t shared_bytes, const typename K::Params& p, void* stream,
                   bool pdl = false) {
  static_assert(K::kThreads % 32 == 0 && K::kThreads <= 1024, "whole warps");
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = taken(cudaFuncSetAttribute(
        entry<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = K::kThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = pdl ? 1 : 0;
  return taken(cudaLaunchKernelEx(&config, entry<K>, p));
}

// The host's, of memory that kernels pass on to others: some `bytes` from p on, and gaps in between.
// Emulated, kernels may touch these, and not the gaps, and read what was written alone.
constexpr int64_t kGapBytes = 0;
inline void passed_on(const char* /*name*/, void* /*p*/, int64_t /*bytes*/) {}

#else  // the same on the host; what each function means is said above

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

using emulation::any;
using emulation::await_previous;
using emulation::block_index;
using emulation::commit_copies;
using emulation::copy_async_16;
using emulation::exp2_fast;
using emulation::fence_async_proxy;
using emulation::load_global;
using emulation::load_shared;
using emulation::log2_fast;
using emulation::mma_tf32;
using emulation::release_next;
using emulation::shared_base;
using emulation::shuffle_xor;
using emulation::store_global;
using emulation::store_matrix_x4_trans;
using emulation::store_shared;
using emulation::sync_threads;
using emulation::sync_warp;
using emulation::tf32;
using emulation::thread_index;
using emulation::transpose_matrix;
using emulation::uniform;
using emulation::wait_copies;
using emulation::warpgroup_begin;
using emulation::warpgroup_commit;
using emulation::warpgroup_wait;

template <typename T>
TXL_DEVICE T load_written(const T* p) {
  return load_global(p);
}

TXL_DEVICE void load_matrix_x4(uint32_t (&r)[4], uint32_t row) { emulation::load_matrix<4, false>(r, row); }
TXL_DEVICE void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  emulation::load_matrix<4, true>(r, row);
}
TXL_DEVICE void load_matrix_x2(uint32_t (&r)[2], uint32_t row) { emulation::load_matrix<2, false>(r, row); }

template <typename E>
TXL_DEVICE void mma_half(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(is_half<E>, "bf16 or f16");
  emulation::mma_half<is_bf16<E>>(d, a, b);
}

TXL_DEVICE float multiply_add(float x, float y, float z) { return std::fma(x, y, z); }
TXL_DEVICE float at_most_0(float x) { return x > 0 ? 0.0f : x; }

template <typename E, bool kTransposed, bool kAdd, int kTiles>
TXL_DEVICE void warpgroup_mma(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(is_half<E>, "bf16 or f16");
  emulation::warpgroup_mma<is_bf16<E>, kTransposed, kAdd>(d, a, b);
}
template <typename E, bool kAdd, int kTiles>
TXL_DEVICE void warpgroup_mma(float (&d)[kTiles][4], uint64_t a, uint64_t b) {
  static_assert(is_half<E>, "bf16 or f16");
  emulation::warpgroup_mma<is_bf16<E>, kAdd>(d, a, b);
}

template <typename E>
E half_from_float(float x) {
  static_assert(is_half<E>, "bf16 or f16");
  return E{is_bf16<E> ? emulation::bf16_from_float(x) : emulation::f16_from_float(x)};
}
template <typename E>
uint32_t pack(float lo, float hi) {
  return half_from_float<E>(lo).bits | static_cast<uint32_t>(half_from_float<E>(hi).bits) << 16;
}
inline float to_float(bf16 x) { return emulation::float_from_bf16(x.bits); }
inline float to_float(f16 x) { return emulation::float_from_f16(x.bits); }

constexpr int64_t kGapBytes = 64;
inline void passed_on(const char* name, void* p, int64_t bytes) {
  emulation::global_memory.add_uninitialised(name, p, static_cast<size_t>(bytes));
}

template <class K>
int launch(int64_t blocks, uint32_t shared_bytes, const typename K::Params& p, void* /*stream*/,
           bool pdl = false) {
  static_assert(K::kThreads % 32 == 0 && K::kThreads <= 1024, "whole warps");
  emulation::run([](const void* params) { K::run(*static_cast<const typename K::Params*>(params)); }, &p,
                 typeid(K), K::kThreads, blocks, shared_bytes, pdl);
  return 0;
}

#endif

// Registers of float32, each as the sum of two tf32, to 22 bits. What is not finite is so in `high`.
template <int kWords>
struct Split {
  uint32_t high[kWords], low[kWords];

  TXL_DEVICE explicit Split(const uint32_t (&x)[kWords]) {
    for (int i = 0; i < kWords; ++i) {
      high[i] = tf32(bits<float>(x[i]));
      // As tf32 rounds what is finite, in fewer instructions.
      low[i] = (bits<uint32_t>(bits<float>(x[i]) - bits<float>(high[i])) + 0x1000u) & ~0x1fffu;
    }
  }
};

template <typename E>
TXL_DEVICE E from_float(float x) {
  if constexpr (is_half<E>)
    return half_from_float<E>(x);
  else
    return x;
}
TXL_DEVICE float to_float(f32 x) { return x; }

TXL_DEVICE int lane() { return thread_index() & 31; }  // of the warp
TXL_DEVICE int warp() { return thread_index() >> 5; }  // of the block

}  // namespace txl::cuda
