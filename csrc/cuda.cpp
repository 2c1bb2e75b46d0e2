#include "cuda.hpp"

#include <dlfcn.h>

#include <mutex>

#include "errors.hpp"

namespace multiring::cuda {
namespace {

constexpr const char* library_name = "libcuda.so.1";
constexpr int oldest_driver = 11070;  // the first with operations on memory that need no module parameter

template <class Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr)
        throw_resource_error(std::string("the CUDA driver (") + library_name + ") has no " + name +
                             ": it is older than CUDA 11.7; update the driver of this host");
}

Driver load() {
    void* library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        throw_resource_error(std::string("a tensor lies on a CUDA device, and the driver cannot be loaded (") +
                             (reason != nullptr ? reason : library_name) +
                             "): install the NVIDIA driver where this process finds " + library_name);
    }
    Driver driver{};
    find(library, "cuInit", driver.Init);
    find(library, "cuDriverGetVersion", driver.DriverGetVersion);
    find(library, "cuGetErrorString", driver.GetErrorString);
    find(library, "cuDeviceGet", driver.DeviceGet);
    find(library, "cuDevicePrimaryCtxRetain", driver.DevicePrimaryCtxRetain);
    find(library, "cuDevicePrimaryCtxRelease_v2", driver.DevicePrimaryCtxRelease);
    find(library, "cuCtxPushCurrent_v2", driver.CtxPushCurrent);
    find(library, "cuCtxPopCurrent_v2", driver.CtxPopCurrent);
    find(library, "cuCtxGetStreamPriorityRange", driver.CtxGetStreamPriorityRange);
    find(library, "cuMemHostRegister_v2", driver.MemHostRegister);
    find(library, "cuMemHostUnregister", driver.MemHostUnregister);
    find(library, "cuMemHostGetDevicePointer_v2", driver.MemHostGetDevicePointer);
    find(library, "cuStreamCreateWithPriority", driver.StreamCreateWithPriority);
    find(library, "cuStreamWaitEvent", driver.StreamWaitEvent);
    find(library, "cuStreamBatchMemOp_v2", driver.StreamBatchMemOp);
    find(library, "cuEventCreate", driver.EventCreate);
    find(library, "cuEventRecord", driver.EventRecord);
    find(library, "cuEventDestroy_v2", driver.EventDestroy);
    find(library, "cuMemcpyDtoHAsync_v2", driver.MemcpyDtoHAsync);
    find(library, "cuMemcpyHtoDAsync_v2", driver.MemcpyHtoDAsync);
    find(library, "cuMemcpy2DAsync_v2", driver.Memcpy2DAsync);
    driver.check("to start (cuInit)", driver.Init(0));
    int version = 0;
    driver.check("its version", driver.DriverGetVersion(&version));
    if (version < oldest_driver)
        throw_resource_error("the CUDA driver of this host is for CUDA " + std::to_string(version / 1000) + "." +
                             std::to_string(version % 1000 / 10) + ", and 11.7 or newer is needed: update it");
    return driver;
}

}  // namespace

const Driver& Driver::get() {
    static std::mutex mutex;
    static const Driver* loaded = nullptr;  // never unloaded: other parts of the process use the library too
    const std::lock_guard lock(mutex);
    if (loaded == nullptr) loaded = new Driver(load());
    return *loaded;
}

std::string Driver::describe(const char* what, ResultCode result) const {
    const char* text = nullptr;
    if (GetErrorString(result, &text) != 0 || text == nullptr) text = "unknown error";
    return std::string("the CUDA driver was asked ") + what + ": " + text + " (" + std::to_string(result) + ")";
}

void Driver::check(const char* what, ResultCode result) const {
    if (result != 0) throw_resource_error(describe(what, result));
}

Current::Current(const Driver& driver, Context context) : driver_(driver) {
    driver.check("for the context of a device", driver.CtxPushCurrent(context));
}

Current::~Current() {
    Context popped;
    driver_.CtxPopCurrent(&popped);
}

}  // namespace multiring::cuda
