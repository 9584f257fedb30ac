#include <nanobind/nanobind.h>

#include <cstdint>

#include "kernels.h"
#include "linear.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_native, module) {
  nb::module_::import_("mlx.core");
  module.def(
      "linear",
      [](const mlx::core::array& x, const mlx::core::array& quanta, const mlx::core::array& scales,
         const mlx::core::array& biases, int group, int bits) {
        return ingot::linear(x, quanta, scales, biases, group, bits);
      },
      "x"_a, "quanta"_a, "scales"_a, "biases"_a, nb::kw_only(), "group_size"_a, "bits"_a,
      "x [..., columns] times the transpose of a packed matrix [rows, columns], as mx.quantize packs it.");
  module.def(
      "use_blas", [](uintptr_t address) { ingot::use_blas(reinterpret_cast<ingot::Sgemm>(address)); }, "address"_a,
      "Multiply many rows with the cblas_sgemm at this address, which must use one thread a call.");
  module.def("instruction_set", [] { return ingot::kernels().name; }, "The instruction set that is used here.");
  module.def("threads", [] { return ingot::Pool::shared().threads(); }, "How many threads work on an operation.");
}
