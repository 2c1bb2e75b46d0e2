#include "blame.hpp"

#include <algorithm>

namespace multiring {
namespace {

struct PathEntry {
    int rank;
    const Waiting* waiting;
    bool same_call;  // as the step before
};

// True if `theirs` is another rank's part of the call `ours`, which rank `us` made.
bool is_same_call(int us, const Waiting& ours, const Waiting& theirs) {
    if (ours.communicator != theirs.communicator || ours.number != theirs.number) return false;
    if (!ours.is_point()) return !theirs.is_point();
    return theirs.is_point() && theirs.collective != ours.collective && theirs.tag == ours.tag && theirs.other == us;
}

class Search {
  public:
    Search(std::span<const Status> statuses, double silent_seconds)
        : statuses_(statuses), silent_seconds_(silent_seconds) {}

    Blame found;

    void follow(int rank, const Waiting& waiting, bool same_call) {
        const auto before =
            std::find_if(path_.begin(), path_.end(), [&](const PathEntry& s) { return s.waiting == &waiting; });
        if (before != path_.end()) {
            close_cycle(static_cast<std::size_t>(before - path_.begin()), same_call);
            return;
        }
        if (std::find(seen_.begin(), seen_.end(), &waiting) != seen_.end()) return;
        seen_.push_back(&waiting);
        path_.push_back({rank, &waiting, same_call});
        for (std::size_t i = 0; i < waiting.rank_count; ++i) look_at(rank, waiting, waiting.ranks[i]);
        path_.pop_back();
    }

  private:
    void look_at(int rank, const Waiting& waiting, int other) {
        if (other < 0 || static_cast<std::size_t>(other) >= statuses_.size()) return;
        const Status& status = statuses_[static_cast<std::size_t>(other)];
        if (status.silent >= silent_seconds_) return accuse(Guilt::silent, other);
        if (status.beats == 0) return accuse(Guilt::unknown, other);
        const std::span<const Waiting> theirs(status.waiting, status.waiting_count);
        for (const Waiting& its : theirs)
            if (is_same_call(rank, waiting, its)) {
                if (its.rank_count == 0) accuse(Guilt::here, other);
                return follow(other, its, true);
            }
        if (status.has_more) return accuse(Guilt::unknown, other);  // it may be in the call
        // Not by its last call of all: messages are counted by themselves.
        const bool is_done =
            !waiting.is_point() && status.begun_in == waiting.communicator && waiting.number < status.begun;
        if (is_done) return accuse(Guilt::sent, other);  // whatever it does now
        bool is_blocked = false;
        for (const Waiting& its : theirs)
            if (its.is_blocked) {
                is_blocked = true;
                follow(other, its, false);
            }
        if (!is_blocked) accuse(Guilt::late, other);
    }

    void accuse(Guilt guilt, int rank) {
        if (guilt < found.guilt) return;
        if (guilt > found.guilt) found = {guilt, {}};
        const auto place = std::lower_bound(found.ranks.begin(), found.ranks.end(), rank);
        if (place == found.ranks.end() || *place != rank) found.ranks.insert(place, rank);
    }

    void close_cycle(std::size_t first, bool same_call) {
        bool one_call = same_call;
        for (std::size_t i = first + 1; i < path_.size(); ++i) one_call &= path_[i].same_call;
        if (one_call || found.guilt >= Guilt::cycle) return;
        found = {Guilt::cycle, {}};
        for (std::size_t i = first; i < path_.size(); ++i) found.ranks.push_back(path_[i].rank);
    }

    std::span<const Status> statuses_;
    double silent_seconds_;
    std::vector<PathEntry> path_;
    std::vector<const Waiting*> seen_;
};

}  // namespace

Blame find_blame(std::span<const Status> statuses, int rank, const Waiting& waiting, double silent_seconds) {
    Search search(statuses, silent_seconds);
    search.follow(rank, waiting, true);
    if (search.found.ranks.empty())
        for (std::size_t i = 0; i < waiting.rank_count; ++i) search.found.ranks.push_back(waiting.ranks[i]);
    return search.found;
}

}  // namespace multiring
