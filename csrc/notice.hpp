// Notice: a first failure, as ranks tell each other of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "errors.hpp"
#include "frame.hpp"

namespace multiring {

// No failure yet: the witness misses the rank.
enum class Complaint : std::uint8_t {
    none,
    silent,          // it has not heard of it
    unacknowledged,  // nothing that it sent there was acknowledged
    answered,        // it has been complained of by it, and lives
    unconnected,     // it needs a connection to it, has dialled all the time, and has none
};

struct Notice {
    static constexpr std::size_t longest_text = std::size_t{1} << 16;

    int from = -1;  // the rank that passed it on; of a farewell, over a control connection, else -1
    ErrorKind kind{};
    int rank = -1;  // the culprit
    std::string text;
    double seconds = 0;     // that the culprit was waited for
    bool farewell = false;  // no failure: `rank` leaves on purpose
    int witness = -1;       // as of a Failure
    Disagreement disagreement{};
    int apart = -1;  // as of a Failure
    Complaint complaint = Complaint::none;
};

// The frame that comes before the text.
inline Frame frame_of(const Notice& notice, std::uint16_t generation) {
    Frame frame;
    frame.type = FrameType::notice;
    frame.generation = generation;
    frame.token = static_cast<std::uint32_t>(notice.kind);
    frame.root = static_cast<std::uint32_t>(notice.rank);
    frame.count = static_cast<std::uint64_t>(1e3 * notice.seconds) & most_elements;
    frame.bytes = static_cast<std::uint32_t>(notice.text.size());
    frame.segment = static_cast<std::uint32_t>(notice.witness + 1);
    frame.communicator = notice.disagreement.communicator;
    frame.number = notice.disagreement.number;
    frame.plan = notice.disagreement.culprits;
    frame.argument = notice.disagreement.witness;
    frame.label = static_cast<std::uint32_t>(notice.apart + 1) & (most_labels - 1);
    frame.ordinal = static_cast<std::uint16_t>(notice.complaint);
    return frame;
}

inline bool is_notice(const Frame& frame) {
    return frame.type == FrameType::notice && frame.token <= static_cast<std::uint32_t>(last_kind) &&
           frame.ordinal <= static_cast<std::uint16_t>(Complaint::unconnected) && frame.bytes <= Notice::longest_text;
}

inline Notice notice_of(const Frame& frame, std::span<const std::byte> text, int from) {
    return {from,
            static_cast<ErrorKind>(frame.token),
            static_cast<int>(frame.root),
            std::string(reinterpret_cast<const char*>(text.data()), text.size()),
            1e-3 * static_cast<double>(frame.count),
            false,
            static_cast<int>(frame.segment) - 1,
            {frame.communicator, frame.number, frame.plan, frame.argument},
            static_cast<int>(frame.label) - 1,
            static_cast<Complaint>(frame.ordinal)};
}

}  // namespace multiring
