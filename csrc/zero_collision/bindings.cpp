// Python bindings of zero-collision ids (lightning_freescale/embedding/zero_collision/remap.py). They change the
// identities and ages in place and return NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "remap.h"

namespace py = pybind11;

namespace freescale {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Array<T> to_array(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  auto* kept = owner.get();
  py::capsule free(owner.release(), [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return Array<T>(static_cast<py::ssize_t>(kept->size()), kept->data(), free);
}

ZeroCollisionLayout check_layout(const std::vector<std::int64_t>& values, py::ssize_t slots) {
  if (values.size() != 6) throw std::invalid_argument("layout: " + std::to_string(values.size()) + " values, not 6");
  const ZeroCollisionLayout layout{values[0], values[1], values[2], values[3], values[4], values[5]};
  if (layout.buckets < 1 || layout.first_bucket < 0 || layout.held < 0 || layout.reserved < 1 ||
      layout.bucket_size <= layout.reserved || layout.max_probe < 1 ||
      layout.first_bucket + layout.held > layout.buckets)
    throw std::invalid_argument("layout: the numbers do not fit together");
  if (layout.held * layout.bucket_size != slots)
    throw std::invalid_argument("identities: " + std::to_string(slots) + " slots, but the layout has " +
                                std::to_string(layout.held * layout.bucket_size));
  return layout;
}

py::tuple py_insert(Array<std::int64_t> identities, Array<std::int32_t> seen, const Array<std::int64_t>& ids,
                    const std::vector<std::int64_t>& layout_values, int policy, std::int64_t ttl, std::int64_t step) {
  const ZeroCollisionLayout layout = check_layout(layout_values, identities.size());
  if (seen.size() != identities.size()) throw std::invalid_argument("seen: not as many entries as identities");
  Array<std::int64_t> slots(ids.size());
  std::int64_t* const identity_data = identities.mutable_data();
  std::int32_t* const seen_data = seen.mutable_data();
  std::int64_t* const slot_data = slots.mutable_data();
  InsertedIds done;
  {
    py::gil_scoped_release release;
    done = insert(layout, static_cast<EvictionPolicy>(policy), ttl, step, identity_data, seen_data,
                  {ids.data(), ids.size()}, slot_data);
  }
  return py::make_tuple(slots, to_array(std::move(done.touched)), to_array(std::move(done.old_ids)),
                        to_array(std::move(done.old_seen)), done.hits, to_array(std::move(done.fallback)));
}

py::tuple py_find(const Array<std::int64_t>& identities, const Array<std::int64_t>& ids,
                  const std::vector<std::int64_t>& layout_values) {
  const ZeroCollisionLayout layout = check_layout(layout_values, identities.size());
  Array<std::int64_t> slots(ids.size());
  std::int64_t* const slot_data = slots.mutable_data();
  std::int64_t missing = 0;
  {
    py::gil_scoped_release release;
    missing = find(layout, identities.data(), {ids.data(), ids.size()}, slot_data);
  }
  return py::make_tuple(slots, missing);
}

}  // namespace

void bind_zero_collision(py::module_& module) {
  module.def("zero_collision_insert", &py_insert, py::arg("identities").noconvert(), py::arg("seen").noconvert(),
             py::arg("ids").noconvert(), py::arg("layout"), py::arg("policy"), py::arg("ttl"), py::arg("step"));
  module.def("zero_collision_find", &py_find, py::arg("identities").noconvert(), py::arg("ids").noconvert(),
             py::arg("layout"));
}

}  // namespace freescale
