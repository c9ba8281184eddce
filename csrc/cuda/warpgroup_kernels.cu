// The kernels by warpgroups, and decode by programmatic dependent launch, for sm_90a alone, of one element
// type and class of head dimensions: TXL_ELEMENT (bf16, f16), TXL_HEAD (64, 128).
#include "backward.h"
#include "forward.h"
#include "warpgroup_key_block.h"
#include "warpgroup_query_block.h"
#include "warpgroup_row_block.h"
#include "warpgroup_slope_block.h"

namespace txl::cuda {

template <typename E>
BoxedSizes sizes_of(const View& view, int64_t batch, int64_t heads, int64_t rows, int64_t channels) {
  constexpr int64_t kBytes = sizeof(E);
  return {{batch, heads, rows, channels}, {view.batch * kBytes, view.head * kBytes, view.row * kBytes}};
}
// A tensor of the caller's.
template <typename E>
BoxedSizes sizes_of(const View& view, const Problem& p, int64_t batch, int64_t rows) {
  return sizes_of<E>(view, batch, p.H, rows, p.D);
}

template <typename E, int kHead>
int WarpgroupKernels<E, kHead>::forward(const ForwardParams& params, void* stream) {
  const Problem& p = params.p;
  BoxedForwardParams x{params, {}, {}, {}, false};
  const BoxedSizes k = sizes_of<E>(x.t.k, p, p.B, p.K), v = sizes_of<E>(x.t.v, p, p.B, p.K),
                   r = sizes_of<E>(x.t.r, p, 1, p.N);
  x.boxes = has_boxes(k) && has_boxes(v) && has_boxes(r);
  if (x.boxes) {
    int error = bind_context();
    if (!error) error = make_tensor_map(x.k_map, x.t.k.data, k);
    if (!error) error = make_tensor_map(x.v_map, x.t.v.data, v);
    if (!error) error = make_tensor_map(x.r_map, x.t.r.data, r);
    if (error) return error;
  }
  return launch_with_dropout<WarpgroupQueryBlock<E, kHead>>(x, stream);
}

template <typename E, int kHead>
int WarpgroupKernels<E, kHead>::decode(const ForwardParams& params, void* stream) {
  const int error = launch_block<ForwardBlock<E, kHead, 1, true>>(params, stream);
  return error ? error : launch_merge<E, true>(params, stream);
}

template <typename E, int kHead>
bool WarpgroupBackward<E, kHead>::serves(const BackwardParams& params) {
  const Problem& p = params.p;
  const Backward& t = params.t;
  return has_boxes(sizes_of<E>(t.k, p, p.B, p.K)) && has_boxes(sizes_of<E>(t.r, p, 1, p.N)) &&
         has_boxes(sizes_of<E>(t.dout, p, p.B, p.L));
}
template <typename E, int kHead>
template <bool kDropout>
int WarpgroupBackward<E, kHead>::dk_dv(const BackwardParams& params, void* stream) {
  const Problem& p = params.p;
  const View &q_u = params.w.q_u, &q_v = params.w.q_v;
  const int64_t heads = p.B * p.H;
  // Its heads one after the other; of each every eighth row, then the next ones.
  const View apart{q_v.data, q_v.head, q_v.row, 8 * q_v.row};
  BoxedSizes of_apart = sizes_of<E>(apart, heads, 8, div_up(p.L, 8), q_v.row);
  of_apart.rows = of_apart.heads = 8;
  using Block = WarpgroupKeyBlock<E, kHead>;
  const Chunk& chunk = params.chunk;
  const View slopes = params.slopes_view();
  BoxedSizes of_slopes = sizes_of<E>(slopes, chunk.batches, chunk.heads, chunk.rows(), slopes.row);
  of_slopes.rows = Block::kSlopesRows, of_slopes.channels = 16;
  BoxedKeyParams x{params, {}, {}, {}, {}, {}};
  int error = bind_context();
  if (!error) error = make_tensor_map(x.q_u_map, q_u.data, sizes_of<E>(q_u, p.B, p.H, p.L, q_u.row));
  if (!error) error = make_tensor_map(x.q_v_map, q_v.data, of_apart);
  if (!error) error = make_tensor_map(x.dout_map, x.t.dout.data, sizes_of<E>(x.t.dout, p, p.B, p.L));
  if (!error) error = make_tensor_map(x.r_map, x.t.r.data, sizes_of<E>(x.t.r, p, 1, p.N));
  if (!error) error = make_tensor_map(x.slopes_map, slopes.data, of_slopes);
  return error ? error : launch_part<DkDvKernel<Block, kDropout>>(x, stream);
}
template <typename E, int kHead>
int WarpgroupBackward<E, kHead>::dq(const BackwardParams& params, void* stream) {
  const Problem& p = params.p;
  BoxedSlopeParams x{params, {}, {}};
  int error = bind_context();
  if (!error) error = make_tensor_map(x.k_map, x.t.k.data, sizes_of<E>(x.t.k, p, p.B, p.K));
  if (!error) error = make_tensor_map(x.r_map, x.t.r.data, sizes_of<E>(x.t.r, p, 1, p.N));
  return error ? error : launch_part<DqKernel<WarpgroupSlopeBlock<E, kHead>>>(x, stream);
}
template <typename E, int kHead>
int WarpgroupBackward<E, kHead>::dr(const BackwardParams& params, void* stream) {
  const Problem& p = params.p;
  const View& q_v = params.w.q_v;
  BoxedRowParams x{params, {}};
  int error = bind_context();
  if (!error) error = make_tensor_map(x.q_v_map, q_v.data, sizes_of<E>(q_v, p.B, p.H, p.L, q_v.row));
  return error ? error : launch_part<DrKernel<WarpgroupRowBlock<E, kHead>>>(x, stream);
}

template struct WarpgroupKernels<TXL_ELEMENT, TXL_HEAD>;
template struct WarpgroupBackward<TXL_ELEMENT, TXL_HEAD>;
template int WarpgroupBackward<TXL_ELEMENT, TXL_HEAD>::dk_dv<false>(const BackwardParams&, void*);
template int WarpgroupBackward<TXL_ELEMENT, TXL_HEAD>::dk_dv<true>(const BackwardParams&, void*);

}  // namespace txl::cuda
