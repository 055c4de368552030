// The softmax of rows of float32, and its gradient.

#pragma once

#include <algorithm>
#include <cmath>

#include "cpu_vectors.h"

namespace equivit {

// The largest of each row, of n numbers in `length`; beyond them it writes -inf.
inline void find_largest(int64_t rows, int64_t n, int64_t length, float* x, float* largest_of_row) {
  for (int64_t i = 0; i < rows; i++, x += length) {
    std::fill(x + n, x + length, -INFINITY);
    Vector top = load(x);
    for (int64_t j = kLanes; j < length; j += kLanes) top = max(top, load(x + j));
    largest_of_row[i] = largest(top);
  }
}

// exp(factor (x - max)) of each row, of n numbers in `length`, 0 beyond them, and the inverse of its sum.  The largest
// are found of all rows first: otherwise each row would wait for its own.
inline void exponentials(int64_t rows, int64_t n, int64_t length, float factor, float* x, float* inverse) {
  find_largest(rows, n, length, x, inverse);
  for (int64_t i = 0; i < rows; i++, x += length) {
    Vector top = filled(inverse[i]), total{};
    for (int64_t j = 0; j < length; j += kLanes) {
      Vector e = exp(factor * (load(x + j) - top));
      store(x + j, e);
      total += e;
    }
    inverse[i] = 1 / sum(total);
  }
}

// Of rows of exponentials and of dP: P and dS = P (dP - sum of P dP), in their places.
inline void softmax_gradient(int64_t rows, int64_t length, const float* inverse, float* p, float* dp) {
  for (int64_t i = 0; i < rows; i++, p += length, dp += length) {
    Vector total{};
    for (int64_t j = 0; j < length; j += kLanes) {
      Vector weight = load(p + j) * inverse[i];
      store(p + j, weight);
      total += weight * load(dp + j);
    }
    Vector mean = filled(sum(total));
    for (int64_t j = 0; j < length; j += kLanes) store(dp + j, load(p + j) * (load(dp + j) - mean));
  }
}

}  // namespace equivit
