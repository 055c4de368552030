// The exact GELU of vectors.

#pragma once

#include "cpu_vectors.h"

namespace equivit {

constexpr float kLargest = 6;  // beyond it the tail is nothing beside x

// 1 - Phi(a) of a normal variable, for a in [0, kLargest]: 2^p(a) as in pointwise.py, but p has degree 9, as operations
// are cheap here.  The tail's error times max(a, 0.6) is 2e-9 without that of rounding; found by reweighted least squares
// on 4,001 points.  For what will be rounded to bfloat16, `coarse`, the degree is 6, found likewise on 6,001 points; the
// error is 7e-7 with that of rounding, and at most 1e-3 of the tail.
template <bool coarse>
Vector tail(Vector a) {
  if constexpr (coarse) {
    Vector p = 3.12715216e-5f * a - 7.43326875e-4f;
    for (float coefficient : {7.96446063e-3f, -5.31876792e-2f, -4.58966597e-1f, -1.15113222f, -1.f})
      p = p * a + coefficient;
    return coarse_exp2(p);
  }
  Vector p = 4.30092855e-7f * a - 8.39540191e-6f;
  for (float coefficient : {6.83212037e-5f, -2.64436294e-4f, -1.86475871e-5f, 6.96326088e-3f, -5.24511827e-2f,
                            -4.59217561e-1f, -1.15110457f, -1.f})
    p = p * a + coefficient;
  return exp2(p);
}

template <bool coarse = false>
Vector gelu(Vector x) {
  Vector a = min(abs(x), filled(kLargest));
  return (x < Vector{} ? Vector{} : x) - a * tail<coarse>(a);  // NaN of NaN
}

template <bool coarse = false>
Vector gelu_gradient(Vector x) {
  Vector below = tail<coarse>(min(abs(x), filled(kLargest)));
  Vector exponent = -0.721347520f * (x * x) - 1.32574806f;
  Vector density = coarse ? coarse_exp2(max(filled(-126.f), exponent)) : exp2(exponent);
  return (x > Vector{} ? 1.f - below : below) + x * density;
}

}  // namespace equivit
