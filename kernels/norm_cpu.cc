// Layer norm of a field on a CPU, of a token at a time.
//
// Reference: `reference` in norm.py.  A field is arrays [k, tokens, C]: lines, whose k rows have a scale [k, C], and
// planes, whose rows share one [C].  With y the field, each row less its mean, and f = sum of weighted variances + eps,
//
//   z = y s / sigma (+ bias, of the first row),  sigma = sqrt(f / order);
//
// backward, with g = s dz and G = sum of g y over all rows,
//
//   dx = g / sigma - (weight G / (order sigma^3 C)) y, less its mean;  ds = sum of dz y / sigma over tokens.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace equivit {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTasks = 16;  // as many sums over tokens, which are added up in their order on any number of threads

struct Array {
  const float *x, *scale, *dz;
  float* result;  // z, or dx
  int64_t rows, channels, scale_step;  // from row to row: 0 if they share their scale
  float weight;  // of the variance of a row
};

struct Field {
  std::vector<Array> arrays;
  const float* bias;
  int64_t tokens, order;
  float eps;

  int64_t width() const {  // of all rows side by side, each padded to whole vectors
    int64_t sum = 0;
    for (const Array& array : arrays) sum += array.rows * padded(array.channels);
    return sum;
  }
};

// visit(array, offset of the row's channels in the array, offset in the scale)
template <class Visit>
void for_rows(const Field& field, int64_t token, Visit visit) {
  for (const Array& array : field.arrays)
    for (int64_t row = 0; row < array.rows; row++)
      visit(array, (row * field.tokens + token) * array.channels, row * array.scale_step);
}

// Writes y, row after row, and returns 1 / sigma.
float centred(const Field& field, int64_t token, float* y) {
  Vector total{};
  for_rows(field, token, [&](const Array& array, int64_t at, int64_t) {
    const float* x = array.x + at;
    int64_t channels = array.channels;
    Vector sums{}, squares{};
    for (int64_t c = 0; c < channels; c += kLanes) sums += load(x + c, channels - c);
    float mean = sum(sums) / channels;
    for (int64_t c = 0; c < channels; c += kLanes, y += kLanes) {
      Vector value = first(load(x + c, channels - c) - mean, channels - c);
      squares += value * value;
      store(y, value);
    }
    total += squares * (array.weight / channels);
  });
  return 1 / std::sqrt((sum(total) + field.eps) / field.order);
}

void forward_token(const Field& field, int64_t token) {
  float* y = scratch(field.width());
  float inverse = centred(field, token, y);
  const float* bias = field.bias;
  for_rows(field, token, [&](const Array& array, int64_t at, int64_t scale_at) {
    for (int64_t c = 0; c < array.channels; c += kLanes, y += kLanes) {
      int64_t left = array.channels - c;
      Vector z = load(y) * inverse * load(array.scale + scale_at + c, left);
      store(array.result + at + c, bias ? z + load(bias + c, left) : z, left);
    }
    bias = nullptr;
  });
}

// Adds the token's part to the gradients of all scales, row after row, and then of the bias.
void backward_token(const Field& field, int64_t token, float* d_scales) {
  int64_t width = field.width();
  float *y = scratch(2 * width), *g = y + width;
  float inverse = centred(field, token, y);
  Vector products{};
  for_rows(field, token, [&](const Array& array, int64_t at, int64_t scale_at) {
    for (int64_t c = 0; c < array.channels; c += kLanes, y += kLanes, g += kLanes, d_scales += kLanes) {
      int64_t left = array.channels - c;
      Vector dz = load(array.dz + at + c, left), value = load(y);
      Vector product = dz * load(array.scale + scale_at + c, left);
      store(g, product);
      products += product * value;
      store(d_scales, load(d_scales) + dz * (value * inverse));
    }
  });
  const Array& array = field.arrays[0];
  for (int64_t c = 0; c < array.channels; c += kLanes, d_scales += kLanes)
    store(d_scales, load(d_scales) + load(array.dz + token * array.channels + c, array.channels - c));
  float factor = sum(products) * inverse * inverse * inverse / field.order;
  y -= width, g -= width;
  for_rows(field, token, [&](const Array& array, int64_t at, int64_t) {
    Vector sums{};
    for (int64_t c = 0; c < array.channels; c += kLanes) sums += load(g + c);
    float mean = sum(sums) / array.channels, of_y = factor * array.weight / array.channels;  // the mean of y is 0
    for (int64_t c = 0; c < array.channels; c += kLanes, y += kLanes, g += kLanes)
      store(array.result + at + c, (load(g) - mean) * inverse - of_y * load(y), array.channels - c);
  });
}

