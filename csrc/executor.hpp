// Executor: the communicators and the schedules of one rank, and where everything that arrives finds its lane.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "communicator.hpp"
#include "endpoint.hpp"
#include "schedule.hpp"

namespace multiring {

inline constexpr int any_source = -1;  // receive from whoever sends first

class Executor final : public Endpoint {
  public:
    Executor(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
             Surroundings& surroundings, std::unique_ptr<Trace> trace, std::unique_ptr<CallRecorder> recorder)
        : Endpoint(rank, world_size, generation, std::move(arena), surroundings, std::move(trace), std::move(recorder)),
          world_size_(world_size) {}

    void add_communicator(std::uint32_t id, std::vector<int> members, std::uint16_t incarnation);
    void forget(std::uint32_t id);
    std::uint32_t install(std::uint32_t communicator, std::span<const std::int64_t> table,
                          std::span<const std::int32_t> peers, const PlanFacts& facts);
    Installed& installed(std::uint32_t handle);

    // Check a collective and number it; it starts with `try_begin`.
    void enter(Call& call, Clock::time_point now);
    // The call's lane, once it is free for it.
    Lane* try_begin(const Call& call);
    // Check a send or receive, number it and begin it; nullptr for a receive that has to wait for its turn.
    Lane* begin_point(std::uint32_t communicator, int other, Call& call);
    void end(Lane& lane, bool completed);
    std::uint64_t completed(std::uint32_t communicator) const;  // collectives, from the first on
    struct LastCall {
        Collective collective;
        std::uint32_t communicator;
        std::uint64_t number;
    };
    LastCall last_call() const {  // to be shown: its parts may be of two calls at once
        const std::uint64_t what = last_what_.load(std::memory_order_relaxed);
        return {static_cast<Collective>(what >> 32), static_cast<std::uint32_t>(what),
                last_number_.load(std::memory_order_relaxed)};
    }
    struct Begun {
        std::uint32_t communicator;
        std::uint64_t below;
    };
    // The communicator of the last collective called: those of its collectives whose numbers are below have begun.
    Begun begun() const { return {begun_in_.load(std::memory_order_relaxed), begun_.load(std::memory_order_relaxed)}; }

    void deliver(Transport& from, const Frame& frame, Payload payload) override;
    void released(int peer, std::uint32_t token) override;
    // The call here with that number; nothing if there was none, or it is long over.
    std::optional<Signature> signature(std::uint32_t communicator, std::uint64_t number) const;
    // A collective that is not begun, as ranks disagree on an earlier one: it tells what this rank was about to call.
    void refuse(Call call);
    // True while ranks of this host have not read all that this one sent them.
    bool is_read_from() const;

    void lock_for_fork() {
        mutex_.lock();
        lock_transports_for_fork();
    }
    void unlock_after_fork() {
        unlock_transports_after_fork();
        mutex_.unlock();
    }

  private:
    void sweep_forgotten();
    bool is_over(const Frame& frame) const;  // its communicator, or a later one of that id, was made here
    std::shared_ptr<Communicator> find(std::uint32_t id) const;  // throws if there is none

    void record(Call& call, const Communicator& communicator);
    void note(const Call& call, Clock::time_point now);

    const int world_size_;
    std::atomic<std::uint64_t> last_what_{0}, last_number_{0}, begun_{0};
    std::atomic<std::uint32_t> begun_in_{0};
    mutable std::mutex mutex_;  // the tables below
    std::unordered_map<std::uint32_t, std::shared_ptr<Communicator>> communicators_;
    std::unordered_map<std::uint32_t, std::uint16_t> latest_;  // last incarnation of each id ever made here
    // Deliveries for communicators that are not made here yet; none is kept for those that are over.
    std::vector<Delivery> orphans_;
    std::vector<std::shared_ptr<Communicator>> forgotten_;  // peers still read their staging
    std::vector<std::unique_ptr<Installed>> installed_;
};

}  // namespace multiring
