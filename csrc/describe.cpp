#include "describe.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string_view>
#include <utility>

namespace multiring {
namespace nb = nanobind;
namespace {

std::string name_of(nb::handle type) {
    const auto module = nb::cast<std::string>(nb::handle(type.attr("__module__").ptr()));
    const auto name = nb::cast<std::string>(nb::handle(type.attr("__qualname__").ptr()));
    return module == "builtins" ? name : module + "." + name;
}

std::string name_of_type(nb::handle x) {
    return name_of(x.type());
}

std::optional<Dtype> dtype_named(std::string_view wanted) {
    for (std::size_t code = 0; code < dtype_names.size(); ++code)
        if (dtype_names[code] == wanted) return static_cast<Dtype>(code);
    return {};
}

// The type is named as the object itself does, `otherwise` where it does not.
[[noreturn]] void refuse_dtype(nb::handle x, const std::string& otherwise) {
    std::string found = otherwise, known;
    if (nb::hasattr(x, "dtype")) {
        const nb::object dtype = x.attr("dtype");
        found = nb::cast<std::string>(nb::str(nb::handle(dtype)));
    }
    for (const auto name : dtype_names) known += (known.empty() ? "" : ", ") + std::string(name);
    throw nb::type_error(("elements of type " + found + " (in " + name_of_type(x) +
                          ") are not supported; convert them to one of " + known +
                          ", and convert back what is written in place")
                             .c_str());
}

std::optional<Dtype> integer_dtype(Py_ssize_t size) {
    switch (size) {
        case 1: return Dtype::int8;
        case 2: return Dtype::int16;
        case 4: return Dtype::int32;
        case 8: return Dtype::int64;
        default: return {};
    }
}

std::optional<Dtype> unsigned_dtype(Py_ssize_t size) {
    switch (size) {
        case 1: return Dtype::uint8;
        case 2: return Dtype::uint16;
        case 4: return Dtype::uint32;
        case 8: return Dtype::uint64;
        default: return {};
    }
}

// struct-module format codes, as the buffer protocol gives them.
Dtype buffer_dtype(nb::handle x, const Py_buffer& view) {
    const std::string format = view.format == nullptr ? "B" : view.format;
    std::string_view code = format;
    if (!code.empty() && (code[0] == '@' || code[0] == '=' || code[0] == '<')) code.remove_prefix(1);
    if (code == "f") return Dtype::float32;
    if (code == "d") return Dtype::float64;
    if (code == "e") return Dtype::float16;
    if (code == "B") return Dtype::uint8;
    if (code == "?") return Dtype::boolean;
    if (code == "Zf") return Dtype::complex64;
    if (code == "Zd") return Dtype::complex128;
    std::optional<Dtype> found;
    if (code == "H" || code == "I" || code == "L" || code == "Q") found = unsigned_dtype(view.itemsize);
    if (code == "b" || code == "h" || code == "i" || code == "l" || code == "q") found = integer_dtype(view.itemsize);
    if (!found) refuse_dtype(x, "'" + format + "'");
    return *found;
}

std::optional<Description> describe_buffer(nb::handle x) {
    if (!PyObject_CheckBuffer(x.ptr())) return {};
    Py_buffer view;
    if (PyObject_GetBuffer(x.ptr(), &view, PyBUF_RECORDS_RO) != 0) {
        PyErr_Clear();  // NumPy has arrays whose type the protocol cannot express, such as bfloat16
        return {};
    }
    struct Release {
        Py_buffer* view;
        ~Release() { PyBuffer_Release(view); }
    } release{&view};
    Description d;
    d.dtype = buffer_dtype(x, view);
    d.pointer = reinterpret_cast<std::uintptr_t>(view.buf);
    d.count = static_cast<std::size_t>(view.len / view.itemsize);
    d.shape.assign(view.shape, view.shape + view.ndim);
    d.contiguous = PyBuffer_IsContiguous(&view, 'C') != 0;
    d.writable = view.readonly == 0;
    return d;
}

// NumPy arrays of the bfloat16 and float8 types that ml_dtypes defines.
std::optional<Description> describe_narrow_array(nb::handle x) {
    if (!nb::hasattr(x, "__array_interface__") || !nb::hasattr(x, "dtype")) return {};
    const nb::object type = x.attr("dtype");
    const std::optional<Dtype> dtype = dtype_named(nb::cast<std::string>(nb::str(nb::handle(type))));
    if (!dtype) refuse_dtype(x, "");
    const nb::dict interface(x.attr("__array_interface__"));
    const nb::tuple data(interface["data"]), shape(interface["shape"]);
    Description d;
    d.dtype = *dtype;
    d.pointer = nb::cast<std::uintptr_t>(nb::object(data[0]));
    d.writable = !nb::cast<bool>(nb::object(data[1]));
    for (const nb::handle extent : shape) {
        d.shape.push_back(nb::cast<std::int64_t>(extent));
        d.count *= static_cast<std::size_t>(d.shape.back());
    }
    d.contiguous = nb::cast<bool>(nb::object(x.attr("flags")["C_CONTIGUOUS"]));
    return d;
}

std::optional<Dtype> dlpack_dtype(const nb::dlpack::dtype& type) {
    const int bytes = type.bits / 8;
    if (type.lanes == 1) {
        switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
            case nb::dlpack::dtype_code::Int: return integer_dtype(bytes);
            case nb::dlpack::dtype_code::UInt: return unsigned_dtype(bytes);
            case nb::dlpack::dtype_code::Float:
                if (bytes == 2) return Dtype::float16;
                if (bytes == 4) return Dtype::float32;
                if (bytes == 8) return Dtype::float64;
                break;
            case nb::dlpack::dtype_code::Bfloat:
                if (bytes == 2) return Dtype::bfloat16;
                break;
            case nb::dlpack::dtype_code::Complex:
                if (bytes == 8) return Dtype::complex64;
                if (bytes == 16) return Dtype::complex128;
                break;
            case nb::dlpack::dtype_code::Bool:
                if (bytes == 1) return Dtype::boolean;
                break;
            case nb::dlpack::dtype_code::Float8_E4M3FN: return Dtype::float8_e4m3fn;
            case nb::dlpack::dtype_code::Float8_E4M3FNUZ: return Dtype::float8_e4m3fnuz;
            case nb::dlpack::dtype_code::Float8_E5M2: return Dtype::float8_e5m2;
            case nb::dlpack::dtype_code::Float8_E5M2FNUZ: return Dtype::float8_e5m2fnuz;
            default: break;
        }
    }
    return {};
}

std::string device_name(int type, int id) {
    switch (type) {
        case nb::device::cpu::value: return "cpu";
        case nb::device::cuda::value: return "cuda:" + std::to_string(id);
        case nb::device::rocm::value: return "rocm:" + std::to_string(id);
        default: return "DLPack device " + std::to_string(type) + ":" + std::to_string(id);
    }
}

// Raise TypeError with the object's own reason for not handing its memory over, if it has one.
[[noreturn]] void refuse_dlpack(nb::handle x) {
    std::string reason = "its __dlpack__ returns no capsule that can be read";
    try {
        x.attr("__dlpack__")();
    } catch (nb::python_error& error) {
        reason = nb::cast<std::string>(nb::str(error.value()));
    }
    throw nb::type_error((name_of_type(x) + " cannot be read: " + reason).c_str());
}

// torch hands over the memory of such views as it is, though it holds other numbers than they show.
void refuse_lazy_view(nb::handle x) {
    for (const auto& [is, resolve] : {std::pair("is_conj", "resolve_conj"), std::pair("is_neg", "resolve_neg")})
        if (nb::hasattr(x, resolve) && nb::cast<bool>(nb::object(x.attr(is)())))
            throw nb::value_error((name_of_type(x) + " is a view whose memory holds other numbers than it shows (" +
                                   is + "): hand over x." + resolve +
                                   "(), and copy the result back if x is to be written")
                                      .c_str());
}

// Bytes by which the elements of a contiguous torch tensor reach beyond its storage, which may have been freed or cut
// under it.
std::size_t missing_bytes(nb::handle x, nb::handle storage, std::size_t count, std::size_t itemsize) {
    const auto has = nb::cast<std::size_t>(nb::object(storage.attr("nbytes")()));
    const auto offset = nb::cast<std::size_t>(nb::object(x.attr("storage_offset")()));
    const std::size_t end = (offset + count) * itemsize;
    return end > has ? end - has : 0;
}

void refuse_missing_memory(nb::handle x, const Description& d) {
    if (!d.contiguous || d.count == 0 || !nb::hasattr(x, "untyped_storage")) return;
    const nb::object storage = x.attr("untyped_storage")();
    if (const std::size_t missing = missing_bytes(x, storage, d.count, dtype_sizes[static_cast<std::size_t>(d.dtype)]))
        throw nb::value_error((name_of_type(x) + " shows " + std::to_string(d.count) + " elements, the last " +
                               std::to_string(missing) +
                               " bytes of which are not in its storage: it was freed or cut by resize_(); give it that "
                               "memory again, or hand over a tensor that has its own")
                                  .c_str());
}

void refuse_meta(nb::handle x) {
    if (nb::hasattr(x, "is_meta") && nb::cast<bool>(nb::object(x.attr("is_meta"))))
        throw nb::value_error((name_of_type(x) +
                               " is on the device meta and has no elements: hand over one that has, such as "
                               "torch.empty_like(x, device=\"cpu\") with its values filled in")
                                  .c_str());
}

// True if the elements lie one after the other; without strides they do.
bool is_contiguous(const std::int64_t* shape, const std::int64_t* strides, std::size_t dimensions) {
    bool found = true;
    std::int64_t stride = 1;
    for (std::size_t i = dimensions; i-- > 0;) {
        if (strides != nullptr && shape[i] > 1 && strides[i] != stride) found = false;
        stride *= shape[i];
    }
    return found || stride == 0;
}

template <class Array>
Description describe_array(nb::handle x, const Array& array, bool writable) {
    Description d;
    d.writable = writable;
    const nb::dlpack::dtype type = array.dtype();
    const std::optional<Dtype> dtype = dlpack_dtype(type);
    if (!dtype)
        refuse_dtype(x, "DLPack code " + std::to_string(type.code) + ", " + std::to_string(type.bits) + " bits");
    d.dtype = *dtype;
    d.pointer = reinterpret_cast<std::uintptr_t>(array.data());
    d.count = array.size();
    d.device = device_name(array.device_type(), array.device_id());
    for (std::size_t i = 0; i < array.ndim(); ++i) d.shape.push_back(static_cast<std::int64_t>(array.shape(i)));
    d.contiguous = is_contiguous(d.shape.data(), array.stride_ptr(), array.ndim());
    if (d.pointer == 0 && d.count != 0)
        throw nb::value_error((name_of_type(x) + " shows " + std::to_string(d.count) +
                               " elements and has no memory for them: hand over x.clone(), or give it memory again if "
                               "its storage was freed")
                                  .c_str());
    return d;
}

Description describe_dlpack(nb::handle x) {
    refuse_lazy_view(x);
    refuse_meta(x);
    const auto checked = [x](const Description& d) {
        refuse_missing_memory(x, d);
        return d;
    };
    if (nb::ndarray<> array; nb::try_cast(x, array, false)) return checked(describe_array(x, array, true));
    if (nb::ndarray<nb::ro> array; nb::try_cast(x, array, false)) return checked(describe_array(x, array, false));
    refuse_dlpack(x);
}

// ---- plain buffers ------------------------------------------------------------------------------------------------

// Functions by which a type describes its tensors in C (DLPack 1.2, DLPackExchangeAPI), many times as fast as
// __dlpack__ (benchmarks/results/2026-11-28-constants.md, Engine).
struct ExchangeTable {
    std::uint32_t major, minor;
    const ExchangeTable* older;
    void (*allocate)(), (*managed_tensor_of)(), (*object_of)();
    int (*tensor_of)(void* object, nb::dlpack::dltensor* out);
};

// A type whose objects may be plain; without a table it is NumPy's.
struct PlainType {
    PyTypeObject* type;
    const ExchangeTable* table;
};

// A table counts where the type itself has it, and of arrays only NumPy's own: derived types may see their memory
// otherwise.
std::optional<PlainType> plain_type(PyTypeObject* type) {
    static auto* const known = new std::vector<PlainType>;  // under the GIL; never destroyed, as its types are not
    for (const PlainType& each : *known)
        if (each.type == type) return each;
    const nb::handle handle(reinterpret_cast<PyObject*>(type));
    const nb::object own = handle.attr("__dict__");
    constexpr const char *attribute = "__dlpack_c_exchange_api__", *capsule_name = "dlpack_exchange_api";
    const ExchangeTable* table = nullptr;
    if (nb::cast<bool>(nb::object(own.attr("__contains__")(attribute)))) {
        const nb::object capsule(own[attribute]);
        if (!PyCapsule_IsValid(capsule.ptr(), capsule_name)) return {};
        table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), capsule_name));
        if (table->major != 1 || table->tensor_of == nullptr) return {};
    } else if (name_of(handle) != "numpy.ndarray") {
        return {};
    }
    handle.inc_ref();
    return known->emplace_back(PlainType{type, table});
}

