// Linear maps in bfloat16, and their gradients, on a CPU with AMX.
//
// What `linear_cpu.cc` computes, but by products of whole tiles: see `cpu_tiles.h`.  First the threads share the work of
// copying B into panels, for all to read; then each makes its part of C.  Sums are of float32 and rounded once, when all
// has been done to them; b and its gradient are of float32.

#include "cpu_tiles.h"

#ifdef EQUIVIT_BFLOAT16

#include "cpu_gelu.h"
#include "cpu_linear.h"
#include "cpu_threads.h"

namespace equivit {
namespace {

constexpr int64_t kPanels = 16'000'000;  // numbers of B that are copied at once
constexpr int64_t kTerms = 4096;  // of these a panel is 256 kB; of longer sums parts wait in memory
constexpr int64_t kOfPanels = 3072;  // at most as many terms of all panels together that are made at once
constexpr int64_t kCached = 650'000;  // numbers of A that a task may have: they stay in the second cache

void activate(int64_t n, Bfloat16* x) {
  for (int64_t i = 0; i < n; i += kLanes) store_rounded(x + i, gelu<true>(widened(x + i, kLanes)), kLanes);
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
      if (p.x) sum *= gelu_gradient<true>(widened(p.x + at, n));
      store_rounded(p.c + at, sum, n);
    }
}

// The lines of the cache that rows of a tile of C lie in, to be fetched one at a time: a core waits for few lines at once,
// and those of A and B must not stand behind them.
struct Lines {
  const Bfloat16* at;
  int64_t step, left;

  void fetch(bool to_write) {
    if (left-- <= 0) return;
    if (to_write) __builtin_prefetch(at, 1);
    else __builtin_prefetch(at);
    at += step;
  }
};

// Some rows and columns of C, the panels of these given.  Some panels are taken at once: what is written of a row is then
// more than a line, and A is read less often.
void part(const Product<Bfloat16>& p, Range rows, Range columns, const Bfloat16* panels) {
  Tiles tiles;
  int64_t goes = (p.terms + kTerms - 1) / kTerms, at_once = whole_tiles((p.terms + goes - 1) / goes);
  int64_t height = whole_tiles(rows.size), width = whole_tiles(columns.size), panel = whole_tiles(p.terms) * kTile;
  int64_t group = std::clamp<int64_t>(kOfPanels / at_once, 1, 4) * kTile;
  int64_t a_row = (at_once / kTile | 1) * kTile;  // an odd number of lines, so that rows lie in different sets
  bool in_columns = p.a.column != 1;
  int64_t waiting = goes > 1 ? height * width : kTile * kTile;
  float* sums = scratch(waiting + a_row * height / 2);
  auto of_a = reinterpret_cast<Bfloat16*>(sums + waiting);
  for (int64_t k = 0; k < p.terms; k += at_once) {
    int64_t n = std::min(at_once, p.terms - k), all = whole_tiles(n);
    bool last = k + n == p.terms;
    if (in_columns) copy_columns(rows.size, n, p.a.from(rows.begin, k), of_a, a_row);
    for (int64_t i = 0; in_columns && p.activated && i < rows.size; i++) activate(all, of_a + i * a_row);
    for (int64_t j = 0; j < columns.size; j += group)
      for (int64_t i = 0; i < rows.size; i += kTile) {
        Range of_rows{rows.begin + i, std::min(kTile, rows.size - i)};
        Numbers a = p.a.from(of_rows.begin, k);
        if (in_columns || p.activated || of_rows.size < kTile || n < all) {
          if (!in_columns && j == 0) copy_rows(of_rows.size, n, a, p.activated, of_a + i * a_row, a_row);
          a = {of_a + i * a_row, a_row, 1};
        }
        for (int64_t c = j; c < std::min(columns.size, j + group); c += kTile) {
          Range of_columns{columns.begin + c, std::min(kTile, columns.size - c)};
          int64_t at = of_rows.begin * p.columns + of_columns.begin, finished = last ? of_rows.size : 0;
          Lines result{p.c + at, p.columns, finished}, x = p.x ? Lines{p.x + at, p.columns, finished} : Lines{};
          float* tile = goes > 1 ? sums + i * width + c * kTile : sums;
          const Bfloat16* b = panels + c / kTile * panel + k * kTile;
          multiply_tiles(all, a.at, a.row, b, tile, k > 0, [&]() __attribute__((always_inline)) {
            result.fetch(true), x.fetch(false);
          });
          if (last) finish(p, tile, of_rows, of_columns);
        }
      }
  }
}

// All panels of some columns of B, each thread as many of them, and the sums of the columns.
void copy_b(xla::ffi::ThreadPool& pool, const Product<Bfloat16>& p, Range columns, Bfloat16* panels) {
  int64_t panel = whole_tiles(p.terms) * kTile, count = (columns.size + kTile - 1) / kTile;
  int64_t tasks = std::clamp<int64_t>(pool.num_threads(), 1, count);
  in_parallel(pool, tasks, [=](int64_t task) {
    int64_t begin = count * task / tasks * kTile, end = std::min(columns.size, count * (task + 1) / tasks * kTile);
    Bfloat16* mine = panels + begin / kTile * panel;
    copy_panels(p.terms, end - begin, p.b.from(0, columns.begin + begin), mine);
    if (!p.b_sums) return;
    for (int64_t j = begin; j < end; j += kTile, mine += panel) {
      float sums[kTile] = {};
      add_columns(p.terms, mine, sums);
      std::copy_n(sums, std::min(kTile, end - j), p.b_sums + columns.begin + j);
    }
  });
}

// C, some columns after others if there are too many panels.
void compute(xla::ffi::ThreadPool& pool, const Product<Bfloat16>& p) {
  int64_t goes = (p.terms + kTerms - 1) / kTerms, at_most = std::max(kTile, kCached * goes / p.terms);
  int64_t panel = whole_tiles(p.terms) * kTile, step = std::max<int64_t>(1, kPanels / panel) * kTile;
  for (int64_t begin = 0; begin < p.columns; begin += step) {
    Range some{begin, std::min(step, p.columns - begin)};
    auto panels = reinterpret_cast<Bfloat16*>(scratch<1>(panel * whole_tiles(some.size) / kTile / 2));
    copy_b(pool, p, some, panels);
    for_parts_of(pool, p.rows, some.size, kTile, kTile, at_most, [=](Range rows, Range columns) {
      part(p, rows, {begin + columns.begin, columns.size}, panels + columns.begin / kTile * panel);
    });
  }
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
