#pragma once

#include <nanobind/nanobind.h>

namespace ingot {

void bind_pages(nanobind::module_& module);

}  // namespace ingot
