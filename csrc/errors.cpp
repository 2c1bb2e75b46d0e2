#include "errors.hpp"

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace multiring {

std::string system_message(const std::string& what, int error) {
    const char* remedy = error == EMFILE || error == ENFILE ? " (raise ulimit -n)" : "";
    return what + ": " + std::generic_category().message(error) + remedy;
}

std::string readable(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", number);
    return text;
}

}  // namespace multiring
