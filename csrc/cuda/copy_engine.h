// The copy engine (TMA), sm_90a: told by one thread, it copies boxes of a tensor to shared memory, where
// warpgroup_mma reads them as they are (tiles.h: Panels), or from there to a tensor. Under nvcc PTX,
// otherwise the emulation, as device.h.
#pragma once

#include "device.h"

#if defined(__CUDACC__)
#include <cuda.h>
#endif

namespace txl::cuda {

constexpr int kBoxRows = 64;
constexpr uint32_t kBoxBytes = kBoxRows * 128;

// Of a tensor: batch, heads, rows, channels; strides of the first three in bytes. And of its boxes: `rows` of
// the tensor's rows, of each of `heads` heads, and `channels` of each row: 64 rows of 64 channels in all, or
// what store_box stores, 16.
struct BoxedSizes {
  int64_t size[4], stride[3];
  int rows = kBoxRows, heads = 1, channels = 64;
};

// Whether the copy engine can copy from it, if it begins at a multiple of 16 bytes. cuTensorMapEncodeTiled's
// documentation has strides grow from dimension to dimension; drivers take any (FlashAttention-3 has heads
// between rows too). Of rows that overlap nobody says anything. Where there is but one, its stride may be
// anything.
inline bool has_boxes(const BoxedSizes& x) {
  bool has = x.size[3] > 0 && (x.size[2] == 1 || x.stride[2] >= 2 * x.size[3]);
  for (int d = 0; d < 3; ++d) {
    const int64_t stride = x.stride[d];
    has &= x.size[d] == 1 || (x.size[d] > 0 && stride > 0 && stride % 16 == 0 && stride < int64_t{1} << 40);
  }
  return has;
}

#if defined(__CUDACC__)

// An mbarrier is 8 bytes of shared memory, at a multiple of 8. Its phase is over when as many threads have
// arrived as it was made for, and every box has come that was started in it; then the next phase begins.
// Whoever makes it calls fence_async_proxy, and all meet at a barrier before they use it.
TXL_DEVICE void mbarrier_init(uint32_t mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
TXL_DEVICE void mbarrier_arrive(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Waits until the last phase of this parity is over; the first one has parity 0.
TXL_DEVICE void mbarrier_wait(uint32_t mbarrier, uint32_t parity) {
  uint32_t over;
  do {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}"
        : "=r"(over)
        : "r"(mbarrier), "r"(parity)
        : "memory");
  } while (over == 0);
}

// What the copy engine knows of a tensor [batch, heads, rows, channels] of 16 bits, and of the boxes that it
// copies (BoxedSizes). A kernel's parameter.
using TensorMap = CUtensorMap;

// Whether this is the one thread that tells the engine what to do, always the same; the threads of a warp
// come here together. Of what is told by any one thread, the compiler does not know that there is only one:
// it makes a loop over them. first_warp: is_first_warp(), asked once.
TXL_DEVICE bool elected(bool first_warp) {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return first_warp & (elected != 0);
}

// Starts to copy a box to an address that is a multiple of 1,024: rows of 128 bytes, in which the pieces of
// 16 bytes have changed places by their row's number modulo 8; zeros outside of the tensor. What anything but
// this has written there before, or anything but warpgroup_mma has read, it has before a fence_async_proxy
// and a barrier.
TXL_DEVICE void copy_box(uint32_t shared, const TensorMap& map, int channel, int row, int head, int batch,
                         uint32_t mbarrier) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "n"(kBoxBytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(channel), "r"(row), "r"(head), "r"(batch), "r"(mbarrier)
      : "memory");
}

