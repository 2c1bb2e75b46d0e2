#include "xla.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "native_calls.hpp"

namespace multiring::xla {
namespace {

std::size_t elements(const Buffer& buffer) {
    std::size_t count = 1;
    for (std::int64_t i = 0; i < buffer.rank; ++i) count *= static_cast<std::size_t>(buffer.extents[i]);
    return count;
}

Dtype dtype_of(const Buffer& buffer) {
    switch (buffer.dtype) {
        case 1: return Dtype::boolean;
        case 2: return Dtype::int8;
        case 3: return Dtype::int16;
        case 4: return Dtype::int32;
        case type_int64: return Dtype::int64;
        case 6: return Dtype::uint8;
        case 7: return Dtype::uint16;
        case 8: return Dtype::uint32;
        case 9: return Dtype::uint64;
        case 10: return Dtype::float16;
        case 11: return Dtype::float32;
        case 12: return Dtype::float64;
        case 15: return Dtype::complex64;
        case 16: return Dtype::bfloat16;
        case 18: return Dtype::complex128;
        case 19: return Dtype::float8_e5m2;
        case 20: return Dtype::float8_e4m3fn;
        case 24: return Dtype::float8_e5m2fnuz;
        case 25: return Dtype::float8_e4m3fnuz;
    }
    throw std::invalid_argument("XLA's type number " + std::to_string(buffer.dtype) + " cannot be moved");
}

std::int64_t attribute(const Attributes& attributes, std::string_view wanted) {
    for (std::int64_t i = 0; i < attributes.size; ++i) {
        if (std::string_view(attributes.names[i]->data, attributes.names[i]->size) != wanted) continue;
        const auto* scalar = static_cast<const Scalar*>(attributes.values[i]);
        if (attributes.types[i] != scalar_attribute || scalar->dtype != type_int64) break;
        return *static_cast<const std::int64_t*>(scalar->value);
    }
    throw std::invalid_argument("the attribute " + std::string(wanted) + " is missing, or no int64");
}

template <class Enum, std::size_t n>
Enum code(std::int64_t value, const std::array<std::string_view, n>& names, const char* what) {
    if (value >= 0 && value < static_cast<std::int64_t>(names.size())) return static_cast<Enum>(value);
    throw std::invalid_argument("no " + std::string(what) + " has the number " + std::to_string(value));
}

// The one array among the buffers; the rest are tokens.
const Buffer& array(const Buffers& buffers) {
    for (std::int64_t i = 0; i < buffers.size; ++i)
        if (buffers.buffers[i]->dtype != type_token) return *buffers.buffers[i];
    throw std::invalid_argument("no array is given");
}

void check_count(std::size_t found, std::size_t expected) {
    if (found != expected)
        throw std::invalid_argument("a result of " + std::to_string(found) + " elements was compiled, and " +
                                    std::to_string(expected) + " arrive: the number of ranks has changed");
}

void run(const Attributes& attributes, const Buffer& in, const Buffer& out) {
    const auto collective = code<Collective>(attribute(attributes, "collective"), collective_names, "collective");
    const auto op = code<Op>(attribute(attributes, "op"), op_names, "op");
    const auto root = static_cast<std::uint32_t>(attribute(attributes, "root"));
    const auto label = static_cast<std::uint32_t>(attribute(attributes, "label"));
    const auto communicator = published(static_cast<std::uint32_t>(attribute(attributes, "communicator")));
    const Dtype dtype = dtype_of(in);
    const std::size_t given = elements(in), size = static_cast<std::size_t>(communicator->size);
    auto* const data = static_cast<std::byte*>(out.data);
    const auto block = [&](std::size_t count) { return static_cast<std::size_t>(communicator->rank) * count; };
    const auto go = [&](void* pointer, std::size_t count) {
        communicator->run({.collective = collective,
                           .pointer = static_cast<std::byte*>(pointer),
                           .count = count,
                           .dtype = dtype,
                           .op = op,
                           .root = root,
                           .label = label,
                           .timeout = communicator->timeout},
                          [] {});
    };
    const auto copy = [&](void* to, const void* from, std::size_t count) {
        if (count != 0 && to != from) std::memcpy(to, from, count * itemsize(dtype));
    };
    switch (collective) {
        case Collective::all_reduce:
        case Collective::broadcast:
            check_count(elements(out), given);
            copy(data, in.data, given);
            go(data, given);
            return;
        case Collective::all_to_all:
            check_count(elements(out), given / size * size);
            copy(data, in.data, given);
            go(data, given / size);
            return;
        case Collective::all_gather:
            check_count(elements(out), given * size);
            copy(data + block(given) * itemsize(dtype), in.data, given);
            go(data, given);
            return;
        case Collective::reduce_scatter: {
            check_count(elements(out) * size, given);
            // A plan leaves partial sums in all blocks.
            const auto scratch = std::make_unique_for_overwrite<std::byte[]>(given * itemsize(dtype));
            copy(scratch.get(), in.data, given);
            go(scratch.get(), given / size);
            copy(data, scratch.get() + block(given / size) * itemsize(dtype), given / size);
            return;
        }
        default: throw std::invalid_argument(std::string(name(collective)) + " is not offered to XLA");
    }
}

Error* error(const CallFrame& frame, int code, const std::string& message) {
    ErrorArguments arguments{sizeof(ErrorArguments), nullptr, message.c_str(), code};
    return frame.api->create_error(&arguments);
}

}  // namespace

Error* run_collective(CallFrame* frame) noexcept {
    if (frame->extensions != nullptr && frame->extensions->type == metadata_extension) {
        Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame->extensions)->metadata;
        metadata.version.major = 0;
        metadata.version.minor = 1;
        metadata.traits = 0;
        return nullptr;
    }
    try {
        run(frame->attributes, array(frame->arguments), array(frame->results));
        return nullptr;
    } catch (const EngineError& failed) {
        take_step_before_error();
        return error(*frame, aborted, "multiring." + error_text(failed.failure));
    } catch (const std::invalid_argument& wrong) {
        return error(*frame, invalid_argument, std::string("multiring: ") + wrong.what());
    } catch (const std::exception& other) {
        return error(*frame, aborted, std::string("multiring: ") + other.what());
    }
}

}  // namespace multiring::xla
