// A matrix in memory.

#pragma once

#include <cstdint>

namespace equivit {

template <class T>
struct Matrix {
  const T* at;
  int64_t row, column;  // strides

  Matrix from(int64_t i, int64_t j = 0) const { return {at + i * row + j * column, row, column}; }
};

}  // namespace equivit
