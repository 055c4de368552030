// Linear maps as products: what their kernels for float32 and for bfloat16 have in common.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_matrix.h"
#include "cpu_threads.h"

namespace equivit {

// C = f(A) B, and what becomes of its sums: b is added, or they are multiplied by f'(x).
template <class T>
struct Product {
  int64_t rows, columns, terms;
  Matrix<T> a, b;
  bool activated;  // f is the GELU, otherwise the identity
  T* c;
  const float* bias = nullptr;  // or null, as those below
  const T* x = nullptr;
  float* b_sums = nullptr;  // those of B's columns
};

struct Range {
  int64_t begin, size;
};

// do_part(rows, columns) for parts of a matrix on all threads: some of its rows, at most so many, or some of its columns
// if there are more of these and no task has too many rows.  Borders are at multiples of the tile.
template <class Function>
void for_parts_of(xla::ffi::ThreadPool& pool, int64_t rows, int64_t columns, int64_t rows_of_tile,
                  int64_t columns_of_tile, int64_t at_most, Function do_part) {
  bool by_rows = rows >= columns || rows > at_most;
  int64_t tile = by_rows ? rows_of_tile : columns_of_tile, all = by_rows ? rows : columns;
  int64_t tiles = (all + tile - 1) / tile, threads = std::max<int64_t>(1, pool.num_threads());
  int64_t rounds = by_rows ? (all + threads * at_most - 1) / (threads * at_most) : 1;
  int64_t of_task = (tiles + threads * rounds - 1) / (threads * rounds) * tile;
  in_parallel(pool, (all + of_task - 1) / of_task, [=](int64_t task) {
    Range mine{task * of_task, std::min(of_task, all - task * of_task)};
    if (by_rows) do_part(mine, Range{0, columns});
    else do_part(Range{0, rows}, mine);
  });
}

template <class Buffer>
int64_t last(const Buffer& x) {
  return x.dimensions()[x.dimensions().size() - 1];
}

// A map of some that have the same shape: W [maps, C, D] has one for each row of x [maps, ..., C], W [C, D] one for all.
struct Map {
  int64_t index, maps;

  template <class Buffer>
  auto* of(const Buffer& x) const {
    return x.typed_data() + index * (static_cast<int64_t>(x.element_count()) / maps);
  }
  template <xla::ffi::DataType type>
  Matrix<xla::ffi::NativeType<type>> matrix(const xla::ffi::Buffer<type>& x) const {
    return {of(x), last(x), 1};
  }
  template <xla::ffi::DataType type>
  Matrix<xla::ffi::NativeType<type>> turned(const xla::ffi::Buffer<type>& x) const {
    return {of(x), 1, last(x)};
  }
  template <class Buffer>
  int64_t tokens(const Buffer& x) const {
    return x.element_count() / (maps * last(x));
  }
};

template <class Buffer, class Function>
void for_maps(const Buffer& weight, Function do_map) {
  int64_t maps = weight.dimensions().size() == 3 ? weight.dimensions()[0] : 1;
  for (int64_t i = 0; i < maps; i++) do_map(Map{i, maps});
}

// The handlers of XLA's calls, of arrays of a type; b, of the first map, and its gradient are of float32.
template <xla::ffi::DataType type, auto compute>
struct Linear {
  using Buffer = xla::ffi::Buffer<type>;
  using Result = xla::ffi::ResultBuffer<type>;
  using Pool = xla::ffi::ThreadPool;
  using Sums = xla::ffi::Buffer<xla::ffi::F32>;
  using T = xla::ffi::NativeType<type>;

  // Arguments: x, W and perhaps b.
  static xla::ffi::Error forward(Pool pool, Buffer x, Buffer weight, xla::ffi::RemainingArgs bias, Result y,
                                 bool activated) {
    for_maps(weight, [&](Map map) {
      Product<T> p{map.tokens(x), last(weight), last(x), map.matrix(x), map.matrix(weight), activated, map.of(*y)};
      if (bias.size() && map.index == 0) p.bias = (*bias.template get<Sums>(0)).typed_data();
      compute(pool, p);
    });
    return xla::ffi::Error::Success();
  }

  // Arguments: dy, W and, if f is the GELU, x.
  static xla::ffi::Error backward_x(Pool pool, Buffer dy, Buffer weight, xla::ffi::RemainingArgs x, Result dx) {
    for_maps(weight, [&](Map map) {
      Product<T> p{map.tokens(dy), last(*dx), last(dy), map.matrix(dy), map.turned(weight), false, map.of(*dx)};
      if (x.size()) p.x = map.of(*x.template get<Buffer>(0));
      compute(pool, p);
    });
    return xla::ffi::Error::Success();
  }

  // Results: dW and perhaps db.
  static xla::ffi::Error backward_weight(Pool pool, Buffer x, Buffer dy, Result d_weight,
                                         xla::ffi::RemainingRets d_bias, bool activated) {
    for_maps(*d_weight, [&](Map map) {
      Product<T> p{last(x), last(dy), map.tokens(x), map.turned(x), map.matrix(dy), activated, map.of(*d_weight)};
      if (d_bias.size() && map.index == 0) p.b_sums = (*d_bias.template get<Sums>(0))->typed_data();
      compute(pool, p);
    });
    return xla::ffi::Error::Success();
  }

  static auto of_forward() { return of_two().RemainingArgs().template Ret<Buffer>().template Attr<bool>("activated"); }
  static auto of_backward_x() { return of_two().RemainingArgs().template Ret<Buffer>(); }
  static auto of_backward_weight() {
    return of_two().template Ret<Buffer>().RemainingRets().template Attr<bool>("activated");
  }

 private:
  static auto of_two() { return xla::ffi::Ffi::Bind().Ctx<Pool>().template Arg<Buffer>().template Arg<Buffer>(); }
};

}  // namespace equivit
