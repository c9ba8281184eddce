// Decode: few queries over many keys, as in generation. Every key is read once, nothing is packed, and the
// keys are split over the threads; the speed of memory is the limit. The splits are merged by their
// largest scores and totals, in order.
#pragma once

#include "scores.h"

namespace txl::TXL_LEVEL {

// Queries are taken one by one here: beyond a few packing is worth it, and sooner where pairs are multiplied
// (measured). Where heads are few the keys must be shared out, which nothing else does.
template <class C>
TXL_INLINE bool decodes(const Problem& p) {
  return p.L <= (p.B * p.H < 8 ? kDecodeRows : C::per_elem > 1 ? 3 : 5);
}

template <class S>
class DecodeKernel {
  using T = decltype(to_float(S{}));
  static constexpr int W = kLanes<T>, kKeys = 4096;  // keys whose scores are held at most
  static constexpr int kMost = kLong ? 4 : 8;        // vectors of a row that are read together
  static constexpr int64_t kAhead = 32;              // keys between what is fetched and what is used

  struct Query {
    T *u, *v;  // (q + bias_u) and (q + bias_v) in log2 units, padded with zeros
    Range keys;
    T m = -static_cast<T>(INFINITY), l = 0;
  };

  // Streams of k and r that follow one another, and those that are fetched meanwhile.
  struct Streams {
    const S *k, *r, *next_k, *next_r;
    Streams from(int64_t d) const { return {k + d, r + d, next_k + d, next_r + d}; }
  };

 public:
  DecodeKernel(const Problem& problem, const Forward& tensors, const Pool& pool)
      : p_(problem),
        t_(tensors),
        pool_(pool),
        channels_(round_up(p_.D, W)),
        // The split depends on the shapes alone, and so does the result.
        splits_(max(1, min(kItems / max(1, p_.B * p_.H), p_.K / kMinKeys))),
        split_sums_(p_.B * p_.H * splits_ * p_.L * (channels_ + 2)) {}

  void run() {
    parallel_items(pool_, p_.B * p_.H * splits_,
                   [&](int64_t item, int) { run_split(item / splits_, item % splits_); });
    for (int64_t unit = 0; unit < p_.B * p_.H; ++unit)
      for (int64_t i = 0; i < p_.L; ++i) merge(unit, i);
  }

 private:
  static constexpr int64_t kItems = 16,
                           kMinKeys = 256;  // few and long: streams that hardware foresees

  // o of one split of one query, and behind it m and l.
  T* sums_of_split(int64_t unit, int64_t split, int64_t i) {
    return split_sums_.begin() + ((unit * splits_ + split) * p_.L + i) * (channels_ + 2);
  }

  Query query(int64_t b, int64_t h, int64_t i, T* memory) const {
    Query q;
    const T factor = static_cast<T>(p_.scale * kLog2e);
    const S* row = t_.q.at<S>(b, h, i);
    q.u = memory, q.v = memory + channels_;
    for (int64_t d = 0; d < p_.D; ++d) {
      q.u[d] = (to_float(row[d]) + bias(t_.bias_u, h, d)) * factor;
      q.v[d] = (to_float(row[d]) + bias(t_.bias_v, h, d)) * factor;
    }
    q.keys = p_.keys_of_query(p_.keys_of_batch(b), i);
    return q;
  }

  T bias(const View& x, int64_t h, int64_t d) const { return x.data ? to_float(x.at<S>(0, h, 0)[d]) : T{}; }

  // f(first channel, Size<vectors>, Size<whether the last of them is cut off by D>) over the channels.
  template <class F>
  TXL_INLINE void in_channels(F f) const {
    in_groups<kMost>(channels_ / W, [&](int64_t n, auto kn) {
      if ((n + decltype(kn)::value) * W <= p_.D)
        f(n * W, kn, Size<0>{});
      else
        f(n * W, kn, Size<1>{});
    });
  }
  TXL_INLINE Vec<T> values(const S* p, bool tail) const {
    return tail ? load_some(p, static_cast<int>(p_.D % W)) : load_as_float(p);
  }

  // Streams are read from both halves of the keys in turns, one by one: while one half's next page is looked
  // up, the other's lines still come. This many are in the first.
  static int64_t half_of(int64_t keys) { return min(round_up((keys + 1) / 2, W), keys); }

  // Vector n of a row into the second level of cache, line by line: where vectors are long, the hardware's
  // own prefetching is too late at every page.
  static TXL_INLINE void fetch(const S* row, int n) {
    constexpr int kLine = kLineBytes / sizeof(S);  // in values
    if (kLong && n * W % kLine == 0) __builtin_prefetch(row + n * W, 0, 2);
  }

