// FailureDetector: the progress thread's watch over the other ranks. It tells them that this one lives and what it
// waits for, notices who falls silent, and finds out whom a waiting call waits for in the end.
//
// It owns what is known of every rank (liveness.hpp) and the complaints about hosts that cannot reach each other: all
// of that belongs to the progress thread. `mutex_` guards the lines for the log, which callers take.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "blame.hpp"
#include "engine_options.hpp"
#include "engine_state.hpp"
#include "executor.hpp"
#include "liveness.hpp"
#include "peers.hpp"
#include "work.hpp"

namespace multiring {

class FailureDetector {
  public:
    FailureDetector(const EngineOptions& options, const EngineState& state, std::shared_ptr<Arena> arena,
                    const Executor& executor, Peers& peers);

    // Any thread's: lines for the log, who is silent, who is late.
    std::vector<std::string> take_reports();
    bool has_reports() const { return has_reports_.load(std::memory_order_relaxed); }
    // A caller needs a connection to a rank, and has dialled it for so long.
    void miss_connection(int rank, double seconds);
    void lock_for_fork() { mutex_.lock(); }
    void unlock_after_fork() { mutex_.unlock(); }

    // The progress thread's, as all that follows; `works` is what is in flight here.
    void hear_beat(int edge, std::span<const std::byte> statuses);
    void hear_complaint(const Notice& complaint);
    Failure told_by(const Notice& notice) const;  // what a notice says

    Clock::time_point next_beat() const { return next_beat_; }
    Clock::duration interval() const { return liveness_.interval(); }
    bool begin_beat();                                               // false if it is not time yet
    void count(const Counts& counts, const NetworkRates& network) {  // what statuses tell from now on
        counts_ = counts;
        network_ = network;
    }
    std::span<const Status> statuses() const { return liveness_.statuses(); }  // indexed by rank
    void report(std::string line);                                             // writes it to the log
    void publish_status(const Works& works);
    void send_beats(const Works& works);
    bool check_silence(const Works& works);  // true if a rank was found lost
    void look_at_transports(const Works& works);
    void complain_of_missing_connections();
    bool check_complaints();  // true if they were judged
    void report_lateness(const Works& works);

    // Failure of a call that has waited too long; `limit` names the time limit that is up.
    Failure timeout_of(const Work& work, const std::string& limit) const;

  private:
    void name_apart(int rank, double seconds, const Works& works);
    int leader_of(int rank) const;  // the lowest rank of its host
    void complain(int rank, double seconds, Complaint why);
    void hear_of_missing_connection(const Notice& complaint);
    bool missed_lately(int witness, int rank, double timeouts) const;
    bool is_complaint(int by_host, int of_host) const;
    Failure verdict() const;
    int turn() const;
    Failure missed(const Notice& complaint) const;
    std::map<int, std::set<int>> hosts_apart() const;
    bool has_accusation() const;
    Failure silence_of(int rank, double silent) const;
    std::string silence_text(int rank, double silent) const;
    Failure mismatch_told_by(const Notice& notice) const;
    Waiting waiting_of(const Work& work) const;
    Blame blame_of(const Work& work) const;
    std::string describe(const Blame& blame) const;
    std::string others_in(const Waiting& call) const;
    std::string held_by_kernel(const std::vector<int>& ranks) const;  // on its way to or from these

    const EngineOptions& options_;
    const EngineState& state_;
    const std::shared_ptr<Arena> arena_;
    const Executor& executor_;
    Peers& peers_;

    std::mutex mutex_;
    std::vector<std::string> reports_;
    std::atomic<bool> has_reports_{false};
    std::map<int, double> missing_connections_;  // seconds by rank, as callers told

    // the progress thread's own
    Liveness liveness_;
    Clock::time_point next_beat_{}, next_publishing_{}, last_call_{Clock::now()};
    std::uint64_t beats_ = 0, looks_ = 0, own_calls_ = 0;
    Counts counts_;
    NetworkRates network_;
    std::uint64_t passed_on_calls_ = 0;  // that this rank had made when it last passed statuses on
    std::vector<bool> named_;            // which ranks are reported as silent
    std::vector<bool> named_apart_;      // which ranks are reported as out of reach
    std::vector<Notice> complaints_;     // one of each kind between two hosts
    // Ranks that miss a connection to another one. Nobody is accused until the other one misses it, too: it may be
    // late, and be the one that can connect.
    struct MissingConnection {
        Notice complaint;
        Clock::time_point heard;
    };
    std::map<std::pair<int, int>, MissingConnection> unconnected_;
    std::uint64_t missing_connection_complaints_ = 0;  // ours, by which others know them from those that went round
    Clock::time_point verdict_at_{};                   // on these
};

}  // namespace multiring
