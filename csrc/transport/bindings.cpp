// Python bindings of the transport. lightning_freescale/transport/host_staged.py wraps them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "queue.h"
#include "sha256.h"

namespace py = pybind11;

namespace freescale {
namespace {

using namespace transport;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// A forked child inherits the object but none of its threads, so the child must not destroy it.
std::shared_ptr<Queue> make_queue(std::shared_ptr<Device> device, int rank, std::vector<std::string> hosts,
                                  bool high_priority, std::size_t chunk_bytes, std::size_t buffer_bytes, double timeout,
                                  std::string bind_to, std::string secret, std::size_t network_threads,
                                  bool device_rings, std::string nixl_library, bool early_flag) {
  Settings settings;
  settings.high_priority = high_priority;
  settings.chunk_bytes = chunk_bytes;
  settings.buffer_bytes = buffer_bytes;
  settings.timeout = timeout;
  settings.bind_to = std::move(bind_to);
  settings.secret = std::move(secret);
  settings.network_threads = network_threads;
  settings.device_rings = device_rings;
  settings.nixl_library = std::move(nixl_library);
  settings.early_flag = early_flag;
  py::gil_scoped_release release_gil;
  auto* queue = new Queue(std::move(device), rank, std::move(hosts), std::move(settings));
  return std::shared_ptr<Queue>(queue, [process = getpid()](Queue* pointer) {
    if (process != getpid()) return;
    py::gil_scoped_release release;
    delete pointer;
  });
}

// The end of an exchange calls the driver, which may block. Python holds its lock when it drops an object.
std::shared_ptr<Exchange> freed_without_gil(std::shared_ptr<Exchange> exchange) {
  Exchange* pointer = exchange.get();
  return std::shared_ptr<Exchange>(pointer, [exchange = std::move(exchange)](Exchange*) mutable {
    if (!PyGILState_Check()) {
      exchange.reset();
      return;
    }
    py::gil_scoped_release release;
    exchange.reset();
  });
}

std::vector<Buffer> buffers(const std::vector<Address>& addresses, const std::vector<std::size_t>& bytes) {
  if (addresses.size() != bytes.size()) throw std::invalid_argument("there must be as many sizes as addresses");
  std::vector<Buffer> list;
  for (std::size_t i = 0; i < addresses.size(); ++i) list.push_back({addresses[i], bytes[i]});
  return list;
}

py::dict as_dict(const Report& report) {
  py::dict dict;
  dict["pinned_bytes"] = report.pinned_bytes;
  dict["ring_bytes"] = report.ring_bytes;
  dict["ring_bound_bytes"] = report.ring_bound_bytes;
  dict["device_bytes"] = report.device_bytes;
  dict["exchanges"] = report.exchanges;
  dict["sent_bytes"] = report.sent_bytes;
  dict["received_bytes"] = report.received_bytes;
  return dict;
}

}  // namespace

void bind_transport(py::module_& module) {
  py::class_<Device, std::shared_ptr<Device>>(module, "TransportDevice").def_property_readonly("name", &Device::name);
  module.def("cuda_device", &cuda_device, py::arg("ordinal"), ReleaseGil());
  module.def("host_device", &host_device);
  module.def("cuda_facts", [] {
    CudaFacts facts;
    {
      py::gil_scoped_release release;  // the driver may take seconds to start
      facts = cuda_facts();
    }
    return py::make_tuple(facts.problem, facts.driver_version, facts.devices);
  });
  module.def("shared_memory_free", &Segment::free_bytes);
  module.def("close_sockets_after_fork", &close_sockets_after_fork);
  module.def("hmac_sha256", [](const std::string& key, const std::string& message) {
    const Digest digest = hmac_sha256(key, message);
    return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  });

  py::class_<Exchange, std::shared_ptr<Exchange>>(module, "TransportExchange")
      .def("done", &Exchange::done, ReleaseGil())
      .def("block_stream", &Exchange::block_stream, py::arg("stream"), ReleaseGil())
      .def("wait", &Exchange::wait, py::arg("seconds"), ReleaseGil())
      .def_property_readonly("name", &Exchange::name);

  py::class_<Queue, std::shared_ptr<Queue>>(module, "TransportQueue")
      .def(py::init(&make_queue), py::kw_only(), py::arg("device"), py::arg("rank"), py::arg("hosts"),
           py::arg("high_priority"), py::arg("chunk_bytes"), py::arg("buffer_bytes"), py::arg("timeout"),
           py::arg("bind_to"), py::arg("secret"), py::arg("network_threads"), py::arg("device_rings") = false,
           py::arg("nixl_library") = "", py::arg("early_flag") = false)
      .def("address", &Queue::address, ReleaseGil())
      .def(
          "connect",
          [](Queue& queue, const std::vector<std::string>& addresses, const py::function& check) {
            py::gil_scoped_release release;
            queue.connect(addresses, [&check] {
              py::gil_scoped_acquire acquire;
              check();
            });
          },
          py::arg("addresses"), py::arg("check"))
      .def("map_device_rings", &Queue::map_device_rings, py::arg("addresses"), ReleaseGil())
      .def("drop_device_rings", &Queue::drop_device_rings, ReleaseGil())
      .def("unlink_segment", &Queue::unlink_segment, ReleaseGil())
      .def(
          "exchange",
          [](Queue& queue, const std::string& kind, const std::vector<Address>& out,
             const std::vector<std::size_t>& out_bytes, const std::vector<Address>& in,
             const std::vector<std::size_t>& in_bytes, StreamHandle caller) {
            return freed_without_gil(queue.exchange(kind, buffers(out, out_bytes), buffers(in, in_bytes), caller));
          },
          py::arg("kind"), py::arg("send"), py::arg("send_bytes"), py::arg("receive"), py::arg("receive_bytes"),
          py::arg("stream"), ReleaseGil())
      .def("failure", &Queue::failure, ReleaseGil())
      .def("report",
           [](const Queue& queue) {
             Report report;
             {
               py::gil_scoped_release release;  // the lock of the queue may be held by a thread that waits for Python's
               report = queue.report();
             }
             return as_dict(report);
           })
      .def("streams", &Queue::streams)
      .def("close", &Queue::close, py::arg("seconds"), ReleaseGil());
}

}  // namespace freescale
