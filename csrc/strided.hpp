// Copies between two layouts of one shape, such as a transposed matrix into memory where it lies in order.
#pragma once

#include <cstddef>
#include <span>

namespace multiring {

struct StridedAxis {
    std::size_t size;
    std::ptrdiff_t to, from;  // strides, in elements
};

// Elements of 1, 2, 4, 8 or 16 bytes. The two share no memory.
void copy_strided(void* to, const void* from, std::span<const StridedAxis> axes, std::size_t itemsize);

}  // namespace multiring
