// Codes that Python and every message use for data types, operations and collectives; a name's position is its code.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace multiring {

enum class Dtype : std::uint8_t {
    float32,
    float64,
    float16,
    bfloat16,
    int8,
    uint8,
    int16,
    int32,
    int64,
    boolean,
    complex64,
    complex128,
    uint16,
    uint32,
    uint64,
    float8_e4m3fn,
    float8_e5m2,
    float8_e4m3fnuz,
    float8_e5m2fnuz
};
inline constexpr std::array<std::string_view, 19> dtype_names{
    "float32", "float64",       "float16",     "bfloat16",        "int8",           "uint8",  "int16",
    "int32",   "int64",         "bool",        "complex64",       "complex128",     "uint16", "uint32",
    "uint64",  "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"};
inline constexpr std::array<std::size_t, 19> dtype_sizes{4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 8, 16, 2, 4, 8, 1, 1, 1, 1};

enum class Op : std::uint8_t { sum, avg, min, max, prod, band, bor, bxor };
inline constexpr std::array<std::string_view, 8> op_names{"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};

enum class Collective : std::uint8_t {
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    reduce,
    all_to_all,
    barrier,
    send,
    recv,
    gather,  // this and what follows is made of messages, each signed as part of it
    scatter,
    new_group
};
inline constexpr std::array<std::string_view, 12> collective_names{
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",  "all_to_all",
    "barrier",    "send",           "recv",       "gather",    "scatter", "new_group"};

// planning/plan.py has the same sets (REDUCING, ROOTED, IN_BLOCKS): tests/unit/test_engine.py compares them.
inline constexpr bool reduces(Collective collective) {
    return collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
           collective == Collective::reduce;
}
inline constexpr bool has_root(Collective collective) {
    return collective == Collective::broadcast || collective == Collective::reduce;
}
// Its buffer is one block for each rank.
inline constexpr bool has_blocks(Collective collective) {
    return collective == Collective::all_gather || collective == Collective::reduce_scatter ||
           collective == Collective::all_to_all;
}

inline std::size_t itemsize(Dtype dtype) {
    return dtype_sizes[static_cast<std::size_t>(dtype)];
}

// Codes may come from a peer's message: unknown ones have a name too.
template <std::size_t n>
std::string_view name_in(const std::array<std::string_view, n>& names, std::size_t code) {
    return code < n ? names[code] : std::string_view("unknown");
}
inline std::string_view name(Dtype dtype) {
    return name_in(dtype_names, static_cast<std::size_t>(dtype));
}
inline std::string_view name(Op op) {
    return name_in(op_names, static_cast<std::size_t>(op));
}
inline std::string_view name(Collective collective) {
    return name_in(collective_names, static_cast<std::size_t>(collective));
}

}  // namespace multiring
