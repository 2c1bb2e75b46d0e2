// SlowLinks: which link between hosts carries less than the plan counts on, while all wait for it.
//
// All ranks are in a collective for as long where a link is slow, so their times name nobody. The links tell: where
// messages are pipelined, those behind the slow one only get what it lets through, and are busy for a small part of the
// time at their full rate, while the slow one is busy nearly all the time. Each rank measures the connections to other
// hosts that were busy longest in a window (LinkMeter); statuses carry that to all ranks (status.hpp), and all judge by
// the same rule. A link is named once it was slow in several windows one after the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine_options.hpp"
#include "slow.hpp"
#include "status.hpp"
#include "transport.hpp"
#include "wait.hpp"

namespace multiring {

// Link out of a host, rack or site: bytes a second of all of its ranks together.
struct PlaceLink {
    std::vector<int> ranks;
    double up = 0, down = 0;
};

struct SlowLink {
    std::string from, to;    // hosts
    bool both_ways = false;  // slow as well from `to` to `from`
    std::string name;        // in words, as everywhere: "the link from host a to host b"
    double rate = 0;         // bytes a second
    double expected = 0;     // that the plan counts on
    double seconds = 0;      // how long it has been slow
    Clock::time_point began{};
};

// The places whose links a message passes: those that one of two ranks is in and the other is not.
class Places {
  public:
    Places() = default;
    // The links of hosts, racks and sites. A rank without a place has no expectations.
    Places(std::vector<PlaceLink> links, int world_size);
    // Indices of the places that a rank is in, from the inside out.
    const std::vector<int>& of(int rank) const { return of_[static_cast<std::size_t>(rank)]; }
    // Number of these places that a message to another rank leaves.
    std::size_t left_by(int rank, int other) const;
    const PlaceLink& operator[](int place) const { return links_[static_cast<std::size_t>(place)]; }
    std::size_t size() const { return links_.size(); }

  private:
    std::vector<PlaceLink> links_;
    std::vector<std::vector<int>> of_;
};

inline constexpr auto link_window = std::chrono::milliseconds(1500);

// This rank's share: what it sent and received in the last window, and which of its connections were busy longest.
class LinkMeter {
  public:
    // Called at each beat, with what the connections to other hosts have counted.
    void look(std::span<const ConnectionCounts> connections, const Places& places, int rank, Clock::time_point now);
    const NetworkRates& network() const { return network_; }

  private:
    struct Seen {
        ConnectionCounts before, latest;
        int looks_held = 0;  // in this window
    };
    std::map<int, Seen> seen_;  // a peer each
    Clock::time_point began_{};
    int looks_ = 0;
    NetworkRates network_;
};

class SlowLinks {
  public:
    explicit SlowLinks(const EngineOptions& options);

    // Any thread's, once: what plans count on. Until then nothing is judged.
    void expect(std::vector<PlaceLink> links);
    bool expects() const { return expects_.load(std::memory_order_acquire); }

    // The progress thread's, at each beat.
    void look(std::span<const ConnectionCounts> connections, Clock::time_point now);
    const NetworkRates& network() const { return meter_.network(); }
    // `statuses` by rank. Lines for the log. While a rank is known that keeps the others waiting, no link is named.
    std::vector<std::string> observe(std::span<const Status> statuses, Clock::time_point now, bool rank_is_slow);

    // Any thread's: the slow link, once it was named and until it is slow no longer.
    std::optional<SlowLink> slowest() const { return named_.now(); }
    // All that were named so far, the latest ones of very many, in the order of time.
    std::vector<SlowLink> so_far() const { return named_.so_far(); }
    void lock_for_fork() { named_.lock_for_fork(); }
    void unlock_after_fork() { named_.unlock_after_fork(); }

  private:
    using Pair = std::pair<int, int>;  // hosts, by their places
    struct Carried {
        double rate = 0, expected = 0;
        double part() const { return rate / expected; }
    };
    struct Slow : Carried {
        double heard = 0;  // seconds in which data came for each in which the connection was busy
    };
    // Findings of a window: the slow links between two hosts, and what left and reached each place meanwhile.
    struct Window {
        std::map<Pair, Slow> slow;
        std::vector<Carried> up, down;
    };
    struct Suspect {
        int windows = 0;   // that it was slow in
        double heard = 0;  // sum over these
        double mean_heard() const { return heard / windows; }
    };
    // All links of a set: one between two hosts, or all that leave or reach a host, or some without a host in common.
    struct Name {
        int from = nowhere, to = nowhere;
        bool both_ways = false;
        bool is_one() const { return from != nowhere && to != nowhere && from != to && !both_ways; }
    };
    static constexpr int nowhere = -1;
    static constexpr int to_name = 3, to_clear = 2;  // windows in a row

    std::optional<Window> judge(std::span<const Status> statuses) const;  // nullopt: nothing can be told
    double blocked(std::size_t rank, const Status& status) const;         // part of the window
    bool goes_on(const Window& found) const;
    double heard(std::span<const Status> statuses, int from, int to) const;
    Name name_of(int least_windows) const;
    std::optional<Carried> carried(const Name& name, const Window& found) const;
    std::string host(int place) const;
    std::string words(const Name& name) const;
    void go_on(const Carried& carried, double seconds);
    std::string clear();

    const EngineOptions& options_;
    Places places_;  // once `expects_`
    LinkMeter meter_;
    CountWindows counts_;
    std::map<Pair, Suspect> suspects_;  // links that were slow in the windows below
    double slow_seconds_ = 0;           // how long they have been slow
    int windows_ = 0;                   // consecutive windows in which one of them was slow
    int clear_ = 0;                     // consecutive windows in which what was named was not slow
    std::optional<Name> name_;          // what was named

    std::atomic<bool> expects_{false};
    NamedSlow<SlowLink> named_;
};

}  // namespace multiring
