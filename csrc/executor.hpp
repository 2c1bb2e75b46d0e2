// Executor: the links, the communicators and the schedules of one rank, and where everything that arrives finds its
// lane.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "communicator.hpp"
#include "errors.hpp"
#include "lane.hpp"
#include "link.hpp"
#include "memory.hpp"
#include "recorder.hpp"
#include "schedule.hpp"
#include "trace.hpp"

namespace multiring {

inline constexpr int any_source = -1;  // receive from whoever sends first

// What the executor needs of the engine around it.
class Surroundings {
  public:
    virtual void fail(Failure failure) = 0;
    // The same, of the rank's loss, unless a better reason comes within a moment.
    virtual void suspect(int rank, const std::string& reason) = 0;
    virtual void wake_progress() = 0;
    virtual std::string rank_name(int rank) const = 0;  // "rank 3 (host b)"
    virtual const std::string& host(int rank) const = 0;

  protected:
    ~Surroundings() = default;
};

// What lanes may have for staging beyond what their calls need, all together.
class SpareStaging {
  public:
    void set_most(std::size_t bytes) { most_.store(bytes, std::memory_order_relaxed); }
    std::size_t of_a_lane() const { return most_.load(std::memory_order_relaxed) / Communicator::lane_count; }
    bool take(std::size_t bytes) {
        if (taken_.fetch_add(bytes) + bytes <= most_.load(std::memory_order_relaxed)) return true;
        give_back(bytes);
        return false;
    }
    void give_back(std::size_t bytes) { taken_.fetch_sub(bytes); }

  private:
    std::atomic<std::size_t> most_{0}, taken_{0};
};

class Executor final : public Receiver {
  public:
    Executor(int rank, int world_size, std::uint16_t generation, std::shared_ptr<Arena> arena,
             Surroundings& surroundings, std::unique_ptr<Trace> trace, std::unique_ptr<Recorder> recorder);
    ~Executor();

    void attach(std::unique_ptr<Link> link);
    Link* link(int peer) const { return links_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire); }
    std::span<const std::unique_ptr<Link>> attached() const {
        return {attached_.get(), attached_count_.load(std::memory_order_acquire)};
    }

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
    std::unique_ptr<Installed> make_point_schedule(Communicator& communicator, Collective collective,
                                                   std::uint32_t other) const;
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
    Begun begun() const {  // the numbers of the collectives called so far, in the communicator of the last one
        return {begun_in_.load(std::memory_order_relaxed), begun_.load(std::memory_order_relaxed)};
    }

    void deliver(Link& from, const Frame& frame, Payload payload) override;
    void released(int peer, std::uint32_t token) override;
    // What was called here as the collective of that number; nothing if none was, or it is long over.
    std::optional<std::uint64_t> fingerprint(std::uint32_t communicator, std::uint64_t number) const;
    // The frame is of another call than ours of that number (nullptr: not known any more).
    void mismatch(const Delivery& delivery, const Signature* ours);
    void garbage(int peer, const std::string& what) override;
    // Whether ranks of this host have not read all that this one sent them.
    bool is_read_from() const;
    std::uint32_t register_lane(Lane& lane);
    void unregister_lane(std::uint32_t id);
    // After this returns no caller's memory is read any more.
    void abandon();

    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }
    void disown() noexcept;  // in a forked child

    const int rank;
    const std::uint16_t generation;
    const std::shared_ptr<Arena> arena;
    Surroundings& surroundings;
    const std::unique_ptr<Trace> trace;        // nullptr: nobody asked for it
    const std::unique_ptr<Recorder> recorder;  // the same
    SpareStaging spare_staging;
    std::atomic<Team*> team{nullptr};                       // helps calls whose buffers lie on devices
    std::atomic<std::uint64_t> calls{0};                    // calls of any communicator
    std::atomic<std::uint64_t> operations{0}, segments{0};  // the user's only
    std::array<Record, collective_names.size()> done;       // those completed, indexed by collective

  private:
    void resolve(Installed& installed) const;
    void sweep_forgotten();
    bool is_over(const Frame& frame) const;  // its communicator, or a later one of that id, was made here
    std::shared_ptr<Communicator> find(std::uint32_t id) const;  // throws if there is none

    void record(Call& call, const Communicator& communicator);
    void note(const Call& call);

    const int world_size_;
    std::atomic<std::uint64_t> last_what_{0}, last_number_{0}, begun_{0};
    std::atomic<std::uint32_t> begun_in_{0};
    std::mutex lanes_mutex_;
    std::unique_ptr<std::atomic<Lane*>[]> lanes_;  // indexed by id
    std::vector<std::uint32_t> free_lane_ids_;
    mutable std::mutex mutex_;                           // the tables below
    std::unique_ptr<std::atomic<Link*>[]> links_;        // indexed by world rank
    std::unique_ptr<std::unique_ptr<Link>[]> attached_;  // in the order of attaching
    std::atomic<std::size_t> attached_count_{0};
    std::unordered_map<std::uint32_t, std::shared_ptr<Communicator>> communicators_;
    std::unordered_map<std::uint32_t, std::uint16_t> latest_;  // last incarnation of each id ever made here
    // What has arrived for communicators that are not made here yet; nothing is kept for those that are over.
    std::vector<Delivery> orphans_;
    std::vector<std::shared_ptr<Communicator>> forgotten_;  // peers still read their staging
    std::vector<std::unique_ptr<Installed>> installed_;
};

}  // namespace multiring
