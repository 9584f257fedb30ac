#pragma once

#include <nanobind/nanobind.h>

namespace ingot {

void bind_recurrent(nanobind::module_& module);

}  // namespace ingot
