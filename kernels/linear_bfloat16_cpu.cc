// Linear maps in bfloat16, and their gradients, on a CPU with AMX.
//
// What `linear_cpu.cc` computes, in the same order, but by products of whole tiles: see `cpu_tiles.h`.  Sums are of
// float32 and rounded once, when all has been done to them; b and its gradient are of float32.

#include "cpu_tiles.h"

#ifdef EQUIVIT_BFLOAT16

#include "cpu_gelu.h"
#include "cpu_threads.h"

namespace equivit {
namespace {

namespace ffi = xla::ffi;
using Buffer = ffi::Buffer<ffi::BF16>;
using Result = ffi::ResultBuffer<ffi::BF16>;

constexpr int64_t kTerms = 2048;  // of these a panel is 128 kB; of longer sums the first part waits in memory
constexpr int64_t kCached = 650'000;  // numbers of A that a task may have: they stay in the second cache

// C = f(A) B, and what becomes of its sums: b is added, or they are multiplied by f'(x).
struct Product {
  int64_t rows, columns, terms;
  Numbers a, b;
  bool activated;  // f is the GELU
  Bfloat16* c;
  const float* bias;  // or null, as those below
  const Bfloat16* x;
  float* b_sums;  // those of B's columns
};

struct Range {
  int64_t begin, size;
};

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

void finish(const Product& p, const float* sums, Range rows, Range columns) {
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
void part(const Product& p, Range rows, Range columns, bool with_b_sums) {
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

void compute(ffi::ThreadPool& pool, const Product& p) {
  bool by_rows = p.rows >= p.columns;
  int64_t all = by_rows ? p.rows : p.columns, units = whole_tiles(all) / kTile;
  int64_t threads = std::max<int64_t>(1, pool.num_threads());
  int64_t at_most = std::max(kTile, kCached / std::min(kTerms, p.terms));
  int64_t rounds = by_rows ? (all + threads * at_most - 1) / (threads * at_most) : 1;
  int64_t of_task = (units + threads * rounds - 1) / (threads * rounds) * kTile;
  in_parallel(pool, (all + of_task - 1) / of_task, [=](int64_t task) {
    Range mine{task * of_task, std::min(of_task, all - task * of_task)};
    if (by_rows) part(p, mine, {0, p.columns}, p.b_sums && task == 0);  // all tasks with rows have the same B
    else part(p, {0, p.rows}, mine, p.b_sums);
  });
}

int64_t last(const Buffer& x) { return x.dimensions()[x.dimensions().size() - 1]; }
Numbers factor(const Buffer& x) { return {x.typed_data(), last(x), 1}; }
Numbers turned(const Buffer& x) { return {x.typed_data(), 1, last(x)}; }

// Arguments and results are those in linear_cpu.cc.
ffi::Error forward(ffi::ThreadPool pool, Buffer x, Buffer weight, ffi::RemainingArgs bias, Result y, bool activated) {
  int64_t terms = last(x), rows = x.element_count() / terms;
  const float* b = bias.size() ? (*bias.get<ffi::Buffer<ffi::F32>>(0)).typed_data() : nullptr;
  compute(pool, {rows, last(weight), terms, factor(x), factor(weight), activated, y->typed_data(), b, nullptr, nullptr});
  return ffi::Error::Success();
}

ffi::Error backward_x(ffi::ThreadPool pool, Buffer dy, Buffer weight, ffi::RemainingArgs x, Result dx) {
  int64_t terms = last(dy), rows = dy.element_count() / terms;
  const Bfloat16* of_gelu = x.size() ? (*x.get<Buffer>(0)).typed_data() : nullptr;
  compute(pool, {rows, last(*dx), terms, factor(dy), turned(weight), false, dx->typed_data(), nullptr, of_gelu, nullptr});
  return ffi::Error::Success();
}

ffi::Error backward_weight(ffi::ThreadPool pool, Buffer x, Buffer dy, Result d_weight, ffi::RemainingRets d_bias,
                           bool activated) {
  int64_t rows = last(x), terms = x.element_count() / rows;
  float* sums = d_bias.size() ? (*d_bias.get<ffi::Buffer<ffi::F32>>(0))->typed_data() : nullptr;
  compute(pool, {rows, last(dy), terms, turned(x), factor(dy), activated, d_weight->typed_data(), nullptr, nullptr, sums});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace equivit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_linear_bfloat16, equivit::forward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<equivit::Buffer>().Arg<equivit::Buffer>().RemainingArgs()
        .Ret<equivit::Buffer>().Attr<bool>("activated"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_linear_backward_x_bfloat16, equivit::backward_x,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<equivit::Buffer>().Arg<equivit::Buffer>().RemainingArgs()
        .Ret<equivit::Buffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_linear_backward_weight_bfloat16, equivit::backward_weight,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<equivit::Buffer>().Arg<equivit::Buffer>()
        .Ret<equivit::Buffer>().RemainingRets().Attr<bool>("activated"));

#endif
