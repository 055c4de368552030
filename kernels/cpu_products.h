// Products of matrices that fit in a processor's second cache, on one core.
//
// A tile of the result stays in registers while the sum runs: kRows x kColumns vectors, of which a step adds the product
// of a column of A, one number after the other in all lanes, and a row of B.  So A may lie in any order, rows of B and C
// must be contiguous.  For each number of A there are kColumns multiplications, and for each vector of B kRows.

#pragma once

#include "cpu_matrix.h"
#include "cpu_vectors.h"

namespace equivit {

// So that a tile, a row of B and a number of A fill the registers: 32 of AVX-512 and NEON, 16 of AVX.
constexpr int kRows = kLanes == 8 ? 4 : 6, kColumns = kLanes == 8 ? 2 : 4;

using Factor = Matrix<float>;

template <int rows, int columns>
inline void tile(int64_t length, Factor a, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  Vector sums[rows][columns];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) sums[i][j] = add ? load(c + i * c_row + j * kLanes) : Vector{};
  for (int64_t k = 0; k < length; k++) {
    Vector row[columns];
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) row[j] = load(b + k * b_row + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      Vector number = filled(a.at[i * a.row + k * a.column]);
#pragma GCC unroll 16
      for (int j = 0; j < columns; j++) sums[i][j] += number * row[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 16
    for (int j = 0; j < columns; j++) store(c + i * c_row + j * kLanes, sums[i][j]);
}

// Tiles below each other; the last one has the rows that are left.
template <int columns, int last = kRows - 1>
void panel(int64_t rows, int64_t length, Factor a, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t i = 0;
  if constexpr (last == kRows - 1)
    for (; i + kRows <= rows; i += kRows) tile<kRows, columns>(length, a.from(i), b, b_row, c + i * c_row, c_row, add);
  if constexpr (last > 0) {
    if (rows - i == last) return tile<last, columns>(length, a.from(i), b, b_row, c + i * c_row, c_row, add);
    return panel<columns, last - 1>(rows - i, length, a.from(i), b, b_row, c + i * c_row, c_row, add);
  }
}

// C = A B, or C += A B.  Shapes: [rows, length], [length, columns] -> [rows, columns], columns a multiple of kLanes.
inline void product(int64_t rows, int64_t columns, int64_t length, Factor a, const float* b, int64_t b_row, float* c,
                    int64_t c_row, bool add = false) {
  for (int64_t left = columns / kLanes; left > 0;) {
    // What is left of less than two wide panels is cut in halves: a narrow one is slow.
    int64_t wide = left >= 2 * kColumns || left <= kColumns ? std::min<int64_t>(left, kColumns) : (left + 1) / 2;
    auto make = wide == 4 ? panel<kColumns> : wide == 3 ? panel<std::min(3, kColumns)> : wide == 2 ? panel<2> : panel<1>;
    make(rows, length, a, b, b_row, c, c_row, add);
    b += wide * kLanes, c += wide * kLanes, left -= wide;
  }
}

}  // namespace equivit