// Starts to copy a box of 16 channels from shared memory, from a multiple of 256, to the tensor: rows of 32
// bytes, whose halves have changed places in every second four rows; what lies outside of the tensor is left
// out. The threads of a warp come here together, and all of its boxes are one thread's, without a branch.
// What is read has been written before a fence_async_proxy by the thread that wrote it, and a barrier.
TXL_DEVICE void store_box(const TensorMap& map, int channel, int row, int head, int batch, uint32_t shared) {
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "}" ::"l"(reinterpret_cast<uint64_t>(&map)),
      "r"(channel), "r"(row), "r"(head), "r"(batch), "r"(shared)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the engine has read all boxes that the thread has stored: then, after a barrier, others may write
// there, and the block may end.
TXL_DEVICE void wait_stored() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

#if !defined(__CUDACC_RTC__)  // which has no host
// The driver's functions want what the runtime's see to themselves: that the thread has a context. One that
// torch's autograd or Python has just made may have none. Returns a cudaError_t.
inline int bind_context() {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  return taken(error != cudaSuccess ? error : cudaSetDevice(device));
}

// Of a tensor that has_boxes, on a thread that has a context. Returns a cudaError_t.
inline int make_tensor_map(TensorMap& map, const void* data, const BoxedSizes& x) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = taken(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                                     cudaEnableDefault, &result));
#else
    const cudaError_t error =
        taken(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
    const bool known = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return known ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found) : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t sizes[4], strides[3];  // the last dimension first
  for (int d = 0; d < 4; ++d) sizes[d] = static_cast<cuuint64_t>(x.size[3 - d]);
  // Where there is but one, as if others followed without a gap.
  cuuint64_t extent = (sizes[0] * 2 + 15) / 16 * 16;
  for (int d = 0; d < 3; ++d) {
    strides[d] = sizes[d + 1] == 1 ? extent : static_cast<cuuint64_t>(x.stride[2 - d]);
    extent = sizes[d + 1] * strides[d];
  }
  const auto number = [](int n) { return static_cast<cuuint32_t>(n); };
  const cuuint32_t box[4] = {number(x.channels), number(x.rows), number(x.heads), 1}, every[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle =
      x.channels == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(data), sizes,
                                 strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(result);  // the same numbers
}
#endif

#else

using emulation::copy_box;
using emulation::elected;
using emulation::mbarrier_arrive;
using emulation::mbarrier_init;
using emulation::mbarrier_wait;
using emulation::store_box;
using emulation::TensorMap;
using emulation::wait_stored;

inline int bind_context() { return 0; }

inline int make_tensor_map(TensorMap& map, const void* data, const BoxedSizes& x) {
  if (!has_boxes(x) || reinterpret_cast<uintptr_t>(data) % 16 != 0) return 1;
  map.data = static_cast<unsigned char*>(const_cast<void*>(data));
  for (int d = 0; d < 4; ++d) map.size[d] = x.size[d];
  for (int d = 0; d < 3; ++d) map.stride[d] = x.stride[d];
  const auto number = [](int n) { return static_cast<uint32_t>(n); };
  map.box_rows = number(x.rows), map.box_heads = number(x.heads), map.box_channels = number(x.channels);
  return 0;
}

#endif

TXL_DEVICE bool is_first_warp() { return uniform(warp()) == 0; }

// `count` mbarriers, one behind the other, for one arrival each. All meet at a barrier before they use them.
TXL_DEVICE void make_mbarriers(uint32_t first, int count, bool first_warp) {
  if (elected(first_warp)) {
    TXL_UNROLL_GPU
    for (int n = 0; n < count; ++n) mbarrier_init(first + static_cast<uint32_t>(n) * 8, 1);
  }
  fence_async_proxy();
}

// copies(), by the one thread that tells the engine, of boxes that the mbarrier's phase is to wait for. It
// arrives last: the phase may not end before all of them are counted.
template <typename F>
TXL_DEVICE void tell_engine(bool first_warp, uint32_t mbarrier, F copies) {
  if (!elected(first_warp)) return;
  copies();
  mbarrier_arrive(mbarrier);
}

// Boxes that fill a tile of Panels (tiles.h): all its channels. By the one thread that tells the engine.
template <typename Tile>
TXL_DEVICE void copy_panels(Tile to, const TensorMap& map, int row, int head, int batch, uint32_t mbarrier) {
  constexpr int kChannels = Tile::kChannelsOfPanel;
  TXL_UNROLL_GPU
  for (int n = 0; n < Tile::kHead / kChannels; ++n)
    copy_box(to.at(0, n * kChannels), map, n * kChannels, row, head, batch, mbarrier);
}

}  // namespace txl::cuda
