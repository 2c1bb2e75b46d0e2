// Schedule: the instructions of one rank, checked and made ready to run.
//
// A buffer is `blocks` blocks of `count` elements. It is cut into segments: segment k is slice k of every block, and
// every segment runs the whole list. An instruction names a fraction of one block's slice; `SliceLayout` holds the
// elements that these fractions come to for one slice length.
//
// A message is known by its sender and its ordinal: its number among the messages of one segment between the two ranks,
// in schedule order. A message that this rank waits for is an *arrival* of the segment, one that it sends a
// *departure*.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "reduce.hpp"

namespace multiring {

struct Fraction {
    std::uint64_t numerator, denominator;
};

// The element at which a slice of `count` elements is cut: all of it at 1, else at a multiple of `grain` bytes.
inline constexpr std::size_t finest_grain = 64;  // a cache line
std::size_t cut(Fraction at, std::size_t count, std::size_t itemsize, std::size_t grain = finest_grain);

// Calls without a residual skip the last two: add the residual to this rank's contribution, and round that, keeping in
// the residual what is lost.
enum class InstructionKind : std::uint8_t { send, reduce, store, repay, round };
inline constexpr std::array<std::string_view, 5> instruction_names{"send", "reduce", "store", "repay", "round"};

struct Instruction {
    InstructionKind kind;
    bool final;    // reduce: completes the span, avg divides here
    bool keeps;    // reduce: and this rank's residual takes up what rounding the result loses
    Wire wire;     // float32 that is summed: the format of its messages
    Wire rounded;  // and, of a reduce, what its result is rounded to
    bool sent_on;  // reduce, store: a later send takes some of it, so it should stay in the cache
    int phase;
    std::uint32_t block;
    Fraction lo, hi;
    std::uint32_t first_message, message_count;  // in Schedule::messages
    std::uint32_t own_place;                     // reduce: how many of the messages are summed before our contribution
    bool has_own;                                // reduce: whether we contribute
    std::uint32_t send_index;                    // send: its number among the sends
    bool exchanged;                              // send: the same phase overwrites some of the span
    std::uint32_t first_blocker, blocker_count;  // all but send: sends that must leave before the span is overwritten

    bool waits() const { return kind == InstructionKind::reduce || kind == InstructionKind::store; }  // on messages
};

struct Message {
    std::uint32_t member;  // the other side
    std::uint16_t ordinal;
    std::uint32_t index;  // among the segment's arrivals (reduce, store) or departures (send)
};

// Places of the instructions' spans in a slice of `slice` elements.
struct SliceLayout {
    struct Extent {
        std::size_t first, count;  // elements, from the start of the block's slice
        std::size_t staging;       // send: place of its copy in the segment's staging
    };
    std::size_t slice;
    std::size_t itemsize;
    std::size_t staging_bytes;
    std::vector<Extent> extents;             // indexed by instruction
    std::vector<std::size_t> arrival_bytes;  // indexed by arrival
};

// Facts of a plan that are the same on all ranks that run it.
struct PlanFacts {
    int blocks;
    std::size_t segment_bytes;  // slice of one block
    std::uint32_t window;       // segments in flight at most
    std::uint64_t plan;
    std::size_t grain;  // bytes at whose multiples slices are cut: whole blocks where any rank sends some
};

class Schedule : public PlanFacts {
  public:
    // A row of `table` is (kind, phase, first_peer, peer_count, block, lo_num, lo_den, hi_num, hi_den, final, wire,
    // rounded, keeps).
    static constexpr std::size_t columns = 13;
    Schedule(std::span<const std::int64_t> table, std::span<const std::int32_t> peers, int member, int members,
             const PlanFacts& facts);

    std::vector<Instruction> instructions;
    std::vector<Message> messages;
    std::vector<std::uint32_t> blockers;  // indices of instructions that send
    std::uint32_t send_count = 0, arrival_count = 0, departure_count = 0;
    bool exchanges = false;            // some send is exchanged
    bool narrows = false;              // some message or result is narrower than float32
    std::vector<Wire> arrival_wires;   // indexed by arrival
    std::vector<std::uint32_t> peers;  // members that we exchange messages with, ascending

    // Elements of a block in every segment but the last.
    std::size_t slice_elements(std::size_t itemsize) const;
    // The arrival of the message `ordinal` from `member`, or no_arrival.
    static constexpr std::uint32_t no_arrival = ~std::uint32_t{0};
    std::uint32_t arrival_of(std::uint32_t member, std::uint16_t ordinal) const;

    // Kept for the lengths in use, so that a repeated call computes nothing.
    std::shared_ptr<const SliceLayout> layout(std::size_t slice, std::size_t itemsize) const;

  private:
    void find_blockers(std::size_t index);
    void find_sent_on();
    void number_arrivals(int members);
    std::shared_ptr<const SliceLayout> make_layout(std::size_t slice, std::size_t itemsize) const;

    std::vector<std::uint32_t> first_arrival_of_;  // indexed by member, and the end
    std::vector<std::uint32_t> arrivals_;          // indexed by (member, ordinal)
    mutable std::mutex layout_mutex_;
    mutable std::vector<std::shared_ptr<const SliceLayout>> layouts_;  // the most recent first
};

}  // namespace multiring
