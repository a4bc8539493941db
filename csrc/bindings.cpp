// Python bindings of the partition solver and of jagged arrays: they read NumPy arrays, call the C++ functions without
// the GIL, and return NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "jagged/jagged.h"
#include "jagged/samples.h"
#include "partition/partition.h"

namespace py = pybind11;
using namespace freescale;

namespace freescale {
void bind_exchange_index(py::module_& module);   // exchange_index/bindings.cpp
void bind_last_resort(py::module_& module);      // last_resort/bindings.cpp
void bind_table_optimizer(py::module_& module);  // table_optimizer/bindings.cpp
void bind_transport(py::module_& module);        // transport/bindings.cpp
void bind_zero_collision(py::module_& module);   // zero_collision/bindings.cpp
}

namespace {

// `work` must not use Python objects, because other threads run Python meanwhile.
template <typename Work>
auto without_gil(Work&& work) {
  py::gil_scoped_release release;
  return work();
}

// The Python modules convert to int64 beforehand. `py::arg().noconvert()` makes a wrong dtype an error, not a hidden
// copy.
using IndexArray = py::array_t<std::int64_t, py::array::c_style>;

Indices indices(const IndexArray& array, const char* name) {
  if (array.ndim() != 1)
    throw std::invalid_argument(std::string(name) + ": must be 1-D, not " + std::to_string(array.ndim()) + "-D");
  return {array.data(), array.shape(0)};
}

IndexArray to_numpy(std::vector<std::int64_t>&& values) {
  auto* owner = new std::vector<std::int64_t>(std::move(values));
  py::capsule free(owner, [](void* pointer) { delete static_cast<std::vector<std::int64_t>*>(pointer); });
  return IndexArray(static_cast<py::ssize_t>(owner->size()), owner->data(), free);
}

// The rows of an array, which may be read-only or a memory map. Nothing is copied.
Rows rows(const py::array& values) {
  if (values.ndim() == 0) throw std::invalid_argument("values: must have at least one dimension");
  if (!(values.flags() & py::array::c_style))
    throw std::invalid_argument("values: must be C-contiguous; pass numpy.ascontiguousarray(values)");
  if (values.dtype().attr("hasobject").cast<bool>())
    throw std::invalid_argument("values: dtype object holds references and cannot be moved as bytes");
  std::int64_t bytes = values.itemsize();
  for (py::ssize_t d = 1; d < values.ndim(); ++d) bytes *= values.shape(d);
  return {static_cast<const std::byte*>(values.data()), values.shape(0), bytes};
}

py::array empty_rows(const py::array& like, std::int64_t count) {
  std::vector<py::ssize_t> shape(like.shape(), like.shape() + like.ndim());
  shape[0] = count;
  return py::array(like.dtype(), shape);
}

py::array copy_slices(const py::array& values, Indices starts, Indices lengths, std::int64_t total) {
  py::array out = empty_rows(values, total);
  const Rows source = rows(values);
  auto* target = static_cast<std::byte*>(out.mutable_data());
  py::gil_scoped_release release;  // reading a memory map may wait for the disk
  gather(source, starts, lengths, target);
  return out;
}

py::array py_gather(const py::array& values, const IndexArray& starts, const IndexArray& lengths) {
  const Indices from = indices(starts, "starts"), counts = indices(lengths, "lengths");
  const std::int64_t total = without_gil([&, count = rows(values).count] { return check_slices(count, from, counts); });
  return copy_slices(values, from, counts, total);
}

py::tuple permute_by(const py::array& values, Indices lengths, Indices order) {
  Slices slices = without_gil([&, count = rows(values).count] { return permuted(count, lengths, order); });
  py::array moved = copy_slices(values, slices.starts, slices.lengths, slices.total);
  return py::make_tuple(std::move(moved), to_numpy(std::move(slices.lengths)));
}

py::tuple py_permute(const py::array& values, const IndexArray& lengths, const IndexArray& order) {
  return permute_by(values, indices(lengths, "lengths"), indices(order, "order"));
}

py::tuple py_combine(const py::array& values, const IndexArray& lengths, const IndexArray& order) {
  const Indices positions = indices(order, "order");
  return permute_by(values, indices(lengths, "lengths"), without_gil([&] { return invert(positions); }));
}

py::tuple py_dispatch(const py::array& values, const IndexArray& lengths, const IndexArray& ranks, std::int64_t world) {
  if (world < 1) throw std::invalid_argument("world = " + std::to_string(world) + " must be at least 1");
  const Indices counts = indices(lengths, "lengths"), destinations = indices(ranks, "ranks");
  Groups groups = without_gil([&] { return group_by_rank(counts, destinations, world); });
  py::tuple moved = permute_by(values, counts, groups.order);
  return py::make_tuple(moved[0], moved[1], to_numpy(std::move(groups.order)), to_numpy(std::move(groups.samples)),
                        to_numpy(std::move(groups.values)));
}

using LengthArray = py::array_t<std::int64_t, py::array::c_style>;

LengthTable length_table(const LengthArray& lengths) {
  if (lengths.ndim() != 2)
    throw std::invalid_argument("lengths: must be 2-D, not " + std::to_string(lengths.ndim()) + "-D");
  return {lengths.data(), lengths.shape(0), lengths.shape(1)};
}

std::vector<BatchRows> batch_rows(const std::vector<py::array>& tensors,
                                  const std::vector<std::vector<std::int64_t>>& columns) {
  if (tensors.size() != columns.size())
    throw std::invalid_argument("columns: " + std::to_string(columns.size()) + " entries, but there are " +
                                std::to_string(tensors.size()) + " tensors");
  std::vector<BatchRows> all;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const Rows own = rows(tensors[t]);
    all.push_back({const_cast<std::byte*>(own.data), own.count, own.bytes, columns[t]});
  }
  return all;
}

