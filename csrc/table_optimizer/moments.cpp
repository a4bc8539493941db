#include "moments.h"

#include <cmath>
#include <vector>

namespace freescale::moments {
namespace {

// The result must not depend on which other rows are updated in the same call. So every loop runs over one row, and
// setup.py forbids the compiler to merge a multiplication and an addition.
void add_gradient(const float* gradient, float factor, std::int64_t dim, float* sum) {
  for (std::int64_t d = 0; d < dim; ++d) sum[d] += factor * gradient[d];
}

float sum_of_squares(const float* values, std::int64_t dim) {
  float sum = 0;
  for (std::int64_t d = 0; d < dim; ++d) sum += values[d] * values[d];
  return sum;
}

// Updates the two moments of a row, and turns its gradient into the direction of its step.
void to_direction(float* gradient, std::int64_t dim, const Settings& s, const float* weights, float* first,
                  float* second) {
  if (s.one_second_moment)
    *second = s.beta2 * *second + (1.0f - s.beta2) * (sum_of_squares(gradient, dim) / static_cast<float>(dim));
  for (std::int64_t d = 0; d < dim; ++d) {
    first[d] = s.beta1 * first[d] + (1.0f - s.beta1) * gradient[d];
    float* const moment = s.one_second_moment ? second : second + d;
    if (!s.one_second_moment) *moment = s.beta2 * *moment + (1.0f - s.beta2) * (gradient[d] * gradient[d]);
    const float scaled = (first[d] / s.correction1) / (std::sqrt(*moment / s.correction2) + s.eps);
    gradient[d] = scaled + s.weight_decay * weights[d];
  }
}

}  // namespace

float bias_correction(float beta, std::int64_t step) {
  return static_cast<float>(1.0 - std::pow(static_cast<double>(beta), static_cast<double>(step)));
}

void update(const Gradients& gradients, std::int64_t dim, const Settings& settings, float* weights, float* first,
            float* second) {
  std::vector<float> direction(static_cast<std::size_t>(dim));
  for (std::int64_t begin = 0; begin < gradients.count;) {
    const std::int64_t row = gradients.rows[gradients.order[begin]];
    direction.assign(direction.size(), 0.0f);
    for (; begin < gradients.count && gradients.rows[gradients.order[begin]] == row; ++begin) {
      const std::int64_t one = gradients.order[begin];
      add_gradient(gradients.values + gradients.source[one], gradients.scale ? gradients.scale[one] : 1.0f, dim,
                   direction.data());
    }
    float* const weight = weights + row * dim;
    to_direction(direction.data(), dim, settings, weight, first + row * dim,
                 second + (settings.one_second_moment ? row : row * dim));
    float rate = settings.rate;
    if (settings.lamb) {
      const float length = std::sqrt(sum_of_squares(direction.data(), dim));
      if (length == 0.0f) continue;  // no step at all
      rate *= std::sqrt(sum_of_squares(weight, dim)) / length;
    }
    for (std::int64_t d = 0; d < dim; ++d) weight[d] -= rate * direction[static_cast<std::size_t>(d)];
  }
}

}  // namespace freescale::moments
