// libmultiring.so: finds the Python that multiring is installed in, starts it if this process has none, lets it join
// the job, and from then on calls the engine directly.
#include <dlfcn.h>
#include <multiring.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <type_traits>

#include "c_api.hpp"
#include "types.hpp"

namespace {

multiring::CFunctions functions;
std::mutex starting;
thread_local char last_error[multiring::CFunctions::error_bytes];

int fail(int code, const std::string& text) {
    std::snprintf(last_error, sizeof last_error, "%s", text.c_str());
    return code;
}

// Functions of Python, found by name: the library links to no version of it.
struct Python {
    int (*is_initialized)();
    void (*initialize)(int);
    int (*run)(const char*, void*);
    int (*ensure)();
    void (*release)(int);
    void* (*save_thread)();

    bool find(void* library) {
        const auto symbol = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        return symbol(is_initialized, "Py_IsInitialized") && symbol(initialize, "Py_InitializeEx") &&
               symbol(run, "PyRun_SimpleStringFlags") && symbol(ensure, "PyGILState_Ensure") &&
               symbol(release, "PyGILState_Release") && symbol(save_thread, "PyEval_SaveThread");
    }
} python;

std::string output_of(const std::string& command) {
    std::string output;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return output;
    char part[4096];
    while (const std::size_t size = fread(part, 1, sizeof part, pipe)) output.append(part, size);
    pclose(pipe);
    return output;
}

// Load and start the Python that MULTIRING_PYTHON names, or python3; the reason if that fails.
std::string start_python() {
    if (python.find(RTLD_DEFAULT) && python.is_initialized()) return "";
    const char* chosen = std::getenv("MULTIRING_PYTHON");
    const std::string program = chosen != nullptr && *chosen != '\0' ? chosen : "python3";
    const std::string found = output_of("'" + program + "' -m multiring.embed --where");
    const std::size_t end = found.find('\n');
    if (end == std::string::npos)
        return "multiring cannot be imported by " + program + ": set MULTIRING_PYTHON to the Python it is installed in";
    const std::string library = found.substr(0, end);
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr)
        return program + " has no shared library (" + dlerror() +
               "): set MULTIRING_PYTHON to a Python built with --enable-shared, as the distributions' are";
    if (!python.find(handle)) return library + " is no Python";
    python.initialize(0);
    // Its .pth files too: what is installed as editable is found through them.
    python.run(("import sys, site; sys.path[:] = " + found.substr(end + 1) +
                "\n[site.addsitedir(path) for path in list(sys.path) if path.endswith('-packages')]\ndel sys, site")
                   .c_str(),
               nullptr);
    python.save_thread();  // whoever needs the interpreter takes it
    return "";
}

int in_python(const char* function) {
    char code[200];
    std::snprintf(code, sizeof code, "from multiring import embed; embed.%s(%zu)", function,
                  reinterpret_cast<std::size_t>(&functions));
    functions.code = MULTIRING_FAILED;
    std::snprintf(functions.error, sizeof functions.error, "multiring.embed failed: its reason is above");
    const int state = python.ensure();
    python.run(code, nullptr);
    python.release(state);
    return functions.code == MULTIRING_OK ? MULTIRING_OK : fail(functions.code, functions.error);
}

int collective(multiring::Collective which, void* data, std::size_t count, int dtype, int op, int root,
               multiring_callback done, void* context) {
    if (functions.collective == nullptr) return fail(MULTIRING_USAGE, "multiring is not initialised");
    return functions.collective(static_cast<int>(which), data, count, dtype, op, root, done, context, last_error);
}

}  // namespace

extern "C" {

#define MULTIRING_EXPORT __attribute__((visibility("default")))

MULTIRING_EXPORT int multiring_init(void) {
    const std::lock_guard lock(starting);
    const std::string obstacle = start_python();
    return obstacle.empty() ? in_python("init") : fail(MULTIRING_FAILED, obstacle);
}

MULTIRING_EXPORT int multiring_shutdown(void) {
    const std::lock_guard lock(starting);
    if (functions.collective == nullptr) return MULTIRING_OK;
    return in_python("shutdown");
}

MULTIRING_EXPORT int multiring_rank(void) {
    return functions.rank;
}

MULTIRING_EXPORT int multiring_world_size(void) {
    return functions.world_size;
}

MULTIRING_EXPORT int multiring_all_reduce(void* data, size_t count, multiring_dtype dtype, multiring_op op,
                                          multiring_callback done, void* context) {
    return collective(multiring::Collective::all_reduce, data, count, dtype, op, 0, done, context);
}

MULTIRING_EXPORT int multiring_broadcast(void* data, size_t count, multiring_dtype dtype, int root,
                                         multiring_callback done, void* context) {
    return collective(multiring::Collective::broadcast, data, count, dtype, 0, root, done, context);
}

MULTIRING_EXPORT int multiring_barrier(void) {
    unsigned char token = 0;
    return collective(multiring::Collective::barrier, &token, 1, MULTIRING_UINT8, 0, 0, nullptr, nullptr);
}

MULTIRING_EXPORT const char* multiring_error(void) {
    return last_error;
}

}  // extern "C"
