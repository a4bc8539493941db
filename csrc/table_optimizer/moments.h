// Adam and LAMB for rows of a table on a CPU, where FBGEMM has no kernel for them. Only rows with a gradient change.
#pragma once

#include <cstdint>

namespace freescale::moments {

struct Settings {
  float rate, beta1, beta2, eps, weight_decay;
  float correction1, correction2;  // bias_correction of both
  bool one_second_moment;          // of a row, in place of one of each element: "partial row-wise"
  bool lamb;                       // scale the step of a row by |row| / |step|
};

// 1 - beta^step, as FBGEMM has it: of the float, so that it fits the sum of the weights of all gradients so far.
float bias_correction(float beta, std::int64_t step);

// The gradients of one table. A row occurs as often as it was looked up.
struct Gradients {
  const float* values;
  const std::int64_t* source;  // [n] where the gradient of an occurrence begins in `values`
  const float* scale;          // [n] factor of each occurrence; null: 1
  const std::int64_t* rows;    // [n] row of each occurrence
  const std::int64_t* order;   // [n] occurrences sorted by row; those of a row are added in this order
  std::int64_t count;
};

// Update each row of `gradients` once, with the sum of its gradients. `weights` and `first` are [rows, dim]; `second` is
// [rows, dim] or, with one_second_moment, [rows].
void update(const Gradients& gradients, std::int64_t dim, const Settings& settings, float* weights, float* first,
            float* second);

}  // namespace freescale::moments
