// GELU of an octic field on a CPU: transform, GELU and transform back while the numbers are in registers.
//
// Reference: `reference` in d8_gelu.py; the transforms are those of pointwise.py, operation by operation.
// Arrays are lines [4, rows, C] and planes [2, rows, 2 C].

#include <array>

#include "cpu_gelu.h"
#include "cpu_threads.h"
#include "cpu_tiles.h"
#include "cpu_vectors.h"

namespace equivit {
namespace {

namespace ffi = xla::ffi;
using Eight = std::array<Vector, 8>;

constexpr float kScale = 0.353553391f;  // sqrt(2) / 4
constexpr int64_t kTask = 1 << 15;  // elements of a field that a thread takes at once

// Where the components of one token and some channels are.
template <class T>
struct Field {
  T *lines, *planes;
  int64_t rows, channels;

  // Component i in the order A1, A2, B1, B2, E11, E12, E21, E22 (Exy: copy x, row y of E).
  T* component(int i, int64_t row, int64_t channel) const {
    if (i < 4) return lines + (i * rows + row) * channels + channel;
    int64_t copy = (i - 4) / 2, of_plane = (i - 4) % 2;
    return planes + ((of_plane * rows + row) * 2 + copy) * channels + channel;
  }
};

using equivit::load, equivit::store;
#ifdef EQUIVIT_BFLOAT16
Vector load(const Bfloat16* from, int64_t n) { return widened(from, n); }
void store(Bfloat16* to, Vector x, int64_t n) { store_rounded(to, x, n); }
#endif

template <class T>
Eight read(const Field<const T>& field, int64_t row, int64_t channel) {
  Eight x;
  for (int i = 0; i < 8; i++) x[i] = load(field.component(i, row, channel), field.channels - channel);
  return x;
}

template <class T>
void write(const Field<T>& field, int64_t row, int64_t channel, const Eight& x) {
  for (int i = 0; i < 8; i++) store(field.component(i, row, channel), x[i], field.channels - channel);
}

Eight to_regular(const Eight& x) {
  Vector a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  Vector e = x[4] + x[5], f = x[4] - x[5], g = x[6] + x[7], h = x[6] - x[7];
  Vector ac = a + c, a_c = a - c, bd = b + d, b_d = b - d, eh = e + h, e_h = e - h, fg = f + g, f_g = f - g;
  Eight y = {ac + eh, a_c + f_g, ac - eh, a_c - f_g, bd - fg, b_d - e_h, bd + fg, b_d + e_h};
  for (Vector& value : y) value *= kScale;
  return y;
}

Eight to_isotypic(Eight v) {
  for (Vector& value : v) value *= kScale;
  Vector ac = v[0] + v[2], eh = v[0] - v[2], a_c = v[1] + v[3], f_g = v[1] - v[3];
  Vector bd = v[4] + v[6], fg = v[6] - v[4], b_d = v[5] + v[7], e_h = v[7] - v[5];
  Vector a = ac + a_c, c = ac - a_c, b = bd + b_d, d = bd - b_d, e = eh + e_h, h = eh - e_h, f = fg + f_g, g = fg - f_g;
  return {a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h};
}

template <class T, class Lines, class Planes>
Field<T> field(Lines& lines, Planes& planes) {
  auto shape = lines.dimensions();
  int64_t channels = shape[shape.size() - 1], elements = lines.element_count();
  return {lines.typed_data(), planes.typed_data(), elements / (4 * channels), channels};
}

// visit(row, channel) for vectors of channels of all rows.
template <class Visit>
void for_vectors(ffi::ThreadPool& pool, int64_t rows, int64_t channels, Visit visit) {
  int64_t at_once = std::max<int64_t>(1, kTask / (8 * channels));
  in_parallel(pool, (rows + at_once - 1) / at_once, [=](int64_t task) {
    for (int64_t row = task * at_once; row < std::min(rows, (task + 1) * at_once); row++)
      for (int64_t channel = 0; channel < channels; channel += kLanes) visit(row, channel);
  });
}

// The handlers of XLA's calls, of fields of a type.
template <ffi::DataType type>
struct Gelu {
  using T = ffi::NativeType<type>;
  using Buffer = ffi::Buffer<type>;
  using Result = ffi::ResultBuffer<type>;
  static constexpr bool coarse = type == ffi::BF16;

  static ffi::Error forward(ffi::ThreadPool pool, Buffer lines, Buffer planes, Result y_lines, Result y_planes) {
    auto x = field<const T>(lines, planes);
    auto y = field<T>(*y_lines, *y_planes);
    for_vectors(pool, x.rows, x.channels, [=](int64_t row, int64_t channel) {
      Eight values = to_regular(read(x, row, channel));
      for (Vector& value : values) value = gelu<coarse>(value);
      write(y, row, channel, to_isotypic(values));
    });
    return ffi::Error::Success();
  }

  static ffi::Error backward(ffi::ThreadPool pool, Buffer lines, Buffer planes, Buffer dy_lines, Buffer dy_planes,
                             Result dx_lines, Result dx_planes) {
    auto x = field<const T>(lines, planes), dy = field<const T>(dy_lines, dy_planes);
    auto dx = field<T>(*dx_lines, *dx_planes);
    for_vectors(pool, x.rows, x.channels, [=](int64_t row, int64_t channel) {
      Eight values = to_regular(read(x, row, channel)), gradients = to_regular(read(dy, row, channel));
      for (int i = 0; i < 8; i++) gradients[i] *= gelu_gradient<coarse>(values[i]);
      write(dx, row, channel, to_isotypic(gradients));
    });
    return ffi::Error::Success();
  }

  static auto of_forward() { return of_one().template Ret<Buffer>().template Ret<Buffer>(); }
  static auto of_backward() {
    return of_one().template Arg<Buffer>().template Arg<Buffer>().template Ret<Buffer>().template Ret<Buffer>();
  }

 private:
  static auto of_one() {
    return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().template Arg<Buffer>().template Arg<Buffer>();
  }
};

using Float32 = Gelu<ffi::F32>;
#ifdef EQUIVIT_BFLOAT16
using InBfloat16 = Gelu<ffi::BF16>;
#endif

}  // namespace
}  // namespace equivit

XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_d8_gelu, equivit::Float32::forward, equivit::Float32::of_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_d8_gelu_backward, equivit::Float32::backward, equivit::Float32::of_backward());
#ifdef EQUIVIT_BFLOAT16
using equivit::InBfloat16;
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_d8_gelu_bfloat16, InBfloat16::forward, InBfloat16::of_forward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(equivit_d8_gelu_backward_bfloat16, InBfloat16::backward, InBfloat16::of_backward());
#endif
