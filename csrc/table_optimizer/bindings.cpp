// Python binding of the moment optimizers (lightning_freescale/embedding/moment_kernel.py). It changes tables and state
// in place.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "moments.h"

namespace py = pybind11;

namespace freescale {
namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Longs = py::array_t<std::int64_t, py::array::c_style>;

void ensure(bool correct, const char* what) {
  if (!correct) throw std::invalid_argument(std::string("update_moments: ") + what);
}

void check(const moments::Gradients& gradients, std::int64_t num_values, std::int64_t num_rows, std::int64_t dim) {
  for (std::int64_t i = 0; i < gradients.count; ++i) {
    ensure(gradients.order[i] >= 0 && gradients.order[i] < gradients.count, "order: an entry is out of range");
    ensure(gradients.rows[i] >= 0 && gradients.rows[i] < num_rows, "rows: an entry is out of range");
    ensure(gradients.source[i] >= 0 && gradients.source[i] + dim <= num_values, "source: an entry is out of range");
  }
}

void py_update(const Floats& values, const Longs& source, const std::optional<Floats>& scale, const Longs& rows,
               const Longs& order, Floats weights, Floats first, Floats second, float rate, float beta1, float beta2,
               float eps, float weight_decay, std::int64_t step, bool lamb) {
  ensure(weights.ndim() == 2 && first.ndim() == 2, "weights and first moments must be [rows, dim]");
  const std::int64_t count = rows.size(), num_rows = weights.shape(0), dim = weights.shape(1);
  ensure(source.size() == count && order.size() == count && (!scale || scale->size() == count),
         "source, scale, rows and order must have as many entries");
  const bool one_second_moment = second.ndim() == 1;
  ensure(first.size() == weights.size() && second.size() == (one_second_moment ? num_rows : weights.size()),
         "the moments must fit the weights");
  const moments::Settings settings{rate,
                                   beta1,
                                   beta2,
                                   eps,
                                   weight_decay,
                                   moments::bias_correction(beta1, step),
                                   moments::bias_correction(beta2, step),
                                   one_second_moment,
                                   lamb};
  const moments::Gradients gradients{values.data(), source.data(), scale ? scale->data() : nullptr,
                                     rows.data(), order.data(), count};
  float *const w = weights.mutable_data(), *const m = first.mutable_data(), *const v = second.mutable_data();
  const std::int64_t num_values = values.size();
  py::gil_scoped_release release;
  check(gradients, num_values, num_rows, dim);
  moments::update(gradients, dim, settings, w, m, v);
}

}  // namespace

void bind_table_optimizer(py::module_& module) {
  module.def("update_moments", &py_update, py::arg("values").noconvert(), py::arg("source").noconvert(),
             py::arg("scale").noconvert(), py::arg("rows").noconvert(), py::arg("order").noconvert(),
             py::arg("weights").noconvert(), py::arg("first").noconvert(), py::arg("second").noconvert(),
             py::arg("rate"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("step"), py::arg("lamb"));
}

}  // namespace freescale
