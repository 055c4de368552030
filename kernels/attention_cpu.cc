// Softmax attention on a CPU: head by head, so that all products of a head stay in the cache of one core.
//
// Reference: `reference` in attention.py.  Arrays: cpu_heads.h, as linear maps give them.  For a head of an image:
//
//   1. it gathers q and v [N, d] and k^T [d, N] of the head, d being the channels of all parts, padded to whole vectors;
//   2. for a block of queries: S = q k^T, P = exp(S - max), y = P v / sum, which it puts into place.
//
// The backward pass makes P again from q and k, then for the block
//
//   dP = dy v^T,  dS = P (dP - sum of P dP over keys),  dq = dS k,  dk += dS^T q,  dv += P^T dy.
//
// So nothing of N x N entries is ever in memory.

#include "cpu_heads.h"
#include "cpu_products.h"
#include "cpu_softmax.h"
#include "cpu_threads.h"

namespace equivit {
namespace {

constexpr int64_t kBlock = 96;  // the most queries at once: P and dS of 400 keys take 300 kB

struct Sizes : HeadSizes {
  int64_t width() const { return padded(channels); }
  int64_t keys() const { return padded(tokens); }
  // Blocks of about equal length, of whole tiles.
  int64_t block() const {
    int64_t blocks = (tokens + kBlock - 1) / kBlock, length = (tokens + blocks - 1) / blocks;
    return (length + kRows - 1) / kRows * kRows;
  }
};

// The head's vectors side by side: [tokens, width], 0 beyond the channels.  A copy is soon made, and products of the
// backward pass are faster with it than with vectors that are far apart.
void gather(const std::vector<Array<const float>>& arrays, const Sizes& sizes, Head at, int third, float* to) {
  int64_t width = sizes.width();
  for (int64_t i = 0; i < sizes.tokens; i++) std::fill(to + i * width + sizes.channels, to + (i + 1) * width, 0.f);
  for_parts(arrays, sizes, at, third, [&](const float* from, int64_t step, int64_t channels, int64_t before) {
    for (int64_t i = 0; i < sizes.tokens; i++) std::copy_n(from + i * step, channels, to + i * width + before);
  });
}

// [tokens, width] -> [width, keys] times a factor, 0 beyond the tokens.
void transpose(const Sizes& sizes, const float* from, float factor, float* to) {
  int64_t width = sizes.width(), keys = sizes.keys();
  for (int64_t start = 0; start < keys; start += kLanes) {  // so that a line of `to` is written while it is in the cache
    int64_t end = std::min(start + kLanes, sizes.tokens);
    for (int64_t c = 0; c < width; c++) {
      for (int64_t i = start; i < end; i++) to[c * keys + i] = factor * from[i * width + c];
      for (int64_t i = end; i < start + kLanes; i++) to[c * keys + i] = 0;
    }
  }
}

// Puts [rows, width] in the place of the head's vectors of the tokens from `first` on, row i times factor(i).
template <class Factors>
void scatter(const float* from, const std::vector<Array<float>>& arrays, const Sizes& sizes, Head at, int third,
             int64_t first, int64_t rows, Factors factor) {
  for_parts(arrays, sizes, at, third, [&](float* to, int64_t step, int64_t channels, int64_t before) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t c = 0; c < channels; c += kLanes)
        store(to + (first + i) * step + c, factor(i) * load(from + i * sizes.width() + before + c, channels - c),
              channels - c);
  });
}

using Given = std::vector<Array<const float>>;
using Made = std::vector<Array<float>>;

void forward_head(const Sizes& sizes, Head at, const Given& qkv, const Made& y) {
  int64_t n = sizes.tokens, width = sizes.width(), keys = sizes.keys(), block = sizes.block();
  float* q = scratch(2 * n * width + width * keys + block * (keys + width + 1));
  float *v = q + n * width, *k_turned = v + n * width, *p = k_turned + width * keys, *sums = p + block * keys;
  float* inverse = sums + block * width;
  gather(qkv, sizes, at, kKeys, v);
  transpose(sizes, v, sizes.scale(), k_turned);
  gather(qkv, sizes, at, kQueries, q);
  gather(qkv, sizes, at, kValues, v);
  for (int64_t first = 0; first < n; first += block) {
    int64_t rows = std::min(block, n - first);
    product(rows, keys, width, {q + first * width, width, 1}, k_turned, keys, p, keys);
    exponentials(rows, n, keys, 1, p, inverse);
    product(rows, width, n, {p, keys, 1}, v, width, sums, width);
    scatter(sums, y, sizes, at, 0, first, rows, [=](int64_t i) { return inverse[i]; });
  }
}

void backward_head(const Sizes& sizes, Head at, const Given& qkv, const Given& dy_arrays, const Made& dqkv) {
  int64_t n = sizes.tokens, width = sizes.width(), keys = sizes.keys(), block = sizes.block();
  int64_t whole = n * width, turned = width * keys;
  float* q = scratch(5 * whole + 2 * turned + block * (2 * keys + width + 1));
  float *k = q + whole, *dy = k + whole, *dk = dy + whole, *dv = dk + whole, *k_turned = dv + whole;
  float *v_turned = k_turned + turned, *p = v_turned + turned, *dp = p + block * keys, *dq = dp + block * keys;
  float *inverse = dq + block * width, scale = sizes.scale();
  gather(qkv, sizes, at, kValues, k);
  transpose(sizes, k, 1, v_turned);
  gather(qkv, sizes, at, kKeys, k);
  transpose(sizes, k, scale, k_turned);
  gather(qkv, sizes, at, kQueries, q);
  gather(dy_arrays, sizes, at, 0, dy);
  for (int64_t first = 0; first < n; first += block) {
    int64_t rows = std::min(block, n - first);
    const float *q_block = q + first * width, *dy_block = dy + first * width;
    product(rows, keys, width, {q_block, width, 1}, k_turned, keys, p, keys);
    exponentials(rows, n, keys, 1, p, inverse);
    product(rows, keys, width, {dy_block, width, 1}, v_turned, keys, dp, keys);
    softmax_gradient(rows, keys, inverse, p, dp);
    product(rows, width, n, {dp, keys, 1}, k, width, dq, width);
    scatter(dq, dqkv, sizes, at, kQueries, first, rows, [=](int64_t) { return scale; });
    product(n, width, rows, {dp, 1, keys}, q_block, width, dk, width, first > 0);
    product(n, width, rows, {p, 1, keys}, dy_block, width, dv, width, first > 0);
  }
  scatter(dk, dqkv, sizes, at, kKeys, 0, n, [=](int64_t) { return scale; });
  scatter(dv, dqkv, sizes, at, kValues, 0, n, [](int64_t) { return 1.f; });
}

}  // namespace
}  // namespace equivit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_attention, (equivit::for_heads<xla::ffi::F32, equivit::Sizes, equivit::forward_head>), equivit::of_heads());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_attention_backward,
    (equivit::for_heads_backward<xla::ffi::F32, equivit::Sizes, equivit::backward_head>), equivit::of_heads());
