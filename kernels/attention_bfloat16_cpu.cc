// Softmax attention in bfloat16 on a CPU with AMX.
//
// What `attention_cpu.cc` computes, head by head, by products of whole tiles: see `cpu_tiles.h`.  Vectors of a head are
// [tokens, channels], both padded with zeros to whole tiles.  P, its gradient and the softmax are of float32; P and dS are
// rounded where they enter a product.  The backward pass keeps P and dS of a head, as their transposes are factors, too.

#include "cpu_tiles.h"

#ifdef EQUIVIT_BFLOAT16

#include "cpu_heads.h"
#include "cpu_threads.h"

namespace equivit {
namespace {

namespace ffi = xla::ffi;
using Given = std::vector<Array<const Bfloat16>>;
using Made = std::vector<Array<Bfloat16>>;

struct Sizes : HeadSizes {
  int64_t width() const { return whole_tiles(channels); }
  int64_t length() const { return whole_tiles(tokens); }
  int64_t vectors() const { return length() * width(); }  // numbers of all vectors of a head
};

// Takes parts of this thread's memory, one after the other.
struct Memory {
  char* next;

  explicit Memory(int64_t bytes) : next(reinterpret_cast<char*>(scratch(bytes / sizeof(float)))) {}
  template <class T>
  T* take(int64_t n) {
    char* taken = next;
    next += n * sizeof(T);
    return reinterpret_cast<T*>(taken);
  }
};

void gather(const Given& arrays, const Sizes& sizes, Head at, int third, Bfloat16* to) {
  std::fill_n(to, sizes.vectors(), 0);
  for_parts(arrays, sizes, at, third, [&](const Bfloat16* from, int64_t step, int64_t channels, int64_t before) {
    for (int64_t i = 0; i < sizes.tokens; i++) std::copy_n(from + i * step, channels, to + i * sizes.width() + before);
  });
}

void scatter(const Bfloat16* from, const Made& arrays, const Sizes& sizes, Head at, int third) {
  for_parts(arrays, sizes, at, third, [&](Bfloat16* to, int64_t step, int64_t channels, int64_t before) {
    for (int64_t i = 0; i < sizes.tokens; i++) std::copy_n(from + i * sizes.width() + before, channels, to + i * step);
  });
}

// kTile rows of products, [kTile, columns], of contiguous rows of A and panels of B.
void multiply_rows(int64_t terms, int64_t columns, const Bfloat16* a, const Bfloat16* b, float* to) {
  alignas(64) float sums[kTile * kTile];
  for (int64_t j = 0; j < columns; j += kTile) {
    multiply_tiles(terms, a, terms, b + j * terms, sums, false);
    for (int64_t i = 0; i < kTile; i++) std::copy_n(sums + i * kTile, kTile, to + i * columns + j);
  }
}

// All rows of a product, rounded: [rows, columns].
void multiply(int64_t rows, int64_t terms, int64_t columns, const Bfloat16* a, const Bfloat16* b, Bfloat16* to) {
  alignas(64) float sums[kTile * kTile];
  for (int64_t i = 0; i < rows; i += kTile)
    for (int64_t j = 0; j < columns; j += kTile) {
      multiply_tiles(terms, a + i * terms, terms, b + j * terms, sums, false);
      for (int64_t r = 0; r < kTile; r++)
        for (int64_t h = 0; h < kTile; h += kLanes)
          store_rounded(to + (i + r) * columns + j + h, load(sums + r * kTile + h), kLanes);
    }
}

// The softmax of kTile rows of scores, in place; 0 beyond the tokens.
void softmax(const Sizes& sizes, float* scores) {
  int64_t length = sizes.length();
  float factor = sizes.scale() * 1.44269504f;  // of 2^x
  for (int64_t i = 0; i < kTile; i++) {
    float* row = scores + i * length;
    std::fill(row + sizes.tokens, row + length, -INFINITY);
    Vector top = load(row), total{};
    for (int64_t j = kLanes; j < length; j += kLanes) top = max(top, load(row + j));
    top = filled(largest(top));
    for (int64_t j = 0; j < length; j += kLanes) {
      Vector e = exp2((load(row + j) - top) * factor);
      store(row + j, e);
      total += e;
    }
    float inverse = 1 / sum(total);
    for (int64_t j = 0; j < length; j += kLanes) store(row + j, load(row + j) * inverse);
  }
}

void round_rows(int64_t n, const float* from, Bfloat16* to) {
  for (int64_t i = 0; i < n; i += kLanes) store_rounded(to + i, load(from + i), kLanes);
}

void forward_head(const Sizes& sizes, Head at, const Given& qkv, const Made& y_arrays) {
  int64_t n = sizes.length(), width = sizes.width(), whole = sizes.vectors();
  Tiles tiles;
  Memory memory(2 * (6 * whole + kTile * n) + 4 * kTile * n);
  auto q = memory.take<Bfloat16>(whole), k = memory.take<Bfloat16>(whole), v = memory.take<Bfloat16>(whole);
  auto k_panels = memory.take<Bfloat16>(whole), v_panels = memory.take<Bfloat16>(whole), y = memory.take<Bfloat16>(whole);
  auto p = memory.take<Bfloat16>(kTile * n);
  auto scores = memory.take<float>(kTile * n);
  gather(qkv, sizes, at, kQueries, q);
  gather(qkv, sizes, at, kKeys, k);
  gather(qkv, sizes, at, kValues, v);
  copy_panels(width, n, {k, 1, width}, k_panels);
  copy_panels(n, width, {v, width, 1}, v_panels);
  for (int64_t i = 0; i < n; i += kTile) {
    multiply_rows(width, n, q + i * width, k_panels, scores);
    softmax(sizes, scores);
    round_rows(kTile * n, scores, p);
    multiply(kTile, n, width, p, v_panels, y + i * width);
  }
  scatter(y, y_arrays, sizes, at, 0);
}

// dS of kTile rows from P and dP, times the scale of the scores: into dP.
void score_gradient(const Sizes& sizes, const float* p, float* dp) {
  int64_t length = sizes.length();
  for (int64_t i = 0; i < kTile; i++, p += length, dp += length) {
    Vector total{};
    for (int64_t j = 0; j < length; j += kLanes) total += load(p + j) * load(dp + j);
    Vector mean = filled(sum(total));
    for (int64_t j = 0; j < length; j += kLanes)
      store(dp + j, load(p + j) * (load(dp + j) - mean) * sizes.scale());
  }
}

void backward_head(const Sizes& sizes, Head at, const Given& qkv, const Given& dy_arrays, const Made& dqkv) {
  int64_t n = sizes.length(), width = sizes.width(), whole = sizes.vectors();
  Tiles tiles;
  Memory memory(2 * (10 * whole + 3 * n * n) + 4 * 2 * kTile * n);
  auto take = [&] { return memory.take<Bfloat16>(whole); };
  Bfloat16 *q = take(), *k = take(), *v = take(), *dy = take(), *result = take();
  Bfloat16 *k_turned = take(), *v_turned = take(), *q_panels = take(), *k_panels = take(), *dy_panels = take();
  auto p = memory.take<Bfloat16>(n * n), ds = memory.take<Bfloat16>(n * n), turned = memory.take<Bfloat16>(n * n);
  auto p_rows = memory.take<float>(kTile * n), dp_rows = memory.take<float>(kTile * n);
  gather(qkv, sizes, at, kQueries, q);
  gather(qkv, sizes, at, kKeys, k);
  gather(qkv, sizes, at, kValues, v);
  gather(dy_arrays, sizes, at, 0, dy);
  copy_panels(width, n, {k, 1, width}, k_turned);
  copy_panels(width, n, {v, 1, width}, v_turned);
  copy_panels(n, width, {q, width, 1}, q_panels);
  copy_panels(n, width, {k, width, 1}, k_panels);
  copy_panels(n, width, {dy, width, 1}, dy_panels);
  for (int64_t i = 0; i < n; i += kTile) {
    multiply_rows(width, n, q + i * width, k_turned, p_rows);
    softmax(sizes, p_rows);
    multiply_rows(width, n, dy + i * width, v_turned, dp_rows);
    score_gradient(sizes, p_rows, dp_rows);
    round_rows(kTile * n, p_rows, p + i * n);
    round_rows(kTile * n, dp_rows, ds + i * n);
  }
  multiply(n, n, width, ds, k_panels, result);
  scatter(result, dqkv, sizes, at, kQueries);
  copy_columns(n, n, {ds, 1, n}, turned);
  multiply(n, n, width, turned, q_panels, result);
  scatter(result, dqkv, sizes, at, kKeys);
  copy_columns(n, n, {p, 1, n}, turned);
  multiply(n, n, width, turned, dy_panels, result);
  scatter(result, dqkv, sizes, at, kValues);
}

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t heads) {
  Sizes sizes{{1, 1, heads, 0}};
  Given qkv = described_all<ffi::BF16, const Bfloat16>(arguments, 0, arguments.size(), 3, sizes);
  Made y = described_all<ffi::BF16, Bfloat16>(results, 0, results.size(), 1, sizes);
  for (const auto& array : qkv) sizes.channels += array.rows * array.channels;
  in_parallel(pool, sizes.images * heads, [&](int64_t i) { forward_head(sizes, {i / heads, i % heads}, qkv, y); });
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t heads) {
  Sizes sizes{{1, 1, heads, 0}};
  size_t arrays = results.size();
  Given qkv = described_all<ffi::BF16, const Bfloat16>(arguments, 0, arrays, 3, sizes);
  Given dy = described_all<ffi::BF16, const Bfloat16>(arguments, arrays, 2 * arrays, 1, sizes);
  Made dqkv = described_all<ffi::BF16, Bfloat16>(results, 0, arrays, 3, sizes);
  for (const auto& array : qkv) sizes.channels += array.rows * array.channels;
  in_parallel(pool, sizes.images * heads,
              [&](int64_t i) { backward_head(sizes, {i / heads, i % heads}, qkv, dy, dqkv); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace equivit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_attention_bfloat16, equivit::forward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>("heads"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_attention_backward_bfloat16, equivit::backward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>("heads"));

#endif
