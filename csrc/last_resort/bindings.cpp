// Python bindings of the last resort (lightning_freescale/runtime/last_resort.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "last_resort.h"

namespace freescale {

void bind_last_resort(pybind11::module_& module) {
  module.def("arm_last_resort", &arm_last_resort, pybind11::arg("seconds"), pybind11::arg("message"),
             pybind11::arg("connections"));
  module.def("disarm_last_resort", &disarm_last_resort);
  module.def("name_crashes", &name_crashes, pybind11::arg("message"));
}

}  // namespace freescale
