// Where the heads of attention lie: arrays qkv [k, *B, N, 3 H c], each row of k with a part of every head's vector,
// columns ordered (q | k | v) x heads x channels, and results [k, *B, N, H c].  A task is one head of one image.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu_threads.h"

namespace equivit {

enum { kQueries, kKeys, kValues };  // thirds of the columns of qkv

// An array [rows, images, tokens, thirds * heads * channels] of qkv, or of y with one "third".
template <class T>
struct Array {
  T* data;
  int64_t rows, channels, thirds;
};

struct HeadSizes {
  int64_t images, tokens, heads, channels;  // the channels of a head in all arrays

  float scale() const { return 1 / std::sqrt(static_cast<float>(channels)); }
};

struct Head {
  int64_t image, head;
};

// visit(start of the head's part in token 0, elements from token to token, channels, channels of the parts before)
template <class T, class Visit>
void for_parts(const std::vector<Array<T>>& arrays, const HeadSizes& sizes, Head at, int third, Visit visit) {
  int64_t before = 0;
  for (const Array<T>& array : arrays) {
    int64_t step = array.thirds * sizes.heads * array.channels;
    for (int64_t row = 0; row < array.rows; row++, before += array.channels) {
      T* image = array.data + (row * sizes.images + at.image) * sizes.tokens * step;
      visit(image + (third * sizes.heads + at.head) * array.channels, step, array.channels, before);
    }
  }
}

// Describes a buffer [k, *B, N, c].
template <class T, class Buffer>
Array<T> described(const Buffer& buffer, int64_t thirds, HeadSizes& sizes) {
  auto shape = buffer.dimensions();
  size_t last = shape.size() - 1;
  sizes.tokens = shape[last - 1], sizes.images = 1;
  for (size_t axis = 1; axis + 2 <= last; axis++) sizes.images *= shape[axis];
  return {buffer.typed_data(), shape[0], shape[last] / (thirds * sizes.heads), thirds};
}

template <xla::ffi::DataType type, class T, class Arguments>
std::vector<Array<T>> described_all(Arguments& arguments, size_t begin, size_t end, int64_t thirds, HeadSizes& sizes) {
  std::vector<Array<T>> arrays;
  for (size_t i = begin; i < end; i++) {
    if constexpr (std::is_const_v<T>)
      arrays.push_back(described<T>(*arguments.template get<xla::ffi::Buffer<type>>(i), thirds, sizes));
    else
      arrays.push_back(described<T>(**arguments.template get<xla::ffi::Buffer<type>>(i), thirds, sizes));
  }
  return arrays;
}

template <class T>
int64_t channels_of_a_head(const std::vector<Array<T>>& arrays) {
  int64_t sum = 0;
  for (const Array<T>& array : arrays) sum += array.rows * array.channels;
  return sum;
}

// do_head(sizes, head, qkv, y) for all heads of arrays of this type; arguments are qkv, results y.
template <xla::ffi::DataType type, class Sizes, auto do_head>
xla::ffi::Error for_heads(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs arguments, xla::ffi::RemainingRets results,
                          int64_t heads) {
  using T = xla::ffi::NativeType<type>;
  Sizes sizes{{1, 1, heads, 0}};
  auto qkv = described_all<type, const T>(arguments, 0, arguments.size(), 3, sizes);
  auto y = described_all<type, T>(results, 0, results.size(), 1, sizes);
  sizes.channels = channels_of_a_head(qkv);
  in_parallel(pool, sizes.images * heads, [&](int64_t i) { do_head(sizes, {i / heads, i % heads}, qkv, y); });
  return xla::ffi::Error::Success();
}

// do_head(sizes, head, qkv, dy, dqkv): arguments are qkv and dy, results dqkv.
template <xla::ffi::DataType type, class Sizes, auto do_head>
xla::ffi::Error for_heads_backward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs arguments,
                                   xla::ffi::RemainingRets results, int64_t heads) {
  using T = xla::ffi::NativeType<type>;
  Sizes sizes{{1, 1, heads, 0}};
  size_t arrays = results.size();
  auto qkv = described_all<type, const T>(arguments, 0, arrays, 3, sizes);
  auto dy = described_all<type, const T>(arguments, arrays, 2 * arrays, 1, sizes);
  auto dqkv = described_all<type, T>(results, 0, arrays, 3, sizes);
  sizes.channels = channels_of_a_head(qkv);
  in_parallel(pool, sizes.images * heads, [&](int64_t i) { do_head(sizes, {i / heads, i % heads}, qkv, dy, dqkv); });
  return xla::ffi::Error::Success();
}

inline auto of_heads() {
  return xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>("heads");
}

}  // namespace equivit
