#include "c_api.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "native_calls.hpp"

namespace multiring {
namespace {

// The codes of multiring.h are those of types.hpp.
constexpr std::pair<multiring_dtype, Dtype> types_in_c[] = {{MULTIRING_FLOAT32, Dtype::float32},
                                                            {MULTIRING_FLOAT64, Dtype::float64},
                                                            {MULTIRING_FLOAT16, Dtype::float16},
                                                            {MULTIRING_BFLOAT16, Dtype::bfloat16},
                                                            {MULTIRING_INT8, Dtype::int8},
                                                            {MULTIRING_UINT8, Dtype::uint8},
                                                            {MULTIRING_INT16, Dtype::int16},
                                                            {MULTIRING_INT32, Dtype::int32},
                                                            {MULTIRING_INT64, Dtype::int64},
                                                            {MULTIRING_BOOL, Dtype::boolean},
                                                            {MULTIRING_COMPLEX64, Dtype::complex64},
                                                            {MULTIRING_COMPLEX128, Dtype::complex128},
                                                            {MULTIRING_UINT16, Dtype::uint16},
                                                            {MULTIRING_UINT32, Dtype::uint32},
                                                            {MULTIRING_UINT64, Dtype::uint64},
                                                            {MULTIRING_FLOAT8_E4M3FN, Dtype::float8_e4m3fn},
                                                            {MULTIRING_FLOAT8_E5M2, Dtype::float8_e5m2},
                                                            {MULTIRING_FLOAT8_E4M3FNUZ, Dtype::float8_e4m3fnuz},
                                                            {MULTIRING_FLOAT8_E5M2FNUZ, Dtype::float8_e5m2fnuz}};
constexpr std::pair<multiring_op, Op> ops_in_c[] = {
    {MULTIRING_SUM, Op::sum},   {MULTIRING_AVG, Op::avg},   {MULTIRING_MIN, Op::min}, {MULTIRING_MAX, Op::max},
    {MULTIRING_PROD, Op::prod}, {MULTIRING_BAND, Op::band}, {MULTIRING_BOR, Op::bor}, {MULTIRING_BXOR, Op::bxor}};
constexpr auto is_same_code = [](const auto& pair) {
    return static_cast<int>(pair.first) == static_cast<int>(pair.second);
};
static_assert(std::size(types_in_c) == dtype_names.size() &&
              std::all_of(std::begin(types_in_c), std::end(types_in_c), is_same_code));
static_assert(std::size(ops_in_c) == op_names.size() &&
              std::all_of(std::begin(ops_in_c), std::end(ops_in_c), is_same_code));

int code_of(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::peer_lost: return MULTIRING_PEER_LOST;
        case ErrorKind::timeout: return MULTIRING_TIMEOUT;
        case ErrorKind::mismatch: return MULTIRING_MISMATCH;
        case ErrorKind::resource: return MULTIRING_RESOURCE;
        default: return MULTIRING_FAILED;
    }
}

int write_error(char* error, int code, const std::string& text) {
    std::snprintf(error, CFunctions::error_bytes, "%s", text.c_str());
    return code;
}

template <class Enum, std::size_t n>
Enum checked(int value, const std::array<std::string_view, n>&, const char* what) {
    if (value >= 0 && value < static_cast<int>(n)) return static_cast<Enum>(value);
    throw std::invalid_argument("no " + std::string(what) + " has the number " + std::to_string(value));
}

int run_collective(int collective, void* data, std::size_t count, int dtype, int op, int root, multiring_callback done,
                   void* context, char* error) noexcept try {
    const auto world = published(0);
    if (root < 0) throw std::invalid_argument("root=" + std::to_string(root) + ": a rank is 0 or more");
    if (data == nullptr && count != 0) throw std::invalid_argument("data is NULL and count is not 0");
    const auto type = checked<Dtype>(dtype, dtype_names, "dtype");
    if (count > PTRDIFF_MAX / itemsize(type))  // such as a negative number
        throw std::invalid_argument("count=" + std::to_string(count) + ": no buffer has so many elements");
    const auto what = checked<Collective>(collective, collective_names, "collective");
    const Call call{.collective = what,
                    .pointer = static_cast<std::byte*>(data),
                    .count = count,
                    .dtype = type,
                    .op = checked<Op>(op, op_names, "op"),
                    .root = static_cast<std::uint32_t>(root),
                    .timeout = world->timeout};
    const auto sees_no_signals = [] {};
    if (done == nullptr) {
        world->run(call, sees_no_signals);
    } else {
        const auto on_done = [done, context](const std::optional<Failure>& failure) {
            if (!failure) return done(context, MULTIRING_OK, "");
            take_step_before_error();
            done(context, code_of(failure->kind), error_text(*failure).c_str());
        };
        world->start(call, nullptr, sees_no_signals, on_done);
    }
    return MULTIRING_OK;
} catch (const EngineError& failed) {
    take_step_before_error();
    return write_error(error, code_of(failed.failure.kind), error_text(failed.failure));
} catch (const std::exception& wrong) {
    return write_error(error, MULTIRING_USAGE, wrong.what());
}

}  // namespace

void fill_c_functions(CFunctions& functions, int rank, int world_size) {
    functions.rank = rank;
    functions.world_size = world_size;
    functions.collective = &run_collective;
    functions.code = MULTIRING_OK;
}

void clear_c_functions(CFunctions& functions) {
    functions.rank = functions.world_size = -1;
    functions.collective = nullptr;
    functions.code = MULTIRING_OK;
}

void tell_c_error(CFunctions& functions, const std::string& class_name, const std::string& message) {
    static constexpr std::pair<const char*, int> codes[] = {
        {"PeerLost", MULTIRING_PEER_LOST}, {"CollectiveTimeout", MULTIRING_TIMEOUT},
        {"Mismatch", MULTIRING_MISMATCH},  {"ResourceError", MULTIRING_RESOURCE},
        {"ValueError", MULTIRING_USAGE},   {"TypeError", MULTIRING_USAGE}};
    int code = MULTIRING_FAILED;
    for (const auto& [name, its] : codes)
        if (class_name == name) code = its;
    functions.code = write_error(functions.error, code, class_name + ": " + message);
}

}  // namespace multiring
