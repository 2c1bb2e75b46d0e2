// What a caller's buffer is, found without copying it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "types.hpp"

namespace multiring {

struct Description {
    std::uintptr_t pointer = 0;
    std::size_t count = 1;
    Dtype dtype{};
    std::vector<std::int64_t> shape;
    bool contiguous = true;
    bool writable = true;
    std::string device = "cpu";
};

// NumPy arrays, anything with the buffer protocol, DLPack tensors; TypeError for the rest.
Description describe(nanobind::handle x);

}  // namespace multiring
