// Description of a caller's buffer, found without copying it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
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

// A torch tensor can be given another storage at any time: `storage` keeps the one that was found.
struct PlainBuffer {
    void* pointer;
    std::size_t count;
    Dtype dtype;
    nanobind::object storage;
};

// A NumPy array or a torch tensor that can be read and written where it lies, and holds what it shows; nothing if that
// is not so or not known without looking closer, as `describe` does.
std::optional<PlainBuffer> plain(nanobind::handle x);

}  // namespace multiring
