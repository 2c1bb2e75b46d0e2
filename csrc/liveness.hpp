// Liveness: what is known of every rank: when it was last heard of, and its status.
//
//     ranks of this host   their status is read from their arena; its count of beats shows that they live
//     edges                ranks of other hosts with a control connection: whatever comes over it is a beat
//     all others           their statuses are passed on: over the edges, and within the host by the rank that has
//                          the edge
//
// Silence is counted in looks, not by the clock: a rank that was itself stopped, or starved, accuses nobody for the
// time that it missed. All of it belongs to the progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mailbox.hpp"
#include "status.hpp"
#include "wait.hpp"

namespace multiring {

class Liveness {
  public:
    Liveness(int rank, int world_size, double timeout);

    // Between two beats of a rank, and two looks at the others.
    Clock::duration interval() const { return interval_; }
    // A rank that is silent for so long is named; it is lost after the timeout.
    double quiet_seconds() const { return timeout_ / 2 < longest_quiet ? timeout_ / 2 : longest_quiet; }
    double timeout() const { return timeout_; }

    void set_own(const Status& status) { statuses_[self_] = status; }
    void heard(int edge) { ++heard_[static_cast<std::size_t>(edge)]; }
    void take(int edge, std::span<const std::byte> statuses);  // what came over an edge
    // Look at those that we hear directly; those that have left are not missed. `all`: and at what others pass on.
    void look(std::span<const LocalTransport* const> local, std::span<const int> edges,
              const std::vector<bool>& departed, bool all);

    float elapsed() const { return elapsed_; }  // seconds that count, from the look before the last to the last
    std::span<const Status> statuses() const { return statuses_; }  // indexed by rank
    bool is_quiet(int rank) const { return at(rank).silent >= quiet_seconds(); }
    bool is_direct(int rank) const { return direct_[static_cast<std::size_t>(rank)]; }
    // True if a rank is known to live: it was heard of lately, by us or by who told us, and we have not been away.
    bool hears(int rank) const;
    bool is_trouble() const;  // somebody waits or is quiet: statuses are worth passing on
    // News to pass on over an edge, all that did not come over it, in pieces of at most `most_bytes`.
    std::vector<std::vector<std::byte>> to_pass_on(int edge, std::size_t most_bytes) const;
    void publish_heard(std::span<StatusSlot> slots);  // to the ranks of our host

  private:
    static constexpr double longest_quiet = 3;
    static constexpr int nobody = -1;

    const Status& at(int rank) const { return statuses_[static_cast<std::size_t>(rank)]; }
    void count_silence(std::size_t rank, std::uint64_t heard, float elapsed, bool has_left);
    void forget_the_old(float elapsed);
    void forget(std::size_t rank);  // what was told of it
    bool was_away(Clock::time_point now) const { return now - last_look_ >= seconds(quiet_seconds()); }

    const std::size_t self_;
    const double timeout_;
    const Clock::duration interval_;
    Clock::time_point last_look_;
    float elapsed_ = 0;
    Clock::time_point came_back_;  // after the last time that we were away: stopped, or starved
    std::vector<Status> statuses_;
    std::vector<std::uint64_t> heard_;  // beats over an edge
    std::vector<std::uint64_t> seen_;   // beats, or what was heard, at the last look
    std::vector<bool> direct_;          // we hear it ourselves
    std::vector<int> via_;              // the edge that told of it, or nobody
    std::vector<float> age_;            // seconds since it was told
};

}  // namespace multiring
