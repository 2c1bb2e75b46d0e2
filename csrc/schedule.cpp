#include "schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace multiring {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr std::size_t largest_segment = std::size_t{1} << 30;  // a message's length fits 32 bits
constexpr std::size_t kept_layouts = 8;

bool less(Fraction a, Fraction b) {
    return Wide{a.numerator} * b.denominator < Wide{b.numerator} * a.denominator;
}

bool overlap(const Instruction& a, const Instruction& b) {
    return a.block == b.block && less(a.lo, b.hi) && less(b.lo, a.hi);
}

[[noreturn]] void refuse(std::size_t row, const std::string& why) {
    throw std::invalid_argument("schedule, instruction " + std::to_string(row) + ": " + why);
}

Fraction fraction(std::int64_t numerator, std::int64_t denominator, std::size_t row) {
    if (numerator < 0 || denominator <= 0 || numerator > denominator)
        refuse(row, "the fraction " + std::to_string(numerator) + "/" + std::to_string(denominator) +
                        " does not lie between 0 and 1");
    return {static_cast<std::uint64_t>(numerator), static_cast<std::uint64_t>(denominator)};
}

Wire wire_of(std::int64_t code, std::size_t row) {
    if (code < 0 || code >= static_cast<std::int64_t>(wire_names.size()))
        refuse(row, "unknown wire " + std::to_string(code));
    return static_cast<Wire>(code);
}

// Elements between two places where a slice may be cut.
std::size_t grain_elements(std::size_t grain, std::size_t itemsize) {
    return std::max<std::size_t>(1, grain / itemsize);
}

constexpr std::size_t round_up(std::size_t bytes) {
    return (bytes + finest_grain - 1) / finest_grain * finest_grain;
}

}  // namespace

std::size_t cut(Fraction at, std::size_t count, std::size_t itemsize, std::size_t grain) {
    if (at.numerator == at.denominator) return count;
    const std::size_t least = grain_elements(grain, itemsize);
    return static_cast<std::size_t>(Wide{at.numerator} * count / (Wide{at.denominator} * least)) * least;
}

Schedule::Schedule(std::span<const std::int64_t> table, std::span<const std::int32_t> peer_table, int member,
                   int members, const PlanFacts& facts)
    : PlanFacts(facts) {
    segment_bytes = std::min(segment_bytes, largest_segment);
    if (blocks < 1) throw std::invalid_argument("blocks is " + std::to_string(blocks) + ", must be at least 1");
    if (segment_bytes < 1) throw std::invalid_argument("segment_bytes is 0, must be at least 1");
    if (window < 1) throw std::invalid_argument("window is 0, must be at least 1");
    if (grain == 0 || grain % finest_grain != 0)
        throw std::invalid_argument("grain is " + std::to_string(grain) + ", must be a multiple of " +
                                    std::to_string(finest_grain));
    std::vector<std::uint32_t> sent(static_cast<std::size_t>(members)), awaited(static_cast<std::size_t>(members));
    const std::size_t rows = table.size() / columns;
    for (std::size_t row = 0; row < rows; ++row) {
        const auto field = table.subspan(row * columns, columns);
        Instruction in{};
        if (field[0] < 0 || field[0] > 4) refuse(row, "unknown kind " + std::to_string(field[0]));
        in.kind = static_cast<InstructionKind>(field[0]);
        in.phase = static_cast<int>(field[1]);
        const std::int64_t first = field[2], peer_count = field[3];
        const bool has_peers = in.kind == InstructionKind::send || in.waits();
        if (!has_peers && peer_count != 0)
            refuse(row, "it has no peers, and " + std::to_string(peer_count) + " are given");
        if (first < 0 || peer_count < has_peers || first + peer_count > static_cast<std::int64_t>(peer_table.size()))
            refuse(row, "its " + std::to_string(peer_count) + " peers from " + std::to_string(first) +
                            " are not in the table of " + std::to_string(peer_table.size()));
        if (field[4] < 0 || field[4] >= blocks)
            refuse(row, "block " + std::to_string(field[4]) + " of " + std::to_string(blocks));
        in.block = static_cast<std::uint32_t>(field[4]);
        in.lo = fraction(field[5], field[6], row);
        in.hi = fraction(field[7], field[8], row);
        if (less(in.hi, in.lo)) refuse(row, "the span ends before it starts");
        in.final = field[9] != 0;
        in.wire = wire_of(field[10], row);
        in.rounded = wire_of(field[11], row);
        in.keeps = field[12] != 0;
        narrows |= in.wire != Wire::same || in.rounded != Wire::same;
        for (const Wire wire : {in.wire, in.rounded})
            if (const std::size_t bytes = format_of(wire).block * sizeof(float); grain % bytes != 0)
                refuse(row, std::string(wire_names[static_cast<std::size_t>(wire)]) +
                                " needs a grain that is a multiple of " + std::to_string(bytes) + ", not " +
                                std::to_string(grain));
        if (in.kind == InstructionKind::round && in.wire == Wire::same) refuse(row, "it rounds to no narrow format");
        in.first_message = static_cast<std::uint32_t>(messages.size());
        if (in.kind == InstructionKind::send) in.send_index = send_count++;
        if (in.kind == InstructionKind::store && peer_count != 1)
            refuse(row, "a store has one peer, not " + std::to_string(peer_count));
        const auto its_peers =
            peer_table.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(peer_count));
        for (const std::int32_t peer : its_peers) {
            if (peer < 0 || peer >= members)
                refuse(row, "peer " + std::to_string(peer) + " of " + std::to_string(members));
            if (std::count(its_peers.begin(), its_peers.end(), peer) != 1)
                refuse(row, "peer " + std::to_string(peer) + " is named twice");
            if (peer == member) {
                if (in.kind != InstructionKind::reduce) refuse(row, "this rank is its own peer");
                in.has_own = true;
                in.own_place = static_cast<std::uint32_t>(messages.size()) - in.first_message;
                continue;
            }
            auto& ordinal = (in.kind == InstructionKind::send ? sent : awaited)[static_cast<std::size_t>(peer)];
            if (ordinal > 0xffff) refuse(row, "more than 65536 messages to one peer in a segment");
            messages.push_back({static_cast<std::uint32_t>(peer), static_cast<std::uint16_t>(ordinal++),
                                in.kind == InstructionKind::send ? departure_count++ : arrival_count++});
            if (in.kind != InstructionKind::send) arrival_wires.push_back(in.wire);
        }
        in.message_count = static_cast<std::uint32_t>(messages.size()) - in.first_message;
        instructions.push_back(in);
        if (in.kind != InstructionKind::send) find_blockers(row);
    }
    find_sent_on();
    number_arrivals(members);
    for (std::uint32_t peer = 0; peer < static_cast<std::uint32_t>(members); ++peer)
        if (sent[peer] != 0 || awaited[peer] != 0) peers.push_back(peer);
}

