// Linear maps on a CPU, and their gradients.
//
// Reference: `reference` in linear.py.  With f the identity or the GELU,
//
//   y = f(x) W + b;  dx = (dy W^T) f'(x);  dW = f(x)^T dy,  db = the sum of dy over tokens.
//
// Each is a product C = A B of arrays that no cache holds.  A core has some rows of C, or some columns if there are
// more of these.  Of its part it makes
//
//   at most kLength terms of all sums, before it goes on to the next terms;
//     of these a panel of columns after the other;
//       and of a panel a tile of rows after the other, which stays in registers while the terms are added up.
//
// What is read many times is copied before, in the order in which it will be read: these terms of f(A) for all panels
// at once, tile after tile, and a panel of B whenever one begins.  So both come from the second cache as one stream
// each, A once for each panel, B once for each tile.  C is large, too, but written once: what a tile wants of it is
// fetched while its sums are made.  Between terms sums lie in C.  What else is to be done to a sum (b, f') is done when
// it is complete, before a tile leaves its registers.

#include <algorithm>
#include <cstring>

#include "cpu_gelu.h"
#include "cpu_linear.h"
#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace equivit {
namespace {

using Factor = Matrix<float>;

// A tile fills the registers, and for each number of A there are kWide multiplications, for each vector of B kTall.
constexpr int kTall = kLanes == 8 ? 6 : 8, kWide = kLanes == 8 ? 2 : 3;
constexpr int64_t kLength = 800, kRowsOfTask = 100 * kTall;  // at most
constexpr int kStep = 16;                                    // terms between two fetches

// What becomes of a panel's sums.  Those that are not complete lie where the result will be.
struct Sums {
  float* result;
  int64_t width;
  bool first = true, last = true;  // whether they begin with these terms, and end with them

  float* at(int64_t row, int64_t column) const { return result + row * width + column; }
  void move(int64_t row, int64_t column) { result = at(row, column); }
  void prefetch(int64_t row, int64_t column) const { __builtin_prefetch(at(row, column), 1); }
  Vector total(int64_t row, int64_t column, Vector sum, int64_t n) const {
    return first ? sum : sum + load(at(row, column), n);
  }
};

// y, or dW, with a bias unless it is null.
struct Biased : Sums {
  const float* bias;

  void move(int64_t row, int64_t column) {
    Sums::move(row, column);
    if (bias) bias += column;
  }
  void operator()(int64_t row, int64_t column, Vector sum, int64_t n) const {
    Vector result = total(row, column, sum, n);
    store(at(row, column), last && bias ? result + load(bias + column, n) : result, n);
  }
};

// dx of a GELU.
struct Activated : Sums {
  const float* x;

  void move(int64_t row, int64_t column) {
    Sums::move(row, column);
    x += row * width + column;
  }
  void prefetch(int64_t row, int64_t column) const {
    Sums::prefetch(row, column);
    __builtin_prefetch(x + row * width + column);
  }
  void operator()(int64_t row, int64_t column, Vector sum, int64_t n) const {
    Vector result = total(row, column, sum, n);
    store(at(row, column), last ? result * gelu_gradient(load(x + row * width + column, n)) : result, n);
  }
};

// A matrix of 4 x 4 numbers, transposed: neighbours of pairs of rows, and then pairs of these.
inline void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
#if defined(__clang__) || __GNUC__ >= 12
  typedef float Four __attribute__((vector_size(16)));
  Four x[4], pairs[4], y[4];
  for (int i = 0; i < 4; i++) std::memcpy(&x[i], from + i * from_row, sizeof(Four));
  for (int i = 0; i < 2; i++) {
    pairs[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 4, 1, 5);
    pairs[2 + i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 6, 3, 7);
  }
  for (int i = 0; i < 2; i++) {
    y[2 * i] = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 0, 1, 4, 5);
    y[2 * i + 1] = __builtin_shufflevector(pairs[2 * i], pairs[2 * i + 1], 2, 3, 6, 7);
  }
  for (int i = 0; i < 4; i++) std::memcpy(to + i * to_row, &y[i], sizeof(Four));
#else
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) to[j * to_row + i] = from[i * from_row + j];
#endif
}

// Numbers that lie [columns, length] in memory, as [length, width], with zeros for the columns that are not there.
void copy_turned(int64_t length, int64_t columns, const float* from, int64_t step, int64_t width, float* to) {
  for (int64_t j = 0; j < width; j += 4) {
    int64_t k = 0, n = std::min<int64_t>(4, width - j);
    for (; j + 4 <= columns && k + 4 <= length; k += 4) transpose(from + j * step + k, step, to + k * width + j, width);
    for (; k < length; k++)
      for (int64_t i = j; i < j + n; i++) to[k * width + i] = i < columns ? from[i * step + k] : 0;
  }
}

// A panel [length, padded(columns)] of B.
void copy_panel(int64_t length, int64_t columns, Factor b, float* to) {
  int64_t width = padded(columns);
  if (b.column != 1) return copy_turned(length, columns, b.at, b.column, width, to);
  for (int64_t k = 0; k < length; k++)
    for (int64_t j = 0; j < width; j += kLanes) store(to + k * width + j, load(b.at + k * b.row + j, columns - j));
}

// The sums of a panel's columns, or these terms of them.
void add_columns(int64_t length, int64_t columns, const float* panel, float* sums, bool first) {
  int64_t width = padded(columns);
  for (int64_t j = 0; j < columns; j += kLanes) {
    Vector sum = first ? Vector{} : load(sums + j, columns - j);
    for (int64_t k = 0; k < length; k++) sum += load(panel + k * width + j);
    store(sums + j, sum, columns - j);
  }
}

