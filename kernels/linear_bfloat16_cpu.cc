// Linear maps in bfloat16, and their gradients, on a CPU with AMX.
//
// What `linear_cpu.cc` computes, in the same order, but by products of whole tiles: see `cpu_tiles.h`.  Sums are of
// float32 and rounded once, when all has been done to them; b and its gradient are of float32.

#include "cpu_tiles.h"

#ifdef EQUIVIT_BFLOAT16

#include "cpu_gelu.h"
#include "cpu_linear.h"
#include "cpu_threads.h"

namespace equivit {
namespace {

constexpr int64_t kTerms = 2048;  // of these a panel is 128 kB; of longer sums the first part waits in memory
constexpr int64_t kCached = 650'000;  // numbers of A that a task may have: they stay in the second cache

void activate(int64_t n, Bfloat16* x) {
  for (int64_t i = 0; i < n; i += kLanes) store_rounded(x + i, gelu(widened(x + i, kLanes)), kLanes);
}

// Rows of f(A), [kTile, whole_tiles(terms)], with zeros beyond them.
void copy_rows(int64_t rows, int64_t terms, Numbers a, bool activated, Bfloat16* to) {
  int64_t all = whole_tiles(terms);
  for (int64_t i = 0; i < kTile; i++, to += all) {
    copy_row(i < rows ? terms : 0, a.at + i * a.row, all, to);
    if (activated && i < rows) activate(all, to);
  }
}

// Adds up the columns of a panel: in each pair of terms the first number has the lower bits.
void add_columns(int64_t terms, const Bfloat16* panel, float* sums) {
  for (int64_t j = 0; j < kTile; j += kLanes) {
    Vector sum = load(sums + j);
    for (int64_t k = 0; k < terms; k += 2) {
      __m512i pairs = _mm512_loadu_si512(panel + k * kTile + 2 * j);
      sum += (Vector)_mm512_slli_epi32(pairs, 16) + (Vector)_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000));
    }
    store(sums + j, sum);
  }
}

void finish(const Product<Bfloat16>& p, const float* sums, Range rows, Range columns) {
  for (int64_t i = 0; i < rows.size; i++)
    for (int64_t j = 0; j < columns.size; j += kLanes) {
      int64_t column = columns.begin + j, at = (rows.begin + i) * p.columns + column, n = columns.size - j;
      Vector sum = load(sums + i * kTile + j);
      if (p.bias) sum += load(p.bias + column, n);
      if (p.x) sum *= gelu_gradient(widened(p.x + at, n));
      store_rounded(p.c + at, sum, n);
    }
}

// Some rows and columns of C.
void part(const Product<Bfloat16>& p, Range rows, Range columns, bool with_b_sums) {
  Tiles tiles;
  int64_t at_once = std::min(kTerms, whole_tiles(p.terms)), height = whole_tiles(rows.size);
  bool in_columns = p.a.column != 1, in_goes = p.terms > kTerms;
  int64_t waiting = in_goes ? height * whole_tiles(columns.size) : kTile * kTile;
  float* sums = scratch(waiting + whole_tiles(columns.size) + at_once * (kTile + height) / 2);
  float* b_sums = sums + waiting;
  auto of_b = reinterpret_cast<Bfloat16*>(b_sums + whole_tiles(columns.size)), of_a = of_b + at_once * kTile;
  std::fill_n(b_sums, whole_tiles(columns.size), 0.f);
  for (int64_t k = 0; k < p.terms; k += at_once) {
    int64_t n = std::min(at_once, p.terms - k), all = whole_tiles(n);
    if (in_columns) copy_columns(rows.size, n, p.a.from(rows.begin, k), of_a);
    if (in_columns && p.activated) activate(height * all, of_a);
    for (int64_t j = 0; j < columns.size; j += kTile) {
      Range panel{columns.begin + j, std::min(kTile, columns.size - j)};
      copy_panel(n, panel.size, p.b.from(k, panel.begin), of_b);
      if (with_b_sums) add_columns(n, of_b, b_sums + j);
      for (int64_t i = 0; i < rows.size; i += kTile) {
        Range tile{rows.begin + i, std::min(kTile, rows.size - i)};
        Numbers a = p.a.from(tile.begin, k);
        if (in_columns || p.activated || tile.size < kTile || n < all) {
          if (!in_columns && j == 0) copy_rows(tile.size, n, a, p.activated, of_a + i * all);
          a = {of_a + i * all, all, 1};
        }
        float* of_tile = in_goes ? sums + i * whole_tiles(columns.size) + j * kTile : sums;
        multiply_tiles(all, a.at, a.row, of_b, of_tile, k > 0);
        if (k + n == p.terms) finish(p, of_tile, tile, panel);
      }
    }
  }
  for (int64_t j = 0; with_b_sums && j < columns.size; j += kLanes)
    store(p.b_sums + columns.begin + j, load(b_sums + j), columns.size - j);
}

void compute(xla::ffi::ThreadPool& pool, const Product<Bfloat16>& p) {
  int64_t at_most = std::max(kTile, kCached / std::min(kTerms, p.terms));
  for_parts_of(pool, p, kTile, kTile, at_most, [=](Range rows, Range columns, bool with_b_sums) {
    part(p, rows, columns, with_b_sums);
  });
}

using InBfloat16 = Linear<xla::ffi::BF16, compute>;

}  // namespace
}  // namespace equivit

using equivit::InBfloat16;
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_linear_bfloat16, InBfloat16::forward, InBfloat16::of_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_linear_backward_x_bfloat16, InBfloat16::backward_x, InBfloat16::of_backward_x());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_linear_backward_weight_bfloat16, InBfloat16::backward_weight, InBfloat16::of_backward_weight());

#endif
