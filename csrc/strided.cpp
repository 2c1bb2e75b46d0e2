#include "strided.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "reduce.hpp"

namespace multiring {
namespace {

struct SixteenBytes {
    std::uint64_t halves[2];
};

// The outermost first, as `to` lies; those that both sides pass as one are one.
std::vector<StridedAxis> simplified(std::span<const StridedAxis> axes) {
    std::vector<StridedAxis> sorted;
    for (const StridedAxis& each : axes)
        if (each.size != 1) sorted.push_back(each);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const StridedAxis& a, const StridedAxis& b) { return std::abs(a.to) > std::abs(b.to); });
    std::vector<StridedAxis> merged;
    for (const StridedAxis& each : sorted) {
        const auto size = static_cast<std::ptrdiff_t>(each.size);
        if (!merged.empty() && merged.back().to == size * each.to && merged.back().from == size * each.from)
            merged.back() = {merged.back().size * each.size, each.to, each.from};
        else
            merged.push_back(each);
    }
    return merged;
}

template <class T>
void copy_line(T* to, const T* from, const StridedAxis& line) {
    if (line.to == 1 && line.from == 1) {
        std::memcpy(to, from, line.size * sizeof(T));
        return;
    }
    for (std::size_t i = 0; i < line.size; ++i, to += line.to, from += line.from)
        std::memcpy(to, from, sizeof(T));  // which may lie anywhere
}

// Two axes, of which one is the innermost in `from` and the other in `to`.
template <class T>
void copy_plane(T* to, const T* from, const StridedAxis& rows, const StridedAxis& columns) {
    if (rows.from == 1 && columns.to == 1) {
        transpose(to, rows.to, from, columns.from, rows.size, columns.size, sizeof(T));
        return;
    }
    for (std::size_t i = 0; i < rows.size; ++i, to += rows.to, from += rows.from) copy_line(to, from, columns);
}

template <class T>
void copy_all(T* to, const T* from, std::span<const StridedAxis> outer, std::span<const StridedAxis> inner) {
    if (!outer.empty()) {
        for (std::size_t i = 0; i < outer[0].size; ++i, to += outer[0].to, from += outer[0].from)
            copy_all(to, from, outer.subspan(1), inner);
    } else if (inner.size() == 2) {
        copy_plane(to, from, inner[0], inner[1]);
    } else {
        copy_line(to, from, inner[0]);
    }
}

template <class T>
void copy_as(void* to, const void* from, std::span<const StridedAxis> outer, std::span<const StridedAxis> inner) {
    copy_all(static_cast<T*>(to), static_cast<const T*>(from), outer, inner);
}

}  // namespace

void copy_strided(void* to, const void* from, std::span<const StridedAxis> axes, std::size_t itemsize) {
    const auto is_empty = [](const StridedAxis& each) { return each.size == 0; };
    if (std::any_of(axes.begin(), axes.end(), is_empty)) return;
    std::vector<StridedAxis> outer = simplified(axes);
    if (outer.empty()) outer.push_back({1, 1, 1});
    std::vector<StridedAxis> inner{outer.back()};
    outer.pop_back();
    const auto rows = std::min_element(outer.begin(), outer.end(), [](const StridedAxis& a, const StridedAxis& b) {
        return std::abs(a.from) < std::abs(b.from);
    });
    if (rows != outer.end() && std::abs(rows->from) < std::abs(inner[0].from)) {
        inner.insert(inner.begin(), *rows);
        outer.erase(rows);
    }
    switch (itemsize) {
        case 1: return copy_as<std::uint8_t>(to, from, outer, inner);
        case 2: return copy_as<std::uint16_t>(to, from, outer, inner);
        case 4: return copy_as<std::uint32_t>(to, from, outer, inner);
        case 8: return copy_as<std::uint64_t>(to, from, outer, inner);
        case 16: return copy_as<SixteenBytes>(to, from, outer, inner);
        default: throw std::invalid_argument("elements of " + std::to_string(itemsize) + " bytes: 1, 2, 4, 8 or 16");
    }
}

}  // namespace multiring