// Arguments begin with the arrays and their scales.
Field described(ffi::RemainingArgs& arguments, int64_t arrays, int64_t order, float eps, float row_weight) {
  Field field{{}, nullptr, 1, order, eps};
  for (int64_t i = 0; i < arrays; i++) {
    auto x = *arguments.get<ffi::Buffer<ffi::F32>>(i), scale = *arguments.get<ffi::Buffer<ffi::F32>>(arrays + i);
    auto shape = x.dimensions();
    int64_t rows = shape[0], channels = shape[shape.size() - 1];
    field.tokens = static_cast<int64_t>(x.element_count()) / (rows * channels);
    int64_t step = scale.dimensions().size() == 2 ? channels : 0;
    field.arrays.push_back({x.typed_data(), scale.typed_data(), nullptr, nullptr, rows, channels, step,
                            i ? row_weight : 1});
  }
  return field;
}

// do_tokens(task, first token, last token + 1) for kTasks parts of the tokens
template <class Function>
void for_tasks(ffi::ThreadPool& pool, int64_t tokens, Function do_tokens) {
  in_parallel(pool, kTasks, [=](int64_t task) {
    do_tokens(task, task * tokens / kTasks, (task + 1) * tokens / kTasks);
  });
}

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t order,
                   float eps, float row_weight) {
  int64_t arrays = results.size();
  Field field = described(arguments, arrays, order, eps, row_weight);
  field.bias = (*arguments.get<ffi::Buffer<ffi::F32>>(2 * arrays)).typed_data();
  for (int64_t i = 0; i < arrays; i++) field.arrays[i].result = (*results.get<ffi::Buffer<ffi::F32>>(i))->typed_data();
  for_tasks(pool, field.tokens, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) forward_token(field, token);
  });
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t order,
                    float eps, float row_weight) {
  int64_t arrays = results.size() / 2;
  Field field = described(arguments, arrays, order, eps, row_weight);
  for (int64_t i = 0; i < arrays; i++) {
    field.arrays[i].dz = (*arguments.get<ffi::Buffer<ffi::F32>>(2 * arrays + i)).typed_data();
    field.arrays[i].result = (*results.get<ffi::Buffer<ffi::F32>>(i))->typed_data();
  }
  int64_t length = field.width() + padded(field.arrays[0].channels);
  std::vector<float> sums(kTasks * length);
  for_tasks(pool, field.tokens, [&](int64_t task, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) backward_token(field, token, sums.data() + task * length);
  });
  for (int64_t task = 1; task < kTasks; task++)
    for (int64_t c = 0; c < length; c++) sums[c] += sums[task * length + c];
  const float* row_sums = sums.data();
  for (int64_t i = 0; i < arrays; i++) {
    const Array& array = field.arrays[i];
    float* d_scale = (*results.get<ffi::Buffer<ffi::F32>>(arrays + i))->typed_data();
    for (int64_t row = 0; row < array.rows; row++, row_sums += padded(array.channels))
      for (int64_t c = 0; c < array.channels; c++) {
        float before = row && !array.scale_step ? d_scale[c] : 0;
        d_scale[row * array.scale_step + c] = before + row_sums[c];
      }
  }
  std::copy_n(row_sums, field.arrays[0].channels, (*results.get<ffi::Buffer<ffi::F32>>(2 * arrays))->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace equivit

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_norm, equivit::forward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets()
        .Attr<int64_t>("order").Attr<float>("eps").Attr<float>("row_weight"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    equivit_norm_backward, equivit::backward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets()
        .Attr<int64_t>("order").Attr<float>("eps").Attr<float>("row_weight"));
