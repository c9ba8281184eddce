// Vectors of one level, in the compiler's own vector extension: the same source becomes SSE2, AVX2, AVX-512
// or NEON by the flags it is compiled with. Everything here lives in a namespace named after the level and is
// inlined, so that objects of different levels never share a function.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../philox.h"
#include "../rel_attn.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define TXL_INLINE inline __attribute__((always_inline))
#define TXL_UNROLL _Pragma("GCC unroll 32")

namespace txl::TXL_LEVEL {

// Register tile of the product kernels: kRows rows of kVectors vectors; it leaves room for one row of B and a
// broadcast of A.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRows = 6, kVectors = 4;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kRows = 6, kVectors = 4;
#else
constexpr int kVectorBytes = 16, kRows = 4, kVectors = 2;
#endif

// Whether vectors are so long that a register tile's products take longer than anything around them. Where
// they are not, blocks and chunks are those of smaller caches, and what is done beside the products is kept
// from delaying them. Measured on Zen 4 and on Zen 3.
constexpr bool kLong = kVectorBytes == 64;

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vec = typename VectorOf<T>::type;
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// The signed integer of the same width, for masks and bit tricks.
template <typename T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <typename T>
using Int = typename IntOf<T>::type;

template <typename T>
TXL_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(p);
}

template <typename T>
TXL_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(p) = v;
}

template <typename T>
TXL_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 is x to the bit; 0 + x would lose the sign of -0
}

template <typename To, typename From>
TXL_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

