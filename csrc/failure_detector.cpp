#include "failure_detector.hpp"

#include <algorithm>
#include <tuple>

namespace multiring {
namespace {

constexpr auto publishing_interval = std::chrono::milliseconds(10);
constexpr double looking_delay = 0.5;  // seconds that a call waits before its transports are looked at
constexpr auto verdict_grace = std::chrono::milliseconds(500);  // to hear what others miss at the same time
constexpr int latest_turn = 2;
constexpr std::size_t most_beat_bytes = std::size_t{1} << 15;
constexpr std::uint64_t looks_between_counts = 2;
constexpr int most_named = 8;  // ranks in one line

std::string seconds_text(double seconds) {
    return readable(seconds < 10 ? 0.1 * static_cast<double>(static_cast<int>(10 * seconds + 0.5))
                                 : static_cast<double>(static_cast<int>(seconds + 0.5))) +
           " s";
}

std::string call_text(Collective collective, std::uint64_t number, std::uint32_t communicator) {
    const std::string which = number == no_number ? "" : " number " + std::to_string(number);
    return std::string(name(collective)) + which + " of communicator " + std::to_string(communicator);
}

}  // namespace

FailureDetector::FailureDetector(const EngineOptions& options, const EngineState& state, std::shared_ptr<Arena> arena,
                                 const Executor& executor, Peers& peers)
    : options_(options),
      state_(state),
      arena_(std::move(arena)),
      executor_(executor),
      peers_(peers),
      liveness_(options.rank, options.world_size, options.heartbeat_timeout),
      named_(static_cast<std::size_t>(options.world_size)),
      named_apart_(named_.size()) {}

Waiting FailureDetector::waiting_of(const Work& work) const {
    const Call& call = work.lane != nullptr ? work.lane->call() : work.call;
    const CommunicatorBase& communicator = *call.installed->communicator;
    Waiting waiting;
    waiting.number = call.number;
    waiting.tag = call.tag;
    waiting.communicator = communicator.id;
    waiting.seconds = static_cast<float>(age_of(call));
    waiting.collective = call.collective;
    waiting.is_blocked = work.waiters.load(std::memory_order_relaxed) > 0;
    if (work.lane == nullptr) return waiting;
    if (call.is_point()) waiting.other = communicator.members[call.other];
    waiting.bytes = work.lane->bytes_left();
    const std::vector<int> ranks = work.lane->waited_for();
    waiting.rank_count = static_cast<std::uint8_t>(std::min(ranks.size(), Waiting::most_ranks));
    std::copy_n(ranks.begin(), waiting.rank_count, waiting.ranks);
    return waiting;
}

void FailureDetector::publish_status(const Works& works) {
    const auto now = Clock::now();
    if (now < next_publishing_) return;
    next_publishing_ = now + publishing_interval;
    const std::uint64_t calls = executor_.calls.load(std::memory_order_relaxed);
    if (calls != own_calls_) {
        own_calls_ = calls;
        last_call_ = now;
    }
    Status status;
    status.rank = options_.rank;
    status.beats = ++beats_;
    status.has_called = calls != 0;
    status.idle = std::chrono::duration<float>(now - last_call_).count();
    const Executor::LastCall last = executor_.last_call();
    status.last_communicator = last.communicator;
    status.last_collective = last.collective;
    status.last_number = last.number;
    const Executor::Begun begun = executor_.begun();
    status.begun_in = begun.communicator;
    status.begun = begun.below;
    status.counts = counts_;
    status.network = network_;
    // A caller that waits for a call waits for those before it in its communicator, too.
    std::vector<const CommunicatorBase*> blocked;
    for (const auto& work : works)
        if (work->waiters.load(std::memory_order_relaxed) > 0) blocked.push_back(work->call.installed->communicator);
    for (const auto& work : works) {
        if (work->lane == nullptr) continue;
        if (status.waiting_count == Status::most_waiting) {
            status.has_more = 1;
            break;
        }
        Waiting waiting = waiting_of(*work);
        if (!work->call.is_point())
            waiting.is_blocked |=
                std::find(blocked.begin(), blocked.end(), work->call.installed->communicator) != blocked.end();
        status.waiting[status.waiting_count++] = waiting;
    }
    arena_->header().status.publish(status);
    liveness_.set_own(status);
}

bool FailureDetector::begin_beat() {
    const auto now = Clock::now();
    if (now < next_beat_) return false;
    next_beat_ = now + liveness_.interval();
    return true;
}

void FailureDetector::send_beats(const Works& works) {
    const std::vector<const LocalTransport*> local = peers_.local_transports();
    const std::vector<int> edges = peers_.edges();
    // While calls are made all ranks hear what all have counted; when somebody waits, more often.
    const bool tells_counts = ++looks_ % looks_between_counts == 0 && counts_.calls != passed_on_calls_;
    if (tells_counts) passed_on_calls_ = counts_.calls;
    liveness_.look(local, edges, peers_.departures(), !works.empty() || tells_counts);
    const bool passes_on = tells_counts || (looks_ % 2 == 0 && liveness_.is_trouble());
    for (const int edge : edges) {
        std::vector<std::vector<std::byte>> pieces;
        if (passes_on) pieces = liveness_.to_pass_on(edge, most_beat_bytes);
        if (pieces.empty()) pieces.emplace_back();
        for (const auto& piece : pieces) peers_.send_beat(edge, piece);
    }
    if (!edges.empty()) liveness_.publish_heard(arena_->heard());
}

void FailureDetector::hear_beat(int edge, std::span<const std::byte> statuses) {
    liveness_.heard(edge);
    liveness_.take(edge, statuses);
}

// The missed rank is alive if it is this one or one that this rank hears: the witness is then at fault.
Failure FailureDetector::told_by(const Notice& notice) const {
    if (notice.kind == ErrorKind::mismatch) return mismatch_told_by(notice);
    const int deaf = notice.witness;
    if (deaf < 0 || deaf >= options_.world_size || deaf == options_.rank || !liveness_.hears(notice.rank))
        return {notice.kind, notice.rank, options_.host(notice.rank), "", -1, notice.text, notice.seconds, deaf,
                {},          notice.apart};
    const bool same_host = leader_of(deaf) == leader_of(notice.rank);
    return {ErrorKind::peer_lost,
            deaf,
            options_.host(deaf),
            "",
            -1,
            options_.rank_name(deaf) + " has not heard of " + options_.rank_name(notice.rank) + " for " +
                seconds_text(notice.seconds) + ", of which others hear: rank " + std::to_string(deaf) +
                (same_host ? " counts" : " and its host count") + " as lost",
            notice.seconds,
            -1,
            {},
            same_host ? -1 : notice.rank};
}

// The mismatch as this rank reports it. Each of two ranks that disagree names the other one. A third rank names the one
// whose call is not its own; if it has made neither call, it names the higher rank.
Failure FailureDetector::mismatch_told_by(const Notice& notice) const {
    Failure failure{notice.kind,    notice.rank,        "", "", -1, notice.text, notice.seconds,
                    notice.witness, notice.disagreement};
    const Disagreement& on = notice.disagreement;
    const auto known = executor_.signature(on.communicator, on.number);
    const std::optional<std::uint64_t> own = known ? std::optional(known->fingerprint()) : std::nullopt;
    bool it_is_witness = failure.rank == options_.rank;
    if (!it_is_witness && failure.witness != options_.rank && own != on.witness)
        it_is_witness = own == on.culprits || failure.witness > failure.rank;
    if (it_is_witness && failure.witness >= 0 && failure.witness < options_.world_size) {
        std::swap(failure.rank, failure.witness);
        std::swap(failure.disagreement.culprits, failure.disagreement.witness);
    }
    failure.host = options_.host(failure.rank);
    return failure;
}

// A rank that hears of no other host is itself cut off; it is less likely that all others were lost at once.
Failure FailureDetector::silence_of(int rank, double silent) const {
    const auto edges = peers_.edges();
    const auto statuses = liveness_.statuses();
    const bool is_cut_off = edges.size() > 1 && std::find(edges.begin(), edges.end(), rank) != edges.end() &&
                            std::all_of(edges.begin(), edges.end(), [&](int edge) {
                                return 2 * statuses[static_cast<std::size_t>(edge)].silent >= liveness_.timeout();
                            });
    const int own = options_.rank;
    if (is_cut_off)
        return {ErrorKind::peer_lost,
                own,
                options_.host(own),
                "",
                -1,
                options_.rank_name(own) + " has heard of no other host for " + seconds_text(silent) +
                    ": its own host is cut off",
                silent};
    return {ErrorKind::peer_lost, rank, options_.host(rank), "", -1, silence_text(rank, silent), silent, own};
}

std::string FailureDetector::silence_text(int rank, double silent) const {
    return options_.rank_name(rank) + " has not been heard of for " + seconds_text(silent) +
           ": its process is stopped, or its host is down or cannot be reached";
}

bool FailureDetector::check_silence(const Works& works) {
    const auto statuses = liveness_.statuses();
    for (int rank = 0; rank < options_.world_size; ++rank) {
        const double silent = statuses[static_cast<std::size_t>(rank)].silent;
        if (liveness_.is_direct(rank) && silent >= liveness_.timeout()) {
            if (leader_of(rank) != leader_of(options_.rank)) {
                complain(rank, silent, Complaint::silent);
                continue;
            }
            peers_.fail(silence_of(rank, silent));
            return true;
        }
        if (works.empty() || liveness_.is_quiet(rank) == named_[static_cast<std::size_t>(rank)]) continue;
        named_[static_cast<std::size_t>(rank)] = liveness_.is_quiet(rank);
        if (liveness_.is_quiet(rank))
            report(options_.rank_name(rank) + " has not been heard of for " + seconds_text(silent) +
                   ", and counts as lost after " + readable(liveness_.timeout()) + " s; " +
                   multiring::describe(works.front()->call) + " is in flight here");
        else
            report(options_.rank_name(rank) + " is heard of again");
    }
    return false;
}

// ---- hosts that cannot reach each other ---------------------------------------------------------------------------
//
// Two hosts may both live, and be heard of by all others, while no packet gets from one to the other. Only the
// connections between them show it, so a rank that waits checks its own connections. Data that a peer does not
// acknowledge is a complaint, and so is the silence of a rank of another host, or a connection yet to be made that both
// sides dial in vain. A complaint is passed on to all by every way there is, and a rank that is called silent answers.
// A moment later, when the other side's complaint or answer has come, if there is one, a verdict is given by the same
// rule everywhere. Two ranks that have heard of different complaints could disagree all the same, so they take turns:
// the verdict of the first reaches the next one before it gives its own.

// Ranks of other hosts whose machines acknowledge nothing.
void FailureDetector::look_at_transports(const Works& works) {
    const std::vector<TcpTransport*> transports = peers_.tcp_transports_of_those_here();
    if (works.empty()) {
        for (TcpTransport* transport : transports) transport->forget_looks();
        // A rank that waits for us, and sends to see whether it arrives, shall not find the connection full.
        peers_.drain_sockets();
        return;
    }
    std::set<int> waited_for;
    for (const auto& work : works) {
        if (work->lane == nullptr || age_of(work->call) < looking_delay) continue;
        const std::vector<int> ranks = work->lane->waited_for();
        waited_for.insert(ranks.begin(), ranks.end());
    }
    for (TcpTransport* transport : transports) {
        const double stalled = transport->look(liveness_.elapsed(), waited_for.contains(transport->peer));
        name_apart(transport->peer, stalled, works);
        if (stalled >= liveness_.timeout()) complain(transport->peer, stalled, Complaint::unacknowledged);
    }
}

// Logs once. A rank that is silent altogether is logged elsewhere.
void FailureDetector::name_apart(int rank, double seconds, const Works& works) {
    const bool is_long = seconds >= liveness_.quiet_seconds();
    const auto index = static_cast<std::size_t>(rank);
    if (is_long == named_apart_[index] || (is_long && !liveness_.hears(rank))) return;
    named_apart_[index] = is_long;
    const std::string both =
        options_.rank_name(std::min(rank, options_.rank)) + " and " + options_.rank_name(std::max(rank, options_.rank));
    if (is_long)
        report(both + " cannot reach each other: nothing that rank " + std::to_string(options_.rank) +
               " sent has been acknowledged for " + seconds_text(seconds) + ", and one of them counts as lost after " +
               readable(liveness_.timeout()) + " s; " + multiring::describe(works.front()->call) +
               " is in flight here");
    else
        report(both + " reach each other again");
}

int FailureDetector::leader_of(int rank) const {
    const auto& hosts = options_.hosts;
    if (hosts.empty()) return rank;
    return static_cast<int>(std::find(hosts.begin(), hosts.end(), options_.host(rank)) - hosts.begin());
}

void FailureDetector::miss_connection(int rank, double seconds) {
    const std::lock_guard lock(mutex_);
    missing_connections_[rank] = seconds;
}

void FailureDetector::complain_of_missing_connections() {
    std::map<int, double> missing;
    {
        const std::lock_guard lock(mutex_);
        missing.swap(missing_connections_);
    }
    for (const auto& [rank, seconds] : missing) {
        if (executor_.transport(rank) != nullptr || missed_lately(options_.rank, rank, 0.5)) continue;
        Notice complaint{-1,    ErrorKind::peer_lost, rank, "", seconds,
                         false, options_.rank,        {},   -1, Complaint::unconnected};
        complaint.disagreement.number = ++missing_connection_complaints_;
        hear_complaint(complaint);
    }
}

bool FailureDetector::missed_lately(int witness, int rank, double timeouts) const {
    const auto found = unconnected_.find({witness, rank});
    return found != unconnected_.end() && Clock::now() - found->second.heard < seconds(timeouts * liveness_.timeout());
}

// Callers complain again and again; what they said long ago does not count.
void FailureDetector::hear_of_missing_connection(const Notice& complaint) {
    const std::pair pair(complaint.witness, complaint.rank);
    const auto known = unconnected_.find(pair);
    if (known != unconnected_.end() && complaint.disagreement.number <= known->second.complaint.disagreement.number)
        return;
    unconnected_.insert_or_assign(pair, MissingConnection{complaint, Clock::now()});
    peers_.send_complaint(complaint);
    if (!missed_lately(complaint.rank, complaint.witness, 1)) return;
    if (!has_accusation()) verdict_at_ = Clock::now() + verdict_grace;
    complaints_.push_back(unconnected_.at({complaint.rank, complaint.witness}).complaint);
    complaints_.push_back(complaint);
}

void FailureDetector::complain(int rank, double seconds, Complaint why) {
    hear_complaint({-1, ErrorKind::peer_lost, rank, "", seconds, false, options_.rank, {}, -1, why});
}

void FailureDetector::hear_complaint(const Notice& complaint) {
    const auto is_rank = [this](int rank) { return rank >= 0 && rank < options_.world_size; };
    if (!is_rank(complaint.rank) || !is_rank(complaint.witness) || state_.has_failed()) return;
    const int by = leader_of(complaint.witness), of = leader_of(complaint.rank);
    if (complaint.complaint == Complaint::unconnected) {
        if (by != of) hear_of_missing_connection(complaint);
        return;
    }
    const bool is_known = std::any_of(complaints_.begin(), complaints_.end(), [&](const Notice& known) {
        return known.complaint == complaint.complaint && leader_of(known.witness) == by && leader_of(known.rank) == of;
    });
    if (by == of || is_known) return;
    // A rank that is cut off should hear first what the others find.
    if (complaint.complaint != Complaint::answered && !has_accusation())
        verdict_at_ = Clock::now() + (by == leader_of(options_.rank) ? 2 : 1) * verdict_grace;
    complaints_.push_back(complaint);
    peers_.send_complaint(complaint);
    // Ranks that hear of us through the one that complains cannot know better. One that was away may be to blame.
    if (complaint.complaint == Complaint::silent && complaint.rank == options_.rank && liveness_.hears(options_.rank))
        complain(complaint.witness, complaint.seconds, Complaint::answered);
}

bool FailureDetector::has_accusation() const {
    return std::any_of(complaints_.begin(), complaints_.end(),
                       [](const Notice& c) { return c.complaint != Complaint::answered; });
}

bool FailureDetector::check_complaints() {
    if (!has_accusation() || Clock::now() < verdict_at_) return false;
    if (Clock::now() < verdict_at_ + verdict_grace * turn()) return false;
    peers_.fail(verdict());
    return true;
}

// Number of ranks that judge before this one: first those of hosts that are in no complaint, heard of here or not, as
// the way to them may be what is broken; then those of the other hosts that are heard of.
int FailureDetector::turn() const {
    if (!liveness_.hears(options_.rank)) return latest_turn;  // it was away, and others know better
    const auto is_party = [&](int rank) {
        const int leader = leader_of(rank);
        return std::any_of(complaints_.begin(), complaints_.end(), [&](const Notice& c) {
            return leader_of(c.witness) == leader || leader_of(c.rank) == leader;
        });
    };
    const bool own = is_party(options_.rank);
    const std::vector<bool> departed = peers_.departures();
    int before = 0;
    for (int rank = 0; rank < options_.world_size && before < latest_turn; ++rank) {
        if (rank == options_.rank || departed[static_cast<std::size_t>(rank)]) continue;
        const bool is_other = is_party(rank);
        if (is_other && !liveness_.hears(rank)) continue;
        before += is_other == own ? rank < options_.rank : own;
    }
    return before;
}

bool FailureDetector::is_complaint(int by_host, int of_host) const {
    return std::any_of(complaints_.begin(), complaints_.end(), [&](const Notice& c) {
        return leader_of(c.witness) == by_host && (of_host < 0 || leader_of(c.rank) == of_host);
    });
}

// Hosts that live, each with those that it cannot reach: both complain, or the other one answers, or one complains that
// nothing was acknowledged.
std::map<int, std::set<int>> FailureDetector::hosts_apart() const {
    std::map<int, std::set<int>> apart;
    for (const Notice& complaint : complaints_) {
        const int by = leader_of(complaint.witness), of = leader_of(complaint.rank);
        const bool is_mutual = is_complaint(of, by);
        const bool lives = of == leader_of(options_.rank) || is_complaint(of, -1) || liveness_.hears(complaint.rank);
        if (!is_mutual && !(lives && complaint.complaint == Complaint::unacknowledged)) continue;
        apart[by].insert(of);
        apart[of].insert(by);
    }
    return apart;
}

// Drop one of two hosts that cannot reach each other: the one that reaches fewer hosts; on a tie the one that is deaf
// while the other is heard of, then the one with fewer ranks, then the one with the higher leader.
Failure FailureDetector::verdict() const {
    const auto apart = hosts_apart();
    if (apart.empty()) {
        const auto accuses = [](const Notice& c) { return c.complaint != Complaint::answered; };
        const auto others = std::find_if(complaints_.begin(), complaints_.end(),
                                         [&](const Notice& c) { return accuses(c) && c.witness != options_.rank; });
        return missed(others != complaints_.end() ? *others
                                                  : *std::find_if(complaints_.begin(), complaints_.end(), accuses));
    }
    const auto hears_less = [&](int leader) {
        return std::any_of(complaints_.begin(), complaints_.end(), [&](const Notice& c) {
            return c.complaint == Complaint::silent && leader_of(c.witness) == leader &&
                   std::none_of(complaints_.begin(), complaints_.end(), [&](const Notice& other) {
                       return other.complaint == Complaint::silent && leader_of(other.rank) == leader;
                   });
        });
    };
    const auto weight = [&](const auto& entry) {
        const auto& [leader, others] = entry;
        const auto ranks = std::count(options_.hosts.begin(), options_.hosts.end(), options_.host(leader));
        return std::tuple(others.size(), hears_less(leader), -ranks, leader);
    };
    const auto culprit = std::max_element(apart.begin(), apart.end(),
                                          [&](const auto& a, const auto& b) { return weight(a) < weight(b); });
    const int rank = culprit->first, other = *culprit->second.begin();
    double longest = 0;
    for (const Notice& complaint : complaints_) longest = std::max(longest, complaint.seconds);
    return {ErrorKind::peer_lost,
            rank,
            options_.host(rank),
            "",
            -1,
            options_.rank_name(rank) + " and " + options_.rank_name(other) +
                " both live and cannot reach each other: nothing has come through for " + seconds_text(longest) +
                "; of the two, rank " + std::to_string(rank) + " and its host count as lost",
            longest,
            -1,
            {},
            other};
}

// A complaint that stands alone: it is true unless we know better.
Failure FailureDetector::missed(const Notice& complaint) const {
    if (complaint.witness == options_.rank) return silence_of(complaint.rank, complaint.seconds);
    Notice notice = complaint;
    notice.text = silence_text(complaint.rank, complaint.seconds);
    return told_by(notice);
}

// The oldest call that a caller waits for, after a while and then at doubling intervals.
void FailureDetector::report_lateness(const Works& works) {
    const auto found = std::find_if(works.begin(), works.end(),
                                    [](const auto& work) { return work->waiters.load(std::memory_order_relaxed) > 0; });
    if (found == works.end()) return;
    Work& work = **found;
    const double age = age_of(work.call);
    if (age < std::max(work.next_report, options_.late_seconds)) return;
    work.next_report = 2 * std::max(work.next_report, options_.late_seconds);
    const Blame blame = blame_of(work);
    report(multiring::describe(work.call) + " has waited for " + seconds_text(age) + ": " +
           (blame.ranks.empty() ? "nobody in particular" : describe(blame)));
}

void FailureDetector::report(std::string line) {
    const std::lock_guard lock(mutex_);
    reports_.push_back(std::move(line));
    has_reports_.store(true, std::memory_order_release);
}

std::vector<std::string> FailureDetector::take_reports() {
    const std::lock_guard lock(mutex_);
    has_reports_.store(false, std::memory_order_relaxed);
    return std::exchange(reports_, {});
}

Blame FailureDetector::blame_of(const Work& work) const {
    return find_blame(liveness_.statuses(), options_.rank, waiting_of(work), 0.5 * liveness_.quiet_seconds());
}

std::string FailureDetector::describe(const Blame& blame) const {
    std::string text;
    for (const int rank : blame.ranks) {
        const Status& status = liveness_.statuses()[static_cast<std::size_t>(rank)];
        if (!text.empty()) text += ", ";
        text += options_.rank_name(rank);
        if (blame.guilt == Guilt::silent) {
            text += " has not been heard of for " + seconds_text(status.silent);
        } else if (blame.guilt == Guilt::late) {
            text += " has not called it; ";
            text += status.has_called
                        ? "its last call, " +
                              call_text(status.last_collective, status.last_number, status.last_communicator) +
                              ", was " + seconds_text(status.idle) + " ago"
                        : "it has called nothing yet";
        } else if (blame.guilt == Guilt::cycle) {
            text += " waits in";
            for (int i = 0; i < status.waiting_count; ++i) {
                const Waiting& waiting = status.waiting[i];
                text += (i == 0 ? " " : " and ") + call_text(waiting.collective, waiting.number, waiting.communicator);
                for (int r = 0; r < waiting.rank_count; ++r)
                    text += (r == 0 ? " for rank " : ", ") + std::to_string(waiting.ranks[r]);
            }
        } else if (blame.guilt == Guilt::sent) {
            text += " has done its part, which has not arrived";
        } else if (blame.guilt == Guilt::here) {
            text += " is in it and waits for nobody";
        } else {
            text += " is waited for";
        }
    }
    return blame.guilt == Guilt::cycle ? "ranks wait for each other in a cycle: " + text : text;
}

Failure FailureDetector::timeout_of(const Work& work, const std::string& limit) const {
    const Call& call = work.lane != nullptr ? work.lane->call() : work.call;
    const std::vector<int> waited_for = work.lane != nullptr ? work.lane->waited_for() : std::vector<int>{};
    const Blame blame = blame_of(work);
    Failure late{blame.guilt == Guilt::cycle ? ErrorKind::mismatch : ErrorKind::timeout,
                 -1,
                 "",
                 std::string(call.called()),
                 static_cast<std::int64_t>(call.number),
                 multiring::describe(call),
                 age_of(call)};
    if (!waited_for.empty()) late.message += " waits for ";
    for (std::size_t i = 0; i < waited_for.size(); ++i)
        late.message += (i == 0 ? "" : ", ") + options_.rank_name(waited_for[i]);
    late.message += limit;
    if (blame.ranks.empty()) return late;
    late.rank = blame.ranks.front();
    if (blame.guilt == Guilt::cycle) {
        const auto own = std::find(blame.ranks.begin(), blame.ranks.end(), options_.rank);
        if (own != blame.ranks.end()) late.witness = options_.rank;
        if (own == blame.ranks.begin()) late.rank = blame.ranks.back();
    }
    late.host = options_.host(late.rank);
    if (blame.guilt != Guilt::unknown)
        late.message += ": " + describe(blame);
    else if (const std::string others = others_in(waiting_of(work)); !others.empty())
        late.message += ": " + others + held_by_kernel(waited_for);
    return late;
}

// State what the other ranks of this collective wait for. If nobody is to blame, bytes are on their way, or lost.
std::string FailureDetector::others_in(const Waiting& call) const {
    std::string text;
    int named = 0;
    for (const Status& status : liveness_.statuses()) {
        if (status.rank < 0 || status.rank == options_.rank || call.is_point()) continue;
        for (const Waiting& its : std::span(status.waiting, status.waiting_count)) {
            if (its.is_point() || its.communicator != call.communicator || its.number != call.number) continue;
            if (named++ == most_named) return text + ", and more ranks are in it";
            text += (text.empty() ? "" : ", ") + options_.rank_name(status.rank) + " waits";
            for (int i = 0; i < its.rank_count; ++i)
                text += (i == 0 ? " for rank " : " and ") + std::to_string(its.ranks[i]);
            text += " and has " + std::to_string(its.bytes) + " bytes to go";
        }
    }
    return text;
}

std::string FailureDetector::held_by_kernel(const std::vector<int>& ranks) const {
    std::string text;
    for (const TcpTransport* transport : peers_.tcp_transports()) {
        if (std::find(ranks.begin(), ranks.end(), transport->peer) == ranks.end()) continue;
        const auto [unsent, unread] = transport->held();
        text += "; the kernel here holds " + std::to_string(unsent) + " bytes for rank " +
                std::to_string(transport->peer) + " and " + std::to_string(unread) + " from it";
    }
    return text;
}

}  // namespace multiring