void Schedule::find_blockers(std::size_t index) {
    Instruction& in = instructions[index];
    in.first_blocker = static_cast<std::uint32_t>(blockers.size());
    for (std::size_t earlier = 0; earlier < index; ++earlier) {
        if (instructions[earlier].kind != InstructionKind::send || !overlap(instructions[earlier], in)) continue;
        blockers.push_back(static_cast<std::uint32_t>(earlier));
        if (instructions[earlier].phase == in.phase) exchanges = instructions[earlier].exchanged = true;
    }
    in.blocker_count = static_cast<std::uint32_t>(blockers.size()) - in.first_blocker;
}

void Schedule::find_sent_on() {
    for (std::size_t i = 0; i < instructions.size(); ++i)
        for (std::size_t later = i + 1; later < instructions.size(); ++later)
            if (instructions[later].kind == InstructionKind::send && overlap(instructions[i], instructions[later]))
                instructions[i].sent_on = true;
}

void Schedule::number_arrivals(int members) {
    std::vector<std::vector<std::uint32_t>> of(static_cast<std::size_t>(members));
    for (const Instruction& in : instructions) {
        if (in.kind == InstructionKind::send) continue;
        for (std::uint32_t m = in.first_message; m < in.first_message + in.message_count; ++m)
            of[messages[m].member].push_back(messages[m].index);
    }
    for (const auto& arrivals : of) {
        first_arrival_of_.push_back(static_cast<std::uint32_t>(arrivals_.size()));
        arrivals_.insert(arrivals_.end(), arrivals.begin(), arrivals.end());
    }
    first_arrival_of_.push_back(static_cast<std::uint32_t>(arrivals_.size()));
}

std::uint32_t Schedule::arrival_of(std::uint32_t member, std::uint16_t ordinal) const {
    const std::uint32_t index = first_arrival_of_[member] + ordinal;
    return index < first_arrival_of_[member + 1] ? arrivals_[index] : no_arrival;
}

std::size_t Schedule::slice_elements(std::size_t itemsize) const {
    const std::size_t least = grain_elements(grain, itemsize);
    return std::max(least, segment_bytes / itemsize / least * least);
}

std::shared_ptr<const SliceLayout> Schedule::layout(std::size_t slice, std::size_t itemsize) const {
    const std::lock_guard lock(layout_mutex_);
    const auto known = std::find_if(layouts_.begin(), layouts_.end(), [&](const auto& layout) {
        return layout->slice == slice && layout->itemsize == itemsize;
    });
    if (known != layouts_.end()) {
        if (known != layouts_.begin()) std::rotate(layouts_.begin(), known, known + 1);
        return layouts_.front();
    }
    if (layouts_.size() == kept_layouts) layouts_.pop_back();
    layouts_.insert(layouts_.begin(), make_layout(slice, itemsize));
    return layouts_.front();
}

std::shared_ptr<const SliceLayout> Schedule::make_layout(std::size_t slice, std::size_t itemsize) const {
    auto layout = std::make_shared<SliceLayout>();
    layout->slice = slice;
    layout->itemsize = itemsize;
    layout->staging_bytes = 0;
    layout->arrival_bytes.resize(arrival_count);
    for (const Instruction& in : instructions) {
        const std::size_t first = cut(in.lo, slice, itemsize, grain);
        const std::size_t count = cut(in.hi, slice, itemsize, grain) - first;
        layout->extents.push_back({first, count, layout->staging_bytes});
        if (in.kind == InstructionKind::send)
            layout->staging_bytes += round_up(count * itemsize);  // a narrow message takes no more of it
        else
            for (std::uint32_t m = in.first_message; m < in.first_message + in.message_count; ++m)
                layout->arrival_bytes[messages[m].index] = count * itemsize;
    }
    return layout;
}

}  // namespace multiring
