// Softmax attention in bfloat16 on a CPU with AMX.
//
// What `attention_cpu.cc` computes, head by head, by products of whole tiles: see `cpu_tiles.h`.  Vectors of a head are
// [tokens, channels], both padded with zeros to whole tiles.  P, its gradient and the softmax are of float32; P and dS
// are rounded where they enter a product.  The backward pass keeps P and dS of a head: their transposes are factors, too.

#include "cpu_tiles.h"

#ifdef EQUIVIT_BFLOAT16

#include "cpu_heads.h"
#include "cpu_softmax.h"
#include "cpu_threads.h"

namespace equivit {
namespace {

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

void copy_numbers(int64_t n, const Bfloat16* from, Bfloat16* to) {
  for (; n >= kTile; n -= kTile, from += kTile, to += kTile) _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  if (n) _mm512_mask_storeu_epi16(to, (1u << n) - 1, some_numbers(from, n));
}

void gather(const Given& arrays, const Sizes& sizes, Head at, int third, Bfloat16* to) {
  std::fill_n(to, sizes.vectors(), 0);
  for_parts(arrays, sizes, at, third, [&](const Bfloat16* from, int64_t step, int64_t channels, int64_t before) {
    for (int64_t i = 0; i < sizes.tokens; i++) copy_numbers(channels, from + i * step, to + i * sizes.width() + before);
  });
}

void scatter(const Bfloat16* from, const Made& arrays, const Sizes& sizes, Head at, int third) {
  for_parts(arrays, sizes, at, third, [&](Bfloat16* to, int64_t step, int64_t channels, int64_t before) {
    for (int64_t i = 0; i < sizes.tokens; i++) copy_numbers(channels, from + i * sizes.width() + before, to + i * step);
  });
}

// kTile rows of products, [kTile, columns], of contiguous rows of A and panels of B.
void multiply_rows(int64_t terms, int64_t columns, const Bfloat16* a, const Bfloat16* b, float* to) {
  for (int64_t j = 0; j < columns; j += kTile) multiply_tiles(terms, a, terms, b + j * terms, to + j, false, {}, columns);
}

// All rows of a product, row i times factor(i), rounded: [rows, columns].
template <class Factors>
void multiply(int64_t rows, int64_t terms, int64_t columns, const Bfloat16* a, const Bfloat16* b, Factors factor,
              Bfloat16* to) {
  alignas(64) float sums[kTile * kTile];
  for (int64_t i = 0; i < rows; i += kTile)
    for (int64_t j = 0; j < columns; j += kTile) {
      multiply_tiles(terms, a + i * terms, terms, b + j * terms, sums, false);
      for (int64_t r = 0; r < kTile; r++)
        for (int64_t h = 0; h < kTile; h += kLanes)
          store_rounded(to + (i + r) * columns + j + h, factor(i + r) * load(sums + r * kTile + h), kLanes);
    }
}

float one(int64_t) { return 1; }

// `exponentials` that are rounded.  What lies beyond n is 2^-126, and is to be multiplied by 0.
void rounded_exponentials(int64_t rows, int64_t n, int64_t length, float factor, float* x, float* inverse,
                          Bfloat16* to) {
  factor *= 1.44269504f;
  find_largest(rows, n, length, x, inverse);
  for (int64_t i = 0; i < rows; i++) {
    Vector top = filled(inverse[i]), even{}, odd{};
    auto rounded = [&](int64_t at) {
      Vector e = coarse_exp2(max(filled(-126.f), factor * (load(x + at) - top)));
      store_rounded(to + at, e, kLanes);
      return e;
    };
    for (int64_t j = i * length; j < (i + 1) * length; j += kTile) even += rounded(j), odd += rounded(j + kLanes);
    inverse[i] = 1 / sum(even + odd);
  }
}

// kTile rows, row i times factor(i), rounded.
template <class Factors>
void round_rows(int64_t columns, const float* from, Factors factor, Bfloat16* to) {
  for (int64_t i = 0; i < kTile; i++)
    for (int64_t j = i * columns; j < (i + 1) * columns; j += kLanes)
      store_rounded(to + j, factor(i) * load(from + j), kLanes);
}

void forward_head(const Sizes& sizes, Head at, const Given& qkv, const Made& y_arrays) {
  int64_t n = sizes.length(), width = sizes.width(), whole = sizes.vectors();
  Tiles tiles;
  Memory memory(2 * (6 * whole + kTile * n) + 4 * kTile * n);
  auto take = [&] { return memory.take<Bfloat16>(whole); };
  Bfloat16 *q = take(), *k = take(), *v = take(), *k_panels = take(), *v_panels = take(), *y = take();
  auto p = memory.take<Bfloat16>(kTile * n);
  auto scores = memory.take<float>(kTile * n);
  float inverse[kTile] = {};
  gather(qkv, sizes, at, kQueries, q);
  gather(qkv, sizes, at, kKeys, k);
  gather(qkv, sizes, at, kValues, v);
  copy_panels(width, n, {k, 1, width}, k_panels);
  copy_panels(n, width, {v, width, 1}, v_panels);
  for (int64_t i = 0; i < n; i += kTile) {
    multiply_rows(width, n, q + i * width, k_panels, scores);
    int64_t rows = std::min(kTile, sizes.tokens - i);  // further ones of P stay what they are: nobody reads their y
    rounded_exponentials(rows, sizes.tokens, n, sizes.scale(), scores, inverse, p);
    multiply(kTile, n, width, p, v_panels, [&](int64_t row) { return inverse[row]; }, y + i * width);
  }
  scatter(y, y_arrays, sizes, at, 0);
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
  float inverse[kTile], scale = sizes.scale();
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
    exponentials(kTile, sizes.tokens, n, scale, p_rows, inverse);
    multiply_rows(width, n, dy + i * width, v_turned, dp_rows);
    softmax_gradient(kTile, n, inverse, p_rows, dp_rows);
    round_rows(n, p_rows, [](int64_t) { return 1.f; }, p + i * n);
    round_rows(n, dp_rows, [=](int64_t) { return scale; }, ds + i * n);
  }
  multiply(n, n, width, ds, k_panels, one, result);
  scatter(result, dqkv, sizes, at, kQueries);
  copy_columns(n, n, {ds, 1, n}, turned, n);
  multiply(n, n, width, turned, q_panels, one, result);
  scatter(result, dqkv, sizes, at, kKeys);
  copy_columns(n, n, {p, 1, n}, turned, n);
  multiply(n, n, width, turned, dy_panels, one, result);
  scatter(result, dqkv, sizes, at, kValues);
}

}  // namespace
}  // namespace equivit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_attention_bfloat16, (equivit::for_heads<xla::ffi::BF16, equivit::Sizes, equivit::forward_head>),
    equivit::of_heads());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_attention_backward_bfloat16,
    (equivit::for_heads_backward<xla::ffi::BF16, equivit::Sizes, equivit::backward_head>), equivit::of_heads());

#endif
