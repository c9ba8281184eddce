// The kernels by warpgroups, and decode by programmatic dependent launch, for sm_90a alone, of one element
// type and class of head dimensions: TXL_ELEMENT (bf16, f16), TXL_HEAD (64, 128).
#include "backward.h"
#include "forward.h"
#include "warpgroup_block.h"
#include "warpgroup_key_block.h"
#include "warpgroup_row_block.h"
#include "warpgroup_slope_block.h"

namespace txl::cuda {

template <typename E, int kHead>
int WarpgroupKernels<E, kHead>::forward(const ForwardParams<Forward>& params, void* stream) {
  const Problem& p = params.p;
  ForwardParams<BoxedForward> x{p,
                                {params.t, {}, {}, {}, false},
                                params.dropout_seed,
                                params.scale,
                                params.splits,
                                params.split_keys,
                                params.parts,
                                params.heads_together};
  const auto sizes = [&](const View& view, int64_t batch, int64_t rows) -> BoxedSizes {
    constexpr int64_t kBytes = sizeof(E);
    return {{batch, p.H, rows, p.D}, {view.batch * kBytes, view.head * kBytes, view.row * kBytes}};
  };
  const BoxedSizes k = sizes(x.t.k, p.B, p.K), v = sizes(x.t.v, p.B, p.K), r = sizes(x.t.r, 1, p.N);
  x.t.boxes = x.t.k.wide && x.t.v.wide && x.t.r.wide && has_boxes(k) && has_boxes(v) && has_boxes(r);
  if (x.t.boxes) {
    int error = bind_context();
    if (!error) error = make_tensor_map(x.t.k_map, x.t.k.data, k);
    if (!error) error = make_tensor_map(x.t.v_map, x.t.v.data, v);
    if (!error) error = make_tensor_map(x.t.r_map, x.t.r.data, r);
    if (error) return error;
  }
  return launch_with_dropout<WarpgroupBlock<E, kHead>>(x, stream);
}

template <typename E, int kHead>
int WarpgroupKernels<E, kHead>::decode(const ForwardParams<Forward>& params, void* stream) {
  const int error = launch_block<ForwardBlock<E, kHead, 1, true>>(params, stream);
  return error ? error : launch_merge<E, true>(params, stream);
}

template <typename E, int kHead, bool kDropout>
int WarpgroupBackward<E, kHead, kDropout>::dk_dv(const BackwardParams& params, void* stream) {
  return launch_part<DkDvKernel<WarpgroupKeyBlock<E, kHead>, kDropout>>(params, stream);
}
template <typename E, int kHead, bool kDropout>
int WarpgroupBackward<E, kHead, kDropout>::dq(const BackwardParams& params, void* stream) {
  return launch_part<DqKernel<WarpgroupSlopeBlock<E, kHead>>>(params, stream);
}
template <typename E, int kHead, bool kDropout>
int WarpgroupBackward<E, kHead, kDropout>::dr(const BackwardParams& params, void* stream) {
  return launch_part<DrKernel<WarpgroupRowBlock<E, kHead>>>(params, stream);
}

template struct WarpgroupKernels<TXL_ELEMENT, TXL_HEAD>;
template struct WarpgroupBackward<TXL_ELEMENT, TXL_HEAD, false>;
template struct WarpgroupBackward<TXL_ELEMENT, TXL_HEAD, true>;

}  // namespace txl::cuda