using ByteArray = py::array_t<std::uint8_t, py::array::c_style>;

ByteArray py_pack(const std::vector<py::array>& tensors, const std::vector<std::vector<std::int64_t>>& columns,
                  const LengthArray& lengths, const IndexArray& order, std::int64_t size) {
  if (size < 0) throw std::invalid_argument("size = " + std::to_string(size) + " is negative");
  const std::vector<BatchRows> all = batch_rows(tensors, columns);
  const LengthTable table = length_table(lengths);
  const Indices samples = indices(order, "order");
  ByteArray packed(size);
  auto* out = reinterpret_cast<std::byte*>(packed.mutable_data());
  without_gil([&] { pack(all, table, samples, out, size); });
  return packed;
}

void py_unpack(const ByteArray& packed, const IndexArray& starts, const LengthArray& lengths,
               const std::vector<std::vector<std::int64_t>>& columns, std::vector<py::array> tensors) {
  for (py::array& tensor : tensors) tensor.mutable_data();  // throws if the tensor is read-only
  const std::vector<BatchRows> all = batch_rows(tensors, columns);
  const LengthTable table = length_table(lengths);
  const Indices begin = indices(starts, "starts");
  const auto* from = reinterpret_cast<const std::byte*>(packed.data());
  without_gil([&, size = packed.size()] { unpack(from, size, begin, table, all); });
}

using RealArray = py::array_t<double, py::array::c_style>;

Costs cost_view(const RealArray& array) {
  if (array.ndim() != 1) throw std::invalid_argument("costs: must be 1-D, not " + std::to_string(array.ndim()) + "-D");
  return {array.data(), array.shape(0)};
}

IndexArray py_variable(const RealArray& costs, std::int64_t ranks, const std::optional<IndexArray>& tokens,
                       std::int64_t max_tokens, const std::optional<RealArray>& shares) {
  const Costs view = cost_view(costs);
  Bounds bounds;
  if (tokens) {
    if (indices(*tokens, "tokens").size != view.size)
      throw std::invalid_argument("tokens: " + std::to_string(tokens->size()) + " entries, but costs has " +
                                  std::to_string(view.size));
    bounds.tokens = tokens->data();
    bounds.max_tokens = max_tokens;
  }
  if (shares) {
    if (shares->ndim() != 1 || shares->shape(0) != ranks)
      throw std::invalid_argument("shares: " + std::to_string(shares->size()) + " entries for " +
                                  std::to_string(ranks) + " ranks");
    bounds.shares = shares->data();
  }
  return to_numpy(without_gil([&] { return variable(view, ranks, bounds); }));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of lightning_freescale. Use it through the Python modules, which document it.";
  module.def(
      "lengths_to_offsets",
      [](const IndexArray& lengths) { return to_numpy(lengths_to_offsets(indices(lengths, "lengths"))); },
      py::arg("lengths").noconvert());
  module.def("gather", &py_gather, py::arg("values"), py::arg("starts").noconvert(), py::arg("lengths").noconvert());
  module.def("permute", &py_permute, py::arg("values"), py::arg("lengths").noconvert(), py::arg("order").noconvert());
  module.def("combine", &py_combine, py::arg("values"), py::arg("lengths").noconvert(), py::arg("order").noconvert());
  module.def("dispatch", &py_dispatch, py::arg("values"), py::arg("lengths").noconvert(), py::arg("ranks").noconvert(),
             py::arg("world"));
  module.def("pack", &py_pack, py::arg("tensors"), py::arg("columns"), py::arg("lengths").noconvert(),
             py::arg("order").noconvert(), py::arg("size"));
  module.def("unpack", &py_unpack, py::arg("packed").noconvert(), py::arg("starts").noconvert(),
             py::arg("lengths").noconvert(), py::arg("columns"), py::arg("tensors"));

  module.def(
      "zigzag",
      [](const RealArray& costs, std::int64_t ranks) {
        return to_numpy(without_gil([&, view = cost_view(costs)] { return zigzag(view, ranks); }));
      },
      py::arg("costs").noconvert(), py::arg("ranks"));
  module.def(
      "fixed",
      [](const RealArray& costs, std::int64_t ranks) {
        return to_numpy(without_gil([&, view = cost_view(costs)] { return fixed(view, ranks); }));
      },
      py::arg("costs").noconvert(), py::arg("ranks"));
  module.def("variable", &py_variable, py::arg("costs").noconvert(), py::arg("ranks"), py::arg("tokens").noconvert(),
             py::arg("max_tokens"), py::arg("shares").noconvert());
  bind_exchange_index(module);
  bind_last_resort(module);
  bind_table_optimizer(module);
  bind_transport(module);
  bind_zero_collision(module);
}
