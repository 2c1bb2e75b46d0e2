// Errors that a user can recover from. They reach Python as the classes of multiring.errors; a wrong argument is
// std::invalid_argument (ValueError).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace multiring {

enum class ErrorKind : std::uint8_t { error, peer_lost, timeout, mismatch, resource };
inline constexpr ErrorKind last_kind = ErrorKind::resource;
// Its class in multiring.errors.
inline const char* class_name(ErrorKind kind) {
    static constexpr const char* classes[] = {"MultiringError", "PeerLost", "CollectiveTimeout", "Mismatch",
                                              "ResourceError"};
    return classes[static_cast<int>(kind)];
}

// A mismatch: which call, and fingerprints of what the culprit and the witness called, 0 where that is not known.
struct Disagreement {
    std::uint32_t communicator = 0;
    std::uint64_t number = ~std::uint64_t{0};  // a collective's; a message has none
    std::uint64_t culprits = 0, witness = 0;
};

struct Failure {
    ErrorKind kind = ErrorKind::error;
    int rank = -1;  // the culprit where one is known
    std::string host;
    std::string collective;
    std::int64_t number = -1;
    std::string message;
    double seconds = 0;  // that the culprit was waited for
    int witness = -1;    // the rank that has not heard of the culprit, or whose call is another, if it is that
    Disagreement disagreement{};
    int apart = -1;  // after a loss: the rank with which the culprit, which lives, cannot exchange messages
};

class EngineError : public std::runtime_error {
  public:
    explicit EngineError(Failure failure) : std::runtime_error(failure.message), failure(std::move(failure)) {}
    Failure failure;
};

// "what: the system's words for errno", with the remedy where descriptors are short
std::string system_message(const std::string& what, int error);

// A number as people write it: 0.3, 600.
std::string readable(double number);

[[noreturn]] inline void throw_resource_error(const std::string& message) {
    throw EngineError({ErrorKind::resource, -1, "", "", -1, message});
}

}  // namespace multiring