template <typename T>
TXL_INLINE Vec<T> lane_index() {
  Vec<T> v;
  for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

// max(a, b) and min(a, b), b where they do not compare: one instruction on x86, which the compiler does not
// always see.
template <typename V>
TXL_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}
template <typename V>
TXL_INLINE V vmin(V a, V b) {
  return a < b ? a : b;
}
#if defined(__AVX2__) && !defined(__AVX512F__)
TXL_INLINE Vec<float> vmax(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
TXL_INLINE Vec<double> vmax(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
TXL_INLINE Vec<float> vmin(Vec<float> a, Vec<float> b) { return _mm256_min_ps(a, b); }
TXL_INLINE Vec<double> vmin(Vec<double> a, Vec<double> b) { return _mm256_min_pd(a, b); }
#endif

// Whether a > b in any lane.
#if defined(__AVX512F__)
TXL_INLINE bool any_greater(Vec<float> a, Vec<float> b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
TXL_INLINE bool any_greater(Vec<double> a, Vec<double> b) {
  return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ) != 0;
}
#elif defined(__AVX2__)
TXL_INLINE bool any_greater(Vec<float> a, Vec<float> b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
TXL_INLINE bool any_greater(Vec<double> a, Vec<double> b) {
  return _mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_GT_OQ)) != 0;
}
#else
template <typename V>
TXL_INLINE bool any_greater(V a, V b) {
  const auto greater = a > b;
  uint64_t words[sizeof(V) / 8], any = 0;
  memcpy(words, &greater, sizeof(words));
  for (uint64_t word : words) any |= word;
  return any != 0;
}
#endif

// The lanes kFrom of a and b together, b's numbered on from a's.
template <int... kFrom, typename V>
TXL_INLINE V shuffled(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
  return V(__builtin_shufflevector(a, b, kFrom...));
#else
  return __builtin_shuffle(a, b, decltype(a < b){kFrom...});
#endif
}

// All lanes joined, in the first: by halves.
template <int kStep, typename V, typename F, size_t... I>
TXL_INLINE V fold(V v, F join, std::index_sequence<I...> lanes) {
  v = join(v, shuffled<((I + kStep) % sizeof...(I))...>(v, v));
  if constexpr (kStep > 1)
    return fold<kStep / 2>(v, join, lanes);
  else
    return v;
}

template <typename T>
TXL_INLINE T horizontal_sum(Vec<T> v) {
  return fold<kLanes<T> / 2>(
      v, [](Vec<T> a, Vec<T> b) { return a + b; }, std::make_index_sequence<kLanes<T>>{})[0];
}

template <typename T>
TXL_INLINE T horizontal_max(Vec<T> v) {
  return fold<kLanes<T> / 2>(
      v, [](Vec<T> a, Vec<T> b) { return vmax(a, b); }, std::make_index_sequence<kLanes<T>>{})[0];
}

// 2^x for x up to 127 (float), 1023 (double). Relative error below 1e-8 (float), 1e-16 (double) plus
// rounding; exactly 0 for x = -inf; results below the normal numbers may be 0; NaN stays NaN. The polynomials
// interpolate 2^f on [-1/2, 1/2] at Chebyshev nodes.
TXL_INLINE Vec<float> exp2_fraction(Vec<float> f) {
  Vec<float> p = splat(0.000154614446985691291f);
  p = p * f + 0.00134004281776158379f;
  p = p * f + 0.00961805667852463808f;
  p = p * f + 0.0555032722667030206f;
  p = p * f + 0.240226509222887581f;
  p = p * f + 0.693147206702832596f;
  return p * f + 1.0f;
}

TXL_INLINE Vec<double> exp2_fraction(Vec<double> f) {
  Vec<double> p = splat(2.57335683087568912e-11);
  p = p * f + 4.45667534104920588e-10;
  p = p * f + 7.05489438634834804e-9;
  p = p * f + 1.0178051192960649e-7;
  p = p * f + 1.3215486815999977e-6;
  p = p * f + 0.0000152527338562934664;
  p = p * f + 0.000154035303933627553;
  p = p * f + 0.00133335581463903528;
  p = p * f + 0.00961812910762848305;
  p = p * f + 0.055504108664821699;
  p = p * f + 0.240226506959100712;
  p = p * f + 0.693147180559945308;
  return p * f + 1.0;
}

// Of the floating-point format: where the bits of its exponent start, the largest number whose power of two
// is too small for it, and what rounds to an integer n and leaves n - lowest in the last bits, where n is
// small.
template <typename T>
struct Exponent;
template <>
struct Exponent<float> {
  static constexpr int shift = 23;
  static constexpr float lowest = -127.0f, round = 12582912.0f - lowest;  // 1.5 * 2^23
};
template <>
struct Exponent<double> {
  static constexpr int shift = 52;
  static constexpr double lowest = -1023.0, round = 6755399441055744.0 - lowest;  // 1.5 * 2^52
};

#if defined(__AVX512F__)
TXL_INLINE Vec<float> exp2(Vec<float> x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 of infinity
  return _mm512_scalef_ps(exp2_fraction(f), x - f);
}
TXL_INLINE Vec<double> exp2(Vec<double> x) {
  const __m512d f = _mm512_reduce_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_pd(exp2_fraction(f), x - f);
}
#else
template <typename V>
TXL_INLINE V exp2(V x) {
  using T = std::remove_reference_t<decltype(V{}[0])>;
  using E = Exponent<T>;
  x = vmax(splat(E::lowest), x);  // NaN stays
  const V shifted = x + E::round;
  const V power = bits<V>(bits<Vec<Int<T>>>(shifted) << E::shift);  // of the nearest integer; 0 of the lowest
  return exp2_fraction(x - (shifted - E::round)) * power;
}
#endif

// The low and the high halves of the 64-bit products of every lane with m.
TXL_INLINE void multiply_wide(Vec<uint32_t> x, uint32_t m, Vec<uint32_t>& lo, Vec<uint32_t>& hi) {
#if defined(__SSE2__)
  using Wide = Vec<uint64_t>;
  const Wide w = bits<Wide>(x);  // two lanes each: the hardware multiplies the lower ones
#if defined(__AVX512F__)
  const Wide even = bits<Wide>(_mm512_mul_epu32(bits<__m512i>(w), _mm512_set1_epi32(static_cast<int>(m))));
  const Wide odd =
      bits<Wide>(_mm512_mul_epu32(bits<__m512i>(w >> 32), _mm512_set1_epi32(static_cast<int>(m))));
#elif defined(__AVX2__)
  const Wide even = bits<Wide>(_mm256_mul_epu32(bits<__m256i>(w), _mm256_set1_epi32(static_cast<int>(m))));
  const Wide odd =
      bits<Wide>(_mm256_mul_epu32(bits<__m256i>(w >> 32), _mm256_set1_epi32(static_cast<int>(m))));
#else
  const Wide even = bits<Wide>(_mm_mul_epu32(bits<__m128i>(w), _mm_set1_epi32(static_cast<int>(m))));
  const Wide odd = bits<Wide>(_mm_mul_epu32(bits<__m128i>(w >> 32), _mm_set1_epi32(static_cast<int>(m))));
#endif
  lo = bits<Vec<uint32_t>>((even & 0xffffffffull) | odd << 32);
  hi = bits<Vec<uint32_t>>(even >> 32 | (odd & 0xffffffff00000000ull));
#else
  typedef uint64_t Wide __attribute__((vector_size(2 * kVectorBytes)));
  const Wide product = __builtin_convertvector(x, Wide) * static_cast<uint64_t>(m);
  lo = __builtin_convertvector(product, Vec<uint32_t>);
  hi = __builtin_convertvector(product >> 32, Vec<uint32_t>);
#endif
}

// bfloat16 as stored.
struct bf16 {
  uint16_t bits;
};

TXL_INLINE float to_float(bf16 x) { return bits<float>(static_cast<uint32_t>(x.bits) << 16); }
TXL_INLINE float to_float(float x) { return x; }
TXL_INLINE double to_float(double x) { return x; }

TXL_INLINE bf16 round_bf16(float x) {  // to nearest even; NaN stays NaN
  const uint32_t u = bits<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
TXL_INLINE void store_as(float* p, float x) { *p = x; }
TXL_INLINE void store_as(double* p, double x) { *p = x; }
TXL_INLINE void store_as(bf16* p, float x) { *p = round_bf16(x); }

// A whole vector from storage, converted.
TXL_INLINE Vec<float> load_as_float(const float* p) { return load(p); }
TXL_INLINE Vec<double> load_as_float(const double* p) { return load(p); }
TXL_INLINE Vec<float> load_as_float(const bf16* p) {
  typedef uint16_t half_vector __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
  const half_vector h = *reinterpret_cast<const half_vector*>(p);
  return bits<Vec<float>>(__builtin_convertvector(h, Vec<uint32_t>) << 16);
}

// The first n lanes from storage, zero behind them. Memory behind them is not touched.
#if defined(__AVX512F__)
TXL_INLINE Vec<float> load_some(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
TXL_INLINE Vec<double> load_some(const double* p, int n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p);
}
TXL_INLINE Vec<float> load_some(const bf16* p, int n) {
  const __m256i h = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
  return bits<Vec<float>>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
#else
template <typename S>
TXL_INLINE auto load_some(const S* p, int n) {
  using T = decltype(to_float(S{}));
  T lane[kLanes<T>] = {};
  for (int i = 0; i < n; ++i) lane[i] = to_float(p[i]);
  return load(lane);
}
#endif

// Stores the first n lanes. Memory behind them is not touched.
template <typename T>
TXL_INLINE void store_some(T* p, Vec<T> v, int n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1), bits<__m512i>(v));
  else
    _mm512_mask_storeu_epi64(p, static_cast<__mmask8>((1u << n) - 1), bits<__m512i>(v));
#else
  for (int i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// The parts of a vector of elements, see below.
template <typename E, int kParts>
struct Parts {
  Vec<E> part[kParts];
};
template <typename E, int kParts>
TXL_INLINE void store_parts(E* p, int64_t step, const Parts<E, kParts>& x) {
  TXL_UNROLL
  for (int i = 0; i < kParts; ++i) store(p + i * step, x.part[i]);
}

// How a product kernel multiplies: what one element of its packed operands is, and one step of the depth.
// per_elem: the values of an element; whole: the number of elements that a depth is a multiple of; parts: the
// elements whose sum a packed value is. A packed row holds its parts one behind another.
//
//   value(n, e)   which value of a row is the e-th of element n
//   along(x)      the elements of a row from `per_elem` vectors of it
//   across(x)     from the same vector of `per_elem` rows, the elements whose values are of one column
template <typename T>
struct Plain {
  using Acc = T;
  using Elem = T;
  static constexpr int per_elem = 1, whole = 1, parts = 1;
  static TXL_INLINE Vec<T> step(Vec<T> acc, Vec<T> a, Vec<T> b) { return acc + a * b; }
  static TXL_INLINE int64_t value(int64_t n, int) { return n; }
  static TXL_INLINE Parts<T, 1> along(const Vec<T> (&x)[1]) { return {{x[0]}}; }
  static TXL_INLINE Parts<T, 1> across(const Vec<T> (&x)[1]) { return {{x[0]}}; }
};
using Single = Plain<float>;
using Double = Plain<double>;

// Pairs of bfloat16, the first one in the low half: the leading bits of two vectors.
TXL_INLINE Vec<uint32_t> leading_pairs(Vec<float> first, Vec<float> second) {
  return (bits<Vec<uint32_t>>(first) >> 16) | (bits<Vec<uint32_t>>(second) & 0xffff0000u);
}
TXL_INLINE Vec<float> first_of(Vec<uint32_t> pairs) { return bits<Vec<float>>(pairs << 16); }
TXL_INLINE Vec<float> second_of(Vec<uint32_t> pairs) { return bits<Vec<float>>(pairs & 0xffff0000u); }

#if defined(__AVX512BF16__)
struct Bf16Pair {  // two neighbours of the depth; fp32 accumulators
  using Acc = float;
  using Elem = uint32_t;
  static constexpr int per_elem = 2, whole = 1, parts = 1;
  static TXL_INLINE Vec<float> step(Vec<float> acc, Vec<uint32_t> a, Vec<uint32_t> b) {
    return _mm512_dpbf16_ps(acc, bits<__m512bh>(a), bits<__m512bh>(b));
  }
  static TXL_INLINE int64_t value(int64_t n, int e) { return 2 * n + e; }
  static TXL_INLINE Parts<Elem, 1> along(const Vec<float> (&x)[2]) {
    return {{bits<Vec<uint32_t>>(_mm512_cvtne2ps_pbh(x[1], x[0]))}};
  }
  static TXL_INLINE Parts<Elem, 1> across(const Vec<float> (&x)[2]) {
    const __m512i both = bits<__m512i>(_mm512_cvtne2ps_pbh(x[1], x[0]));
    return {{bits<Vec<uint32_t>>(_mm512_permutexvar_epi16(interleaved(), both))}};
  }

 private:
  static TXL_INLINE __m512i interleaved() {  // 0, 16, 1, 17, ...
    return bits<__m512i>((lane_index<uint32_t>() + 16) << 16 | lane_index<uint32_t>());
  }
};
#endif
#if defined(__AMX_BF16__)
struct Bf16Tiles : Bf16Pair {  // the same operands, multiplied by whole tiles (tiles.h)
  static constexpr int whole = 16;
};

// float32 by tiles of bfloat16: a value is the sum of three, eight bits each: the nearest, the leading bits
// of what it leaves, and the rest, exactly. tiles.h adds up six of the nine products of two values; the
// others are below 2^-23 of the whole, of either sign. What is not finite has NaN parts. Pairs are values one
// vector apart.
struct SplitTiles {
  using Acc = float;
  using Elem = uint32_t;
  static constexpr int per_elem = 2, whole = 16, parts = 3;
  static TXL_INLINE int64_t value(int64_t n, int e) {
    constexpr int W = kLanes<float>;
    return n / W * (2 * W) + n % W + e * W;
  }
  static TXL_INLINE Parts<Elem, 3> along(const Vec<float> (&x)[2]) {
    const Vec<Elem> nearest = leading_pairs(nudged(x[0]), nudged(x[1]));
    Vec<float> first = x[0] - first_of(nearest), second = x[1] - second_of(nearest);
    const Vec<Elem> next = leading_pairs(first, second);
    first -= first_of(next), second -= second_of(next);
    return {{nearest, next, leading_pairs(first, second)}};
  }
  static TXL_INLINE Parts<Elem, 3> across(const Vec<float> (&x)[2]) { return along(x); }

 private:
  // Half a unit of a bfloat16 further from zero, so that its leading bits are the nearest one's; but not
  // where that is infinity (from 3.396e38 on), whose other parts would be NaN.
  static TXL_INLINE Vec<float> nudged(Vec<float> x) {
    const Vec<uint32_t> old = bits<Vec<uint32_t>>(x), further = old + 0x8000u;
    const Vec<uint32_t> infinite = splat(0x7f800000u);
    return bits<Vec<float>>((further & infinite) == infinite ? old : further);
  }
};
#endif

}  // namespace txl::TXL_LEVEL