  void run_split(int64_t unit, int64_t split) {
    const int64_t b = unit % p_.B, h = unit / p_.B;
    const Range share = {p_.K * split / splits_, p_.K * (split + 1) / splits_};
    Array<T> memory(2 * p_.L * channels_);
    Query queries[kDecodeRows];
    Range all = {share.hi, share.lo};
    for (int64_t i = 0; i < p_.L; ++i) {
      queries[i] = query(b, h, i, &memory[2 * i * channels_]);
      const Range keys = queries[i].keys = intersect(queries[i].keys, share);
      if (!keys.empty()) all = {min(all.lo, keys.lo), max(all.hi, keys.hi)};
      T* o = sums_of_split(unit, split, i);
      for (int64_t d = 0; d < channels_; ++d) o[d] = 0;
    }
    // Long streams are read fastest; of several queries each is to find k and r still in the cache.
    const int64_t step = p_.L > 1 ? kKeys / 4 : kKeys;
    for (int64_t lo = all.lo; lo < all.hi; lo += step)
      for (int64_t i = 0; i < p_.L; ++i) {
        Query& q = queries[i];
        const Range keys = intersect(q.keys, {lo, lo + step});
        if (!keys.empty()) add_keys(b, h, i, keys, q, sums_of_split(unit, split, i));
      }
    for (int64_t i = 0; i < p_.L; ++i) {
      T* o = sums_of_split(unit, split, i);
      o[channels_] = queries[i].m;
      o[channels_ + 1] = queries[i].l;
    }
  }

  // These keys, at most kKeys, into the running softmax of one query.
  void add_keys(int64_t b, int64_t h, int64_t i, Range keys, Query& q, T* o) const {
    T s[kKeys];
    const int64_t count = keys.size();
    score_keys(b, h, i, keys, q, s);
    Vec<T> top = splat(q.m);
    for (int64_t x = 0; x < count; x += W) top = vmax(load(s + x), top);
    const T m = horizontal_max<T>(top), base = m == -static_cast<T>(INFINITY) ? T{} : m;
    const T fade = exp2(splat(q.m - base))[0];
    Vec<T> sum = {};
    for (int64_t x = 0; x < count; x += W) {
      const Vec<T> e = exp2(load(s + x) - base);
      sum += e;
      store(s + x, e);
    }
    q.m = m;
    q.l = q.l * fade + horizontal_sum<T>(sum);
    if (p_.dropout_p > 0) drop(p_, b, h, i, keys, keys.lo, s);
    in_channels([&](int64_t d, auto kn, auto tail) {
      add_values<decltype(kn)::value, decltype(tail)::value>(t_.v.at<S>(b, h, keys.lo) + d, count, s, fade,
                                                             o + d);
    });
  }

  // o = o * fade + sum_x s[x] v_x over kN vectors of channels.
  template <int kN, int tail>
  __attribute__((noinline)) void add_values(const S* v, int64_t count, const T* s, T fade, T* o) const {
    Vec<T> acc[kN];
    TXL_UNROLL
    for (int n = 0; n < kN; ++n) acc[n] = load(o + n * W) * fade;
    const int64_t half = half_of(count);
    const auto add = [&](int64_t x, int64_t end) {
      const S* row = v + x * t_.v.row;
      TXL_UNROLL
      for (int n = 0; n < kN; ++n) {
        fetch(row + (kAhead < end - x ? kAhead * t_.v.row : 0), n);
        acc[n] += s[x] * values(row + n * W, tail && n == kN - 1);
      }
    };
    for (int64_t x = 0; x < half; ++x) {
      add(x, half);
      if (half + x < count) add(half + x, count);
    }
    TXL_UNROLL
    for (int n = 0; n < kN; ++n) store(o + n * W, acc[n]);
  }

