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

constexpr int64_t kTerms = 2048;  // of these a panel is 128 kB; of longer sums parts wait in memory
constexpr int64_t kOfPanels = 3072;  // at most as many terms of all panels together that are made at once
constexpr int64_t kCached = 650'000;  // numbers of A that a task may have: they stay in the second cache

void activate(int64_t n, Bfloat16* x) {
  for (int64_t i = 0; i < n; i += kLanes) store_rounded(x + i, gelu(widened(x + i, kLanes)), kLanes);
}

// Rows of f(A), [kTile, whole_tiles(terms)], with zeros beyond them, `to_row` apart.
void copy_rows(int64_t rows, int64_t terms, Numbers a, bool activated, Bfloat16* to, int64_t to_row) {
  int64_t all = whole_tiles(terms);
  for (int64_t i = 0; i < kTile; i++, to += to_row) {
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

// Lines of the cache, some in each of some rows, to be fetched a row at a time: a core waits for few lines at once, and
// those of A and B must not stand behind them.
struct Lines {
  const Bfloat16* at;
  int64_t step, left, of_row = 1;

  void fetch(bool to_write) {
    if (left-- <= 0) return;
    for (int64_t line = 0; line < of_row; line++)
      if (to_write) __builtin_prefetch(at + line * kTile, 1);
      else __builtin_prefetch(at + line * kTile);
    at += step;
  }
};

// Some rows and columns of C, of which some panels are made at once: what is written of a row is then more than a line,
// and A is read less often.
void part(const Product<Bfloat16>& p, Range rows, Range columns, bool with_b_sums) {
  Tiles tiles;
  int64_t goes = (p.terms + kTerms - 1) / kTerms, at_once = whole_tiles((p.terms + goes - 1) / goes);
  int64_t height = whole_tiles(rows.size), width = whole_tiles(columns.size);
  int64_t panels = std::clamp<int64_t>(kOfPanels / at_once, 1, 4);
  int64_t a_row = (at_once / kTile | 1) * kTile;  // an odd number of lines, so that rows lie in different sets
  bool in_columns = p.a.column != 1;
  int64_t waiting = goes > 1 ? height * width : kTile * kTile;
  float* sums = scratch(waiting + width + (panels * at_once * kTile + a_row * height) / 2);
  float* b_sums = sums + waiting;
  auto of_b = reinterpret_cast<Bfloat16*>(b_sums + width), of_a = of_b + panels * at_once * kTile;
  std::fill_n(b_sums, width, 0.f);
  for (int64_t k = 0; k < p.terms; k += at_once) {
    int64_t n = std::min(at_once, p.terms - k), all = whole_tiles(n);
    bool last = k + n == p.terms;
    if (in_columns) copy_columns(rows.size, n, p.a.from(rows.begin, k), of_a, a_row);
    for (int64_t i = 0; in_columns && p.activated && i < rows.size; i++) activate(all, of_a + i * a_row);
    for (int64_t j = 0; j < columns.size; j += panels * kTile) {
      int64_t end = std::min(columns.size, j + panels * kTile);
      int64_t ahead = (std::min(columns.size - end, panels * kTile) + kTile - 1) / kTile;
      for (int64_t c = j; c < end; c += kTile) {
        Bfloat16* panel = of_b + (c - j) * at_once;
        copy_panel(n, std::min(kTile, columns.size - c), p.b.from(k, columns.begin + c), panel);
        if (with_b_sums) add_columns(n, panel, b_sums + c);
      }
      Lines next{p.b.from(k, columns.begin + end).at, p.b.row, p.b.column == 1 ? n : 0, ahead};
      for (int64_t i = 0; i < rows.size; i += kTile) {
        Range of_rows{rows.begin + i, std::min(kTile, rows.size - i)};
        Numbers a = p.a.from(of_rows.begin, k);
        if (in_columns || p.activated || of_rows.size < kTile || n < all) {
          if (!in_columns && j == 0) copy_rows(of_rows.size, n, a, p.activated, of_a + i * a_row, a_row);
          a = {of_a + i * a_row, a_row, 1};
        }
        for (int64_t c = j; c < end; c += kTile) {
          Range of_columns{columns.begin + c, std::min(kTile, columns.size - c)};
          int64_t at = of_rows.begin * p.columns + of_columns.begin, finished = last ? of_rows.size : 0;
          Lines result{p.c + at, p.columns, finished}, x = p.x ? Lines{p.x + at, p.columns, finished} : Lines{};
          float* tile = goes > 1 ? sums + i * width + c * kTile : sums;
          multiply_tiles(all, a.at, a.row, of_b + (c - j) * at_once, tile, k > 0, [&]() __attribute__((always_inline)) {
            result.fetch(true), x.fetch(false), next.fetch(false);
          });
          if (last) finish(p, tile, of_rows, of_columns);
        }
      }
    }
  }
  for (int64_t j = 0; with_b_sums && j < columns.size; j += kLanes)
    store(p.b_sums + columns.begin + j, load(b_sums + j), columns.size - j);
}

void compute(xla::ffi::ThreadPool& pool, const Product<Bfloat16>& p) {
  int64_t goes = (p.terms + kTerms - 1) / kTerms, at_most = std::max(kTile, kCached * goes / p.terms);
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