// To copy all numbers first and then apply f is faster: reads from memory must not wait for f.
void activate(int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, gelu(load(x + i, n - i)), n - i);
}

// Tiles of an A in columns.  A column is read to its end: memory is fast in order.
void copy_columns(int64_t rows, int64_t length, Factor a, float* to) {
  int64_t complete = rows / kTall * kTall;
  if (complete < rows) std::fill_n(to + complete * length, kTall * length, 0.f);
  for (int64_t k = 0; k < length; k++) {
    const float* from = a.at + k * a.column;
    float* at = to + k * kTall;
    for (int64_t i = 0; i < complete; i += kTall) std::memcpy(at + i * length, from + i, kTall * sizeof(float));
    std::copy_n(from + complete, rows - complete, at + complete * length);
  }
}

// Tiles [length, kTall] of f(A), one after the other, with zeros for the rows that the last one has not.
void copy_tiles(int64_t rows, int64_t length, Factor a, bool activated, float* to) {
  if (a.column != 1) copy_columns(rows, length, a, to);
  for (int64_t i = 0; i < rows; i += kTall) {
    float* tile = to + i * length;
    if (a.column == 1) copy_turned(length, std::min<int64_t>(kTall, rows - i), a.from(i).at, a.row, kTall, tile);
    if (activated) activate(kTall * length, tile);
  }
}

// A tile of A times a panel of B.  It calls fetch() every kStep terms, and do_vector(i, j, sum) with each vector of sums.
template <int columns, class Fetch, class Function>
inline void tile(int64_t length, const float* a, const float* b, Fetch fetch, Function do_vector) {
  Vector sums[kTall][columns];
#pragma GCC unroll 16
  for (int i = 0; i < kTall; i++)
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) sums[i][j] = Vector{};
  auto add_term = [&](int64_t k) __attribute__((always_inline)) {
    Vector row[columns];
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) row[j] = load(b + (k * columns + j) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTall; i++) {
      Vector number = filled(a[k * kTall + i]);
#pragma GCC unroll 16
      for (int j = 0; j < columns; j++) sums[i][j] += number * row[j];
    }
  };
  int64_t k = 0;
  for (; k + kStep <= length; k += kStep) {
    fetch();
#pragma GCC unroll 16
    for (int i = 0; i < kStep; i++) add_term(k + i);
  }
  for (; k < length; k++) add_term(k);
#pragma GCC unroll 16
  for (int i = 0; i < kTall; i++)
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) do_vector(i, j, sums[i][j]);
}

// A panel of C, whose last vector may have fewer numbers.
template <int vectors, class Finish>
void panel(int64_t rows, int64_t length, const float* a, const float* b, int64_t columns, Finish finish) {
  for (int64_t i = 0; i < rows; i += kTall) {
    int64_t here = std::min<int64_t>(kTall, rows - i), fetched = 0;
    // A row at a time: a core waits for few lines of memory at once, and those of B must not stand behind all of C's.
    auto fetch = [&]() __attribute__((always_inline)) {
      if (fetched == here) return;
#pragma GCC unroll 16
      for (int j = 0; j < vectors; j++) finish.prefetch(i + fetched, j * kLanes);
      fetched++;
    };
    auto do_vector = [&](int r, int j, Vector sum) __attribute__((always_inline)) {
      if (r < here) finish(i + r, j * kLanes, sum, columns - j * kLanes);
    };
    tile<vectors>(length, a + i * length, b, fetch, do_vector);
  }
}

// These rows and columns of C, and the sums of B's columns.
template <class Finish>
void part(const Product<float>& p, Finish finish, Range rows, Range columns) {
  int64_t goes = (p.terms + kLength - 1) / kLength, at_once = (p.terms + goes - 1) / goes;
  float* of_b = scratch(at_once * (kWide * kLanes + rows.size + kTall));
  float* of_a = of_b + at_once * kWide * kLanes;
  for (int64_t k = 0; k < p.terms; k += at_once) {
    int64_t n = std::min(at_once, p.terms - k), width;
    copy_tiles(rows.size, n, p.a.from(rows.begin, k), p.activated, of_a);
    for (int64_t j = 0; j < columns.size; j += width) {
      int64_t vectors = padded(columns.size - j) / kLanes, column = columns.begin + j;
      // One more than a panel's are made two panels: a narrow one is slow.
      vectors = vectors == kWide + 1 ? (vectors + 1) / 2 : std::min<int64_t>(vectors, kWide);
      width = std::min(columns.size - j, vectors * kLanes);
      copy_panel(n, width, p.b.from(k, column), of_b);
      // Parts with other rows have the same B.
      if (p.b_sums && rows.begin == 0) add_columns(n, width, of_b, p.b_sums + column, k == 0);
      Finish here = finish;
      here.move(rows.begin, column), here.first = k == 0, here.last = k + n == p.terms;
      auto make = vectors == 1 ? panel<1, Finish> : vectors == kWide ? panel<kWide, Finish> : panel<2, Finish>;
      make(rows.size, n, of_a, of_b, width, here);
    }
  }
}

void compute(xla::ffi::ThreadPool& pool, const Product<float>& p) {
  Sums sums{p.c, p.columns};
  for_parts_of(pool, p.rows, p.columns, kTall, kWide * kLanes, kRowsOfTask, [=](Range rows, Range columns) {
    if (p.x) part(p, Activated{sums, p.x}, rows, columns);
    else part(p, Biased{sums, p.bias}, rows, columns);
  });
}

using Float32 = Linear<xla::ffi::F32, compute>;

}  // namespace
}  // namespace equivit

using equivit::Float32;
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_linear, Float32::forward, Float32::of_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_linear_backward_x, Float32::backward_x, Float32::of_backward_x());
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_linear_backward_weight, Float32::backward_weight, Float32::of_backward_weight());
