// Frame: the 64 bytes that announce anything to a peer. Over TCP a frame is the header that precedes a payload; in
// shared memory it is a mailbox descriptor that says where the payload lies in the sender's arena.
//
//   data      a span: (communicator, incarnation, number, segment, ordinal) says which, the signature of what call.
//             Shared memory: `argument` is its offset in the arena, `token` what the reader returns when it has read
//             it. TCP: `argument` is 1 if it used the eager credit.
//   release   tokens whose payloads have been read (shared memory)
//   grant     the receiver of this call takes its segments below `segment`
//   ask       the sender of this call wants a grant
//   waits     the sender of this waits for the receiver in this call (`argument` 1: to be sent something); nothing but
//             its signature matters
//   credit    `count` bytes of eager credit come back (TCP)
//   beat      the sender lives, on control connections; with a payload, statuses of ranks. On data connections: the
//             sender waits for the receiver, and wants to know whether the receiver's machine acknowledges anything
//   notice    a failure, or that one rank misses another one
//   farewell  the sender leaves on purpose; on control connections, the rank `root`
//
// The numbers of communicators come again, and a frame may come late: a grant of what was sent on credit, an ask, a
// wait that is over, a message that nobody receives. So all frames of calls say which incarnation they are for.
#pragma once

#include <cstdint>
#include <string>

#include "labels.hpp"
#include "types.hpp"

namespace multiring {

// Elements of a block: the label shares their word.
inline constexpr int count_bits = 40;
inline constexpr std::uint64_t most_elements = (std::uint64_t{1} << count_bits) - 1;
static_assert(most_labels == std::uint64_t{1} << (64 - count_bits));

enum class FrameType : std::uint8_t { data = 1, release, grant, ask, waits, credit, beat, notice, farewell };

// Bits of a call's number: the incarnation of its communicator shares their word.
inline constexpr int number_bits = 48;

// The id of a plan that users see: the first 48 of the 63 bits that the engine carries.
std::string plan_id(std::uint64_t number);

// Facts on which all members of a communicator must agree when they make the same call. Both ends sign a message
// between two of them as a send, with the tag in the plan's place and, in the root's, the collective that it is part
// of.
struct Signature {
    std::uint64_t count = 0;  // elements per block
    std::uint64_t plan = 0;   // plan id
    std::uint32_t root = 0;
    std::uint32_t label = 0;  // what the buffer holds (labels.hpp)
    Collective collective{};
    Dtype dtype{};
    Op op{};
    std::uint16_t generation = 0;

    bool operator==(const Signature&) const = default;
    bool is_message() const { return collective == Collective::send; }
    std::uint64_t tag() const { return plan; }
    Collective part_of() const { return is_message() ? static_cast<Collective>(root) : collective; }
    // In the user's words; `receives` says which end of a message. Beside another signature, only what differs.
    std::string describe(bool receives, const Signature* other) const;
    std::uint64_t fingerprint() const;  // equal for equal signatures, on all ranks
};

struct Frame {
    std::uint32_t lap = 0;  // written last: counts the descriptors that were put into this mailbox, from 1
    FrameType type{};
    Op op{};
    std::uint16_t ordinal = 0;
    std::uint32_t communicator = 0;
    std::uint32_t segment = 0;
    std::uint64_t number : number_bits = 0;
    std::uint64_t incarnation : 64 - number_bits = 0;
    std::uint64_t count : count_bits = 0;
    std::uint64_t label : 64 - count_bits = 0;
    std::uint64_t plan = 0;
    std::uint32_t root = 0;
    Collective collective{};
    Dtype dtype{};
    std::uint16_t generation = 0;
    std::uint64_t argument = 0;  // what it says depends on the type
    std::uint32_t bytes = 0;
    std::uint32_t token = 0;

    // True if this frame, of a message between two ranks, goes to the rank that receives the message.
    bool is_to_receiver() const { return type == FrameType::waits ? argument == 0 : type != FrameType::grant; }
    Signature signature() const {
        return {count, plan, root, static_cast<std::uint32_t>(label), collective, dtype, op, generation};
    }
    void sign(const Signature& s) {
        count = s.count & most_elements;
        label = s.label & (most_labels - 1);
        plan = s.plan;
        root = s.root;
        collective = s.collective;
        dtype = s.dtype;
        op = s.op;
        generation = s.generation;
    }
};
static_assert(sizeof(Frame) == 64);

}  // namespace multiring
