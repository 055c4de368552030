// Products of bfloat16 on a processor with AMX, with sums in float32.
//
// A tile register holds 16 rows of 64 bytes.  One instruction adds, to 16 x 16 sums, the products of 16 rows of A with
// 32 terms and of 32 rows of B with 16 columns, of which two rows lie side by side, number by number.  So a panel of B
// is [terms / 2, kTile, 2], and four registers of sums make a tile of kTile x kTile.

#pragma once

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define EQUIVIT_BFLOAT16

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "cpu_matrix.h"
#include "cpu_vectors.h"

namespace equivit {

using Bfloat16 = uint16_t;
using Numbers = Matrix<Bfloat16>;
constexpr int64_t kTile = 32;

inline int64_t whole_tiles(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

// The tile registers of this thread, while it lives.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

inline Vector widened(const Bfloat16* from, int64_t n) {
  __m256i x = n >= kLanes ? _mm256_loadu_si256((const __m256i*)from) : _mm256_maskz_loadu_epi16((1u << n) - 1, from);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}

// Rounds to the nearest.
inline void store_rounded(Bfloat16* to, Vector x, int64_t n) {
  __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  if (n >= kLanes) return _mm256_storeu_si256((__m256i*)to, rounded);
  _mm256_mask_storeu_epi16(to, (1u << n) - 1, rounded);
}

// The first n of 32 numbers; the others are 0.
inline __m512i some_numbers(const Bfloat16* from, int64_t n) {
  if (n >= kTile) return _mm512_loadu_si512(from);
  return n <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << n) - 1, from);
}

// Two rows of 32 numbers side by side, number by number.
inline void store_pairs(__m512i a, __m512i b, void* to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
  _mm512_storeu_si512(static_cast<char*>(to) + 64, _mm512_permutex2var_epi16(a, high, b));
}

// A matrix of 16 x 16 pairs, transposed: pairs, fours, eights and halves of rows change places.
inline void transpose_pairs(const void* from, int64_t from_row, void* to, int64_t to_row) {  // strides in pairs
  __m512i x[16], y[16];
  auto row = [&](int i) { return static_cast<const int32_t*>(from) + i * from_row; };
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(row(i));
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < 16; half += 8) {
      y[half + i] = _mm512_shuffle_i32x4(x[half + i], x[half + 4 + i], 0x88);
      y[half + 4 + i] = _mm512_shuffle_i32x4(x[half + i], x[half + 4 + i], 0xdd);
    }
#pragma GCC unroll 16
  for (int i = 0; i < 8; i++) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(static_cast<int32_t*>(to) + i * to_row, x[i]);
}

// Panels of all columns of B, one after the other, with zeros beyond its terms and columns.  Rows of B are read whole, in
// the order in which they lie in memory.
inline void copy_panels(int64_t terms, int64_t columns, Numbers b, Bfloat16* to) {
  int64_t all = whole_tiles(terms), width = whole_tiles(columns);
  if (b.column == 1) {
    auto row = [&](int64_t k, int64_t j) { return some_numbers(b.at + k * b.row + j, k < terms ? columns - j : 0); };
    for (int64_t k = 0; k < all; k += 2)
      for (int64_t j = 0; j < width; j += kTile) store_pairs(row(k, j), row(k + 1, j), to + j * all + k * kTile);
    return;
  }
  alignas(64) Bfloat16 block[16 * kTile];  // of 16 columns
  for (int64_t j = 0; j < width; j += 16)
    for (int64_t k = 0; k < all; k += kTile) {
      for (int64_t i = 0; i < 16; i++) {
        __m512i column = some_numbers(b.at + (j + i) * b.column + k, j + i < columns ? terms - k : 0);
        _mm512_store_si512(block + i * kTile, column);
      }
      Bfloat16* panel = to + j / kTile * kTile * all;
      transpose_pairs(block, 16, panel + k * kTile + 2 * (j % kTile), kTile);
    }
}

// A row of A, with zeros up to whole_tiles of all terms.
inline void copy_row(int64_t terms, const Bfloat16* from, int64_t all, Bfloat16* to) {
  for (int64_t k = 0; k < all; k += kTile) _mm512_storeu_si512(to + k, some_numbers(from + k, terms - k));
}

// All rows of an A in columns: [whole_tiles(rows), whole_tiles(terms)], with zeros beyond them, `to_row` apart.
inline void copy_columns(int64_t rows, int64_t terms, Numbers a, Bfloat16* to, int64_t to_row) {
  int64_t all = whole_tiles(terms);
  alignas(64) Bfloat16 block[kTile * kTile];  // [16 pairs of terms, kTile rows, 2]
  for (int64_t k = 0; k < all; k += kTile)
    for (int64_t i = 0; i < rows; i += kTile) {
      auto term = [&](int64_t k) { return some_numbers(a.at + k * a.column + i, k < terms ? rows - i : 0); };
      for (int64_t p = 0; p < kTile; p += 2) store_pairs(term(k + p), term(k + p + 1), block + p * kTile);
      for (int64_t half = 0; half < 2; half++)
        transpose_pairs(block + half * kTile, kTile, to + (i + 16 * half) * to_row + k, to_row / 2);
    }
}

struct Nothing {
  void operator()() const {}
};

// sums [kTile, kTile] = A B, or sums + A B, for rows of A that are contiguous and a panel of B; rows of the sums are
// sums_row apart.  It calls fetch() every kTile terms.
template <class Fetch = Nothing>
inline void multiply_tiles(int64_t terms, const Bfloat16* a, int64_t a_row, const Bfloat16* b, float* sums, bool add,
                           Fetch fetch = {}, int64_t sums_row = kTile) {
  constexpr int64_t kRow = kTile * sizeof(float);
  int64_t apart = sums_row * sizeof(float), below = 16 * sums_row;
  if (add) {
    _tile_loadd(0, sums, apart);
    _tile_loadd(1, sums + 16, apart);
    _tile_loadd(2, sums + below, apart);
    _tile_loadd(3, sums + below + 16, apart);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  int64_t row = a_row * sizeof(Bfloat16);
  for (int64_t k = 0; k < terms; k += kTile) {
    fetch();
    _tile_loadd(4, a + k, row);
    _tile_loadd(6, b + k * kTile, kRow);
    _tile_loadd(7, b + k * kTile + kTile, kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * a_row + k, row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, apart);
  _tile_stored(1, sums + 16, apart);
  _tile_stored(2, sums + below, apart);
  _tile_stored(3, sums + below + 16, apart);
}

}  // namespace equivit

#endif
