// Python bindings of the index work: they read NumPy arrays, call the C++ functions without the GIL, and return NumPy
// arrays. lightning_freescale/embedding/cpp_index.py calls them and documents them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange_index.h"

namespace py = pybind11;

namespace freescale {
namespace {

using exchange_index::Cluster;
using exchange_index::Divided;
using exchange_index::Int;
using exchange_index::Mark;
using exchange_index::Marked;
using Ints = py::array_t<Int, py::array::c_style>;
using Marks = py::array_t<Mark, py::array::c_style>;

void expect(bool correct, const char* what) {
  if (!correct) throw std::invalid_argument(std::string("index of the exchange: ") + what);
}

const Int* data_or_null(const std::optional<Ints>& array) { return array ? array->data() : nullptr; }

py::tuple place(const Ints& values, const Ints& offsets, const Ints& sample_bounds, const Ints& first_key,
                const Ints& by_owner, const std::optional<Ints>& unbucketize, Int rank) {
  const Cluster cluster{first_key.size(), by_owner.size(), rank};
  const Int samples = sample_bounds.data()[cluster.ranks];
  Int requested = 0;
  for (Int peer = 0; peer < cluster.ranks; ++peer) requested += by_owner.data()[peer];
  expect(sample_bounds.size() == cluster.ranks + 1, "sample_bounds must have one entry more than there are ranks");
  expect(offsets.size() == cluster.features * samples + 1, "offsets must fit the features and samples");
  expect(offsets.data()[offsets.size() - 1] == values.size(), "offsets must end with the number of ids");
  expect(!unbucketize || unbucketize->size() == requested, "unbucketize must have an entry for each requested id");
  Ints lookup(cluster.segments() + 1), wire(cluster.segments()), keys(values.size()), owner_order(values.size());
  Ints requester_order(requested), batch_position(unbucketize ? requested : 0);
  const auto out = [](Ints& array) { return array.mutable_data(); };
  Int *to[] = {out(lookup), out(wire), out(keys), out(owner_order), out(requester_order), out(batch_position)};
  {
    py::gil_scoped_release release;
    exchange_index::place(cluster, values.data(), offsets.data(), samples, sample_bounds.data(), first_key.data(),
                          by_owner.data(), data_or_null(unbucketize), to[0], to[1], to[2], to[3], to[4], to[5]);
  }
  return py::make_tuple(lookup, wire, keys, owner_order, requester_order, batch_position);
}

// With the GIL: the work takes less time than another thread may keep it.
template <typename Id>
std::vector<Int> count_owners(const py::array_t<Id, py::array::c_style>& ids, Int block, Int ranks) {
  expect(block > 0 && ranks > 0, "block and ranks must be positive");
  std::vector<Int> counts(ranks);
  exchange_index::count_owners(ids.data(), ids.size(), block, ranks, counts.data());
  return counts;
}

void note(const Ints& keys, int stamp, Marks& stamps) {
  Mark* to = stamps.mutable_data();
  py::gil_scoped_release release;
  exchange_index::note(keys.data(), keys.size(), static_cast<Mark>(stamp), to);
}

void look(const Ints& keys, const Ints& lookup, const Ints& wire, const Ints& shifts, const Marks& stamps, int stamp,
          Int rank, Marks& marks, Int first, Marks& sent, Int kept_from) {
  const Cluster cluster{wire.size() / shifts.size(), shifts.size(), rank};
  expect(first + keys.size() <= marks.size() && kept_from <= marks.size(), "the buffer of marks is too small");
  Mark *all = marks.mutable_data(), *to_others = sent.mutable_data();
  const Int num_sent = sent.size();
  py::gil_scoped_release release;
  exchange_index::look(cluster, keys.data(), {lookup.data(), wire.data()}, shifts.data(), stamps.data(),
                       static_cast<Mark>(stamp), all + first, to_others, num_sent, all + kept_from);
}

Marked marked(const Marks& marks, Int first, Int received_from, const Ints& start, const Ints& end, const Ints& shift) {
  return {marks.data() + first, marks.data() + received_from, start.data(), end.data(), shift.data()};
}

Ints count(const Marks& marks, Int first, Int received_from, const Ints& lookup, const Ints& receive_start,
           const Ints& receive_end, const Ints& receive_shift, Int features, Int rank) {
  const Cluster cluster{features, receive_start.size(), rank};
  Ints counts(2 * cluster.ranks + 2 * features);
  Int* to = counts.mutable_data();
  py::gil_scoped_release release;
  exchange_index::count(cluster, marked(marks, first, received_from, receive_start, receive_end, receive_shift),
                        lookup.data(), to);
  return counts;
}

py::tuple divide(const Marks& marks, Int first, Int received_from, const Ints& values, const Ints& offsets,
                 const Ints& lookup, const Ints& counts, const std::optional<Ints>& unbucketize,
                 const Ints& receive_start, const Ints& receive_end, const Ints& receive_shift, Int features,
                 Int rank) {
  const Cluster cluster{features, receive_start.size(), rank};
  const Int owned = values.size(), lengths = offsets.size() - 1;
  Int requested = 0;
  for (Int peer = 0; peer < cluster.ranks; ++peer) requested += receive_end.data()[peer] - receive_start.data()[peer];
  expect(counts.size() == 2 * cluster.ranks + 2 * features, "counts must fit the ranks and features");
  expect(!unbucketize || unbucketize->size() == requested, "unbucketize must have an entry for each requested id");
  Ints arrays[] = {Ints(owned),     Ints(owned),     Ints(owned),            Ints(owned),
                   Ints(requested), Ints(requested), Ints(2 * (lengths + 1))};
  Int* to[7];
  for (int i = 0; i < 7; ++i) to[i] = arrays[i].mutable_data();
  {
    py::gil_scoped_release release;
    exchange_index::divide(cluster, marked(marks, first, received_from, receive_start, receive_end, receive_shift),
                           values.data(), offsets.data(), lengths, lookup.data(), counts.data(),
                           data_or_null(unbucketize),
                           Divided{to[0], to[1], to[2], to[3], to[4], to[5], to[6]});
  }
  py::tuple found(7);
  for (int i = 0; i < 7; ++i) found[i] = arrays[i];
  return found;
}

}  // namespace

void bind_exchange_index(py::module_& module) {
  module.def("exchange_place", &place);
  module.def("count_owners", &count_owners<std::int64_t>, py::arg("ids").noconvert(), py::arg("block"), py::arg("ranks"));
  module.def("count_owners", &count_owners<std::int32_t>, py::arg("ids").noconvert(), py::arg("block"), py::arg("ranks"));
  module.def("exchange_note", &note);
  module.def("exchange_look", &look);
  module.def("exchange_count", &count);
  module.def("exchange_divide", &divide);
}

}  // namespace freescale
