// Vectors of float32 as wide as the processor's registers, in the extensions of C++ that GCC and Clang share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace equivit {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

// The next multiple of the lanes: arrays of our own are padded to it.
inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// From any address; the compiler makes one instruction of it.
inline Vector load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

// The first n lanes; the others are 0.
inline Vector load(const float* from, int64_t n) {
  if (n >= kLanes) return load(from);
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_loadu_ps((1u << n) - 1, from);
#else
  Vector x{};
  std::memcpy(&x, from, n * sizeof(float));
  return x;
#endif
}

inline void store(float* to, Vector x, int64_t n) {
  if (n >= kLanes) return store(to, x);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (1u << n) - 1, (__m512)x);
#else
  std::memcpy(to, &x, n * sizeof(float));
#endif
}

// x in the first n lanes, 0 in the others.
inline Vector first(Vector x, int64_t n) {
  if (n >= kLanes) return x;
  Integers lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  return lane < static_cast<int32_t>(n) ? x : Vector{};
}

// In all lanes.  (x + 0 would be an addition: it is not x if x is -0.)
inline Vector filled(float x) { return x - Vector{}; }

inline Vector max(Vector x, Vector y) { return x > y ? x : y; }
inline Vector min(Vector x, Vector y) { return x < y ? x : y; }
inline Vector abs(Vector x) { return max(x, -x); }

#if defined(__AVX512F__)
inline float largest(Vector x) { return _mm512_reduce_max_ps((__m512)x); }
inline float sum(Vector x) { return _mm512_reduce_add_ps((__m512)x); }
#else
inline float largest(Vector x) {
  float result = x[0];
  for (int i = 1; i < kLanes; i++) result = std::max(result, x[i]);
  return result;
}

inline float sum(Vector x) {
  float result = 0;
  for (int i = 0; i < kLanes; i++) result += x[i];
  return result;
}
#endif

// Adding it leaves the nearest integer in the last bits: floats of this size are 1 apart.
constexpr float kRounding = 12582912;  // 1.5 * 2^23

// 2^n x for an integer n, given as n + kRounding, if no bits of the exponent are lost.
inline Vector times_power_of_two(Vector x, Vector n) {
  Integers bits, exponent;
  std::memcpy(&bits, &x, sizeof bits);
  std::memcpy(&exponent, &n, sizeof exponent);
  bits += exponent << 23;  // the bits of kRounding are shifted out
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

// 2^n e^r for an integer n, given as n + kRounding, and |r| <= log(2) / 2.  The polynomial is the minimax one of its
// form, 1 + r + r^2 q(r), relative to e^r: within 3e-9, found by reweighted least squares on 4,001 points.
inline Vector scaled_exp(Vector n, Vector r) {
  Vector q = 1.38144669e-3f * r + 8.36878051e-3f;
  q = q * r + 4.16683942e-2f;
  q = q * r + 1.66665201e-1f;
  q = q * r + 4.99999934e-1f;
  return times_power_of_two(q * (r * r) + r + 1.f, n);
}

// e^x for x <= 88, within 2 units in the last place; 0 below -87, NaN of NaN.
inline Vector exp(Vector x) {
  constexpr float kHigh = 0.693145751953125f, kLow = 1.42860682e-6f;  // log(2): products of kHigh with n are exact
  Vector n = x * 1.44269504f + kRounding, whole = n - kRounding;
  Vector result = scaled_exp(n, (x - whole * kHigh) - whole * kLow);
  return x < filled(-87.f) ? Vector{} : result;
}

// 2^x for x <= 127, within 2 units in the last place; 0 below -125, NaN of NaN.
inline Vector exp2(Vector x) {
  Vector n = x + kRounding;
  Vector result = scaled_exp(n, (x - (n - kRounding)) * 0.693147181f);
  return x < filled(-125.f) ? Vector{} : result;
}

// 2^x for -126 <= x <= 127, within 3e-6 of it, for what will be rounded to bfloat16; NaN of NaN.  The polynomial is found
// as that of `scaled_exp`.
inline Vector coarse_exp2(Vector x) {
  Vector n = x + kRounding, r = x - (n - kRounding);
  Vector power = 9.58274264e-3f * r + 5.59062804e-2f;
  for (float coefficient : {2.40240996e-1f, 6.93124211e-1f, 1.f}) power = power * r + coefficient;
  return times_power_of_two(power, n);
}

}  // namespace equivit