bool says(nb::handle x, const char* question) {
    return nb::cast<bool>(nb::object(x.attr(question)()));
}

std::optional<PlainBuffer> plain_tensor(nb::handle x, const ExchangeTable& table) {
    if (nb::cast<bool>(nb::object(x.attr("requires_grad")))) return {};
    nb::dlpack::dltensor tensor{};
    if (table.tensor_of(x.ptr(), &tensor) != 0) {
        PyErr_Clear();  // who looks closer will say it
        return {};
    }
    const std::optional<Dtype> dtype = dlpack_dtype(tensor.dtype);
    const auto dimensions = static_cast<std::size_t>(tensor.ndim);
    if (!dtype || tensor.device.device_type != nb::device::cpu::value ||
        !is_contiguous(tensor.shape, tensor.strides, dimensions))
        return {};
    const bool is_complex = *dtype == Dtype::complex64 || *dtype == Dtype::complex128;
    if (says(x, "is_neg") || (is_complex && says(x, "is_conj"))) return {};
    std::size_t count = 1;
    for (std::size_t i = 0; i < dimensions; ++i) count *= static_cast<std::size_t>(tensor.shape[i]);
    const nb::object storage = x.attr("untyped_storage")();
    if (count != 0 &&
        (tensor.data == nullptr || missing_bytes(x, storage, count, dtype_sizes[static_cast<std::size_t>(*dtype)])))
        return {};  // zeros for which torch keeps no memory, or a storage that was freed or cut
    return PlainBuffer{static_cast<std::byte*>(tensor.data) + tensor.byte_offset, count, *dtype, storage};
}

}  // namespace

std::optional<PlainBuffer> plain(nb::handle x) {
    const auto type = plain_type(Py_TYPE(x.ptr()));
    if (!type) return {};
    if (type->table != nullptr) return plain_tensor(x, *type->table);
    const auto d = describe_buffer(x);
    if (!d || !d->contiguous || !d->writable) return {};
    return PlainBuffer{reinterpret_cast<void*>(d->pointer), d->count, d->dtype, {}};
}

Description describe(nb::handle x) {
    if (auto d = describe_buffer(x)) return *d;
    if (auto d = describe_narrow_array(x)) return *d;
    if (nb::hasattr(x, "__dlpack__")) return describe_dlpack(x);
    throw nb::type_error(("a NumPy array, a buffer or a DLPack tensor is needed, not " +
                          (x.is_none() ? std::string("None") : name_of_type(x)))
                             .c_str());
}

}  // namespace multiring