  // s[x] = score of key lo + x; -inf in the lanes behind the last key.
  void score_keys(int64_t b, int64_t h, int64_t i, Range keys, const Query& q, T* s) const {
    // Left and right of the keys that have a row of r each, the position term is the same for all.
    const int64_t left_end = min(max(keys.lo, p_.key(i, 0)), keys.hi),
                  right_start = max(min(keys.hi, p_.key(i, p_.N)), left_end);
    const S* k = t_.k.at<S>(b, h, 0);
    const S* r = t_.r.at<S>(0, h, 0);
    const S* v = t_.v.at<S>(b, h, keys.lo);
    for (int64_t x = 0; x < round_up(keys.size(), W); ++x) s[x] = -static_cast<T>(INFINITY);
    const auto dot = [&](int64_t lo, int64_t hi, auto kr, T constant) {
      constexpr bool has_r = decltype(kr)::value;
      const int64_t half = half_of(hi - lo), mid = lo + half;
      // Behind the last keys of a half values are fetched: after the range with most keys they are read next.
      const auto rows = [&](int64_t j) -> Streams {
        const int64_t past = j + kAhead - (j < mid ? mid : hi), first = j < mid ? 0 : half_of(keys.size());
        const S *k_j = k + j * t_.k.row, *r_j = r;
        if constexpr (has_r) r_j += p_.band(i, j) * t_.r.row;  // far keys' would be anywhere
        if (past < 0) return {k_j, r_j, k_j + kAhead * t_.k.row, r_j + kAhead * t_.r.row};
        return {k_j, r_j, v + (first + past) * t_.v.row, r_j};
      };
      for (int64_t j = lo; j < mid; j += W) {
        const int64_t other = j + half;
        T* to = s + (j - keys.lo);
        if (other + W <= hi) {
          dot_keys<has_r, 2>({rows(j), rows(other)}, W, q, constant, {to, to + half});
        } else {
          dot_keys<has_r, 1>({rows(j)}, min(mid - j, W), q, constant, {to});
          if (other < hi) dot_keys<has_r, 1>({rows(other)}, hi - other, q, constant, {to + half});
        }
      }
    };
    if (keys.lo < left_end) dot(keys.lo, left_end, Size<0>{}, position_term(q, r));
    dot(left_end, right_start, Size<1>{}, T{});
    if (right_start < keys.hi)
      dot(right_start, keys.hi, Size<0>{}, position_term(q, r + (p_.N - 1) * t_.r.row));
  }

  // (q + bias_v) . r of one row of r.
  T position_term(const Query& q, const S* r) const {
    Vec<T> sum = {};
    for (int64_t d = 0; d < channels_; d += W) sum += load(q.v + d) * load_left(r + d, p_.D - d);
    return horizontal_sum<T>(sum);
  }

  // Scores of `count` keys, at most a vector of them, in each of kRuns places.
  template <bool has_r, int kRuns>
  void dot_keys(const Streams (&runs)[kRuns], int64_t count, const Query& q, T constant,
                T* const (&s)[kRuns]) const {
    Vec<T> product[kRuns][W] = {};
    in_channels([&](int64_t d, auto kn, auto tail) {
      Streams from[kRuns];
      for (int n = 0; n < kRuns; ++n) from[n] = runs[n].from(d);
      add_dots<has_r, decltype(kn)::value, decltype(tail)::value>(from, count, q.u + d, q.v + d, product);
    });
    for (int n = 0; n < kRuns; ++n) {
      T lane[W];
      store(lane, lane_sums<T>(product[n]) + constant);
      for (int64_t x = 0; x < count; ++x) s[n][x] = lane[x];
    }
  }

  // product[run][x] += u . k_x + v . r_x over kN vectors of channels, lane by lane.
  template <bool has_r, int kN, int tail, int kRuns>
  __attribute__((noinline)) void add_dots(Streams (&runs)[kRuns], int64_t count, const T* u, const T* v,
                                          Vec<T> (&product)[kRuns][W]) const {
    Vec<T> qu[kN], qv[kN];
    TXL_UNROLL
    for (int n = 0; n < kN; ++n) qu[n] = load(u + n * W), qv[n] = load(v + n * W);
    for (int64_t x = 0; x < count; ++x) {
      TXL_UNROLL
      for (int run = 0; run < kRuns; ++run) {
        Streams& row = runs[run];
        Vec<T> content = product[run][x], position = {};
        TXL_UNROLL
        for (int n = 0; n < kN; ++n) {
          fetch(row.next_k, n);
          content += qu[n] * values(row.k + n * W, tail && n == kN - 1);
          if constexpr (has_r) {
            fetch(row.next_r, n);
            position += qv[n] * values(row.r + n * W, tail && n == kN - 1);
          }
        }
        product[run][x] = content + position;
        row.k += t_.k.row, row.r += t_.r.row, row.next_k += t_.k.row, row.next_r += t_.r.row;
      }
    }
  }

  void merge(int64_t unit, int64_t i) {
    T m = -static_cast<T>(INFINITY);
    for (int64_t split = 0; split < splits_; ++split) m = vmax(sums_of_split(unit, split, i)[channels_], m);
    const T base = m == -static_cast<T>(INFINITY) ? T{} : m;
    Array<T> o(channels_);
    T l = 0;
    for (int64_t split = 0; split < splits_; ++split) {
      const T* x = sums_of_split(unit, split, i);
      const T weight = exp2(splat(x[channels_] - base))[0];
      l += weight * x[channels_ + 1];
      for (int64_t d = 0; d < channels_; ++d) o[d] += weight * x[d];
    }
    write_row<T, S>(p_, t_, unit % p_.B, unit / p_.B, i, o.begin(), m, l);
  }

  const Problem p_;
  const Forward& t_;
  const Pool& pool_;
  const int64_t channels_;
  const int64_t splits_;
  Array<T> split_sums_;
};

}  // namespace txl::TXL_LEVEL
