#include "liveness.hpp"

#include <algorithm>
#include <cstring>

namespace multiring {
namespace {

constexpr double longest_interval = 0.25, beats_in_timeout = 20;
constexpr float worth_passing_on = 0.5;  // seconds that somebody has waited
constexpr float believed = 2;            // seconds for which what was passed on holds

// Counts that a peer wrote are checked before use.
Status checked(Status status) {
    status.waiting_count = std::min<std::uint8_t>(status.waiting_count, Status::most_waiting);
    for (Waiting& waiting : status.waiting)
        waiting.rank_count = std::min<std::uint8_t>(waiting.rank_count, Waiting::most_ranks);
    return status;
}

}  // namespace

Liveness::Liveness(int rank, int world_size, double timeout)
    : self_(static_cast<std::size_t>(rank)),
      timeout_(timeout),
      interval_(seconds(std::min(longest_interval, timeout / beats_in_timeout))),
      last_look_(Clock::now()),
      statuses_(static_cast<std::size_t>(world_size)),
      heard_(statuses_.size()),
      seen_(statuses_.size()),
      direct_(statuses_.size()),
      via_(statuses_.size(), nobody),
      age_(statuses_.size()) {}

void Liveness::take(int edge, std::span<const std::byte> bytes) {
    constexpr std::size_t fixed = offsetof(Status, waiting);
    while (bytes.size() >= fixed) {
        Status status;
        std::memcpy(static_cast<void*>(&status), bytes.data(), fixed);
        if (status.waiting_count > Status::most_waiting || status.bytes() > bytes.size()) return;
        std::memcpy(static_cast<void*>(&status), bytes.data(), status.bytes());
        bytes = bytes.subspan(status.bytes());
        if (status.rank < 0 || static_cast<std::size_t>(status.rank) >= statuses_.size()) return;
        const auto rank = static_cast<std::size_t>(status.rank);
        if (rank == self_ || (direct_[rank] && status.rank != edge)) continue;
        if (direct_[rank]) status.silent = statuses_[rank].silent;
        statuses_[rank] = checked(status);
        via_[rank] = edge;
        age_[rank] = 0;
    }
}

void Liveness::count_silence(std::size_t rank, std::uint64_t heard, float elapsed, bool has_left) {
    Status& status = statuses_[rank];
    status.rank = static_cast<std::int32_t>(rank);
    const bool was_heard_before = direct_[rank];
    direct_[rank] = true;
    if (has_left || !was_heard_before || heard != seen_[rank])
        status.silent = 0;
    else
        status.silent += elapsed;
    seen_[rank] = heard;
}

void Liveness::look(std::span<const LocalTransport* const> local, std::span<const int> edges,
                    const std::vector<bool>& departed, bool all) {
    const auto now = Clock::now();
    elapsed_ = std::chrono::duration<float>(std::min(now - last_look_, 2 * interval_)).count();
    if (was_away(now)) came_back_ = now;
    last_look_ = now;
    for (const LocalTransport* transport : local) {
        const auto rank = static_cast<std::size_t>(transport->peer);
        Status status;
        if (transport->arena().header().status.read(status)) {
            status.silent = statuses_[rank].silent;
            statuses_[rank] = checked(status);
        }
        count_silence(rank, statuses_[rank].beats, elapsed_, departed[rank]);
    }
    for (const int edge : edges) {
        const auto rank = static_cast<std::size_t>(edge);
        count_silence(rank, heard_[rank], elapsed_, departed[rank]);
    }
    forget_the_old(elapsed_);
    if (!all) return;
    for (const LocalTransport* transport : local) {
        if (is_quiet(transport->peer)) continue;
        const StatusSlot* slots = transport->arena().heard();
        for (std::size_t rank = 0; slots != nullptr && rank < statuses_.size(); ++rank) {
            Status status;
            if (rank == self_ || direct_[rank] || !slots[rank].read(status)) continue;
            if (status.rank < 0) {  // it hears of that rank no more, and so do we
                if (via_[rank] == transport->peer) forget(rank);
                continue;
            }
            statuses_[rank] = checked(status);
            age_[rank] = 0;
            via_[rank] = transport->peer;
        }
    }
}

void Liveness::forget_the_old(float elapsed) {
    for (std::size_t rank = 0; rank < statuses_.size(); ++rank)
        if (via_[rank] != nobody && (age_[rank] += elapsed) >= believed) forget(rank);
}

void Liveness::forget(std::size_t rank) {
    const float silent = direct_[rank] ? statuses_[rank].silent : 0;
    statuses_[rank] = Status();
    statuses_[rank].rank = static_cast<std::int32_t>(rank);
    statuses_[rank].silent = silent;
    via_[rank] = nobody;
}

bool Liveness::hears(int rank) const {
    const auto now = Clock::now();
    if (was_away(now) || now - came_back_ < seconds(timeout_)) return false;
    const auto index = static_cast<std::size_t>(rank);
    if (index >= statuses_.size()) return false;
    return index == self_ || ((direct_[index] || via_[index] != nobody) && !is_quiet(rank));
}

bool Liveness::is_trouble() const {
    return std::any_of(statuses_.begin(), statuses_.end(), [&](const Status& status) {
        return status.silent >= quiet_seconds() ||
               std::any_of(status.waiting, status.waiting + status.waiting_count,
                           [](const Waiting& waiting) { return waiting.seconds >= worth_passing_on; });
    });
}

std::vector<std::vector<std::byte>> Liveness::to_pass_on(int edge, std::size_t most_bytes) const {
    std::vector<std::vector<std::byte>> pieces;
    for (std::size_t rank = 0; rank < statuses_.size(); ++rank) {
        const Status& status = statuses_[rank];
        if (status.rank < 0 || via_[rank] == edge || static_cast<int>(rank) == edge) continue;
        if (status.beats == 0 && status.silent == 0) continue;
        if (pieces.empty() || pieces.back().size() + status.bytes() > most_bytes) pieces.emplace_back();
        const auto* bytes = reinterpret_cast<const std::byte*>(&status);
        pieces.back().insert(pieces.back().end(), bytes, bytes + status.bytes());
    }
    return pieces;
}

void Liveness::publish_heard(std::span<StatusSlot> slots) {
    for (std::size_t rank = 0; rank < statuses_.size(); ++rank) {
        if (!direct_[rank] && via_[rank] == nobody) {
            Status known;  // from before; it must not be believed any more
            if (slots[rank].read(known) && known.beats != 0) slots[rank].publish(Status());
            continue;
        }
        slots[rank].publish(statuses_[rank]);
    }
}

}  // namespace multiring
