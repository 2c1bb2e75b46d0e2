#include "engine.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "fork.hpp"

namespace multiring {
namespace {

constexpr auto signal_interval = std::chrono::milliseconds(100);
// On the core, before it is given away: other processes may want it, which nobody here can see. With 100 us 4 KB took 8
// ranks on 4 hosts that share 2 cores 2.7 ms.
constexpr double default_spin = 5e-6, longest_spin = 0.1;  // a spinning caller sees no signals
// On a core of its own: more than the nearest caches, less than a core's share of the last where that is 4 MB or more.
// 64 KB took two ranks with 1 MB of the nearest caches each 10 us with 0.5 MB, 6.6 with 2, 5.2 with 4, 256 KB 21, 19
// and 16, and with 16 MB each 30 and more.
constexpr double spare_staging = 4 << 20;
constexpr std::size_t most_of_arena = 8;  // for that, an eighth
constexpr auto notice_grace = std::chrono::milliseconds(100);
constexpr auto patience_for_labels = std::chrono::seconds(1);  // of a mismatch that other ranks have to explain
constexpr auto unread_grace = std::chrono::milliseconds(500);  // at shutdown, for peers that have not read all yet
constexpr auto longest_drive = std::chrono::seconds(1);        // by a caller, without a pause

}  // namespace

Engine::Engine(EngineOptions options)
    : options_(std::move(options)),
      departed_(static_cast<std::size_t>(options_.world_size)),
      linked_(departed_.size()),
      liveness_(options_.rank, options_.world_size, options_.heartbeat_timeout),
      named_(static_cast<std::size_t>(options_.world_size)),
      named_apart_(named_.size()) {
    const auto& o = options_;
    if (o.world_size < 1 || o.rank < 0 || o.rank >= o.world_size)
        throw std::invalid_argument("rank " + std::to_string(o.rank) + " of a world of " +
                                    std::to_string(o.world_size));
    if (!o.hosts.empty() && o.hosts.size() != static_cast<std::size_t>(o.world_size))
        throw std::invalid_argument("hosts has " + std::to_string(o.hosts.size()) + " names for a world of " +
                                    std::to_string(o.world_size));
    arena_ = std::make_shared<Arena>(o.arena_bytes, o.in_process, o.rank, o.world_size, o.generation);
    executor_ = std::make_unique<Executor>(o.rank, o.world_size, o.generation, arena_, *this,
                                           o.trace ? std::make_unique<Trace>() : nullptr);
    doorbell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    data_epoll_ = epoll_create1(EPOLL_CLOEXEC);
    if (doorbell_ < 0 || epoll_ < 0 || data_epoll_ < 0) {
        const int error = errno;
        for (const int fd : {doorbell_, epoll_, data_epoll_})
            if (fd >= 0) close(fd);
        throw_resource_error(system_message("cannot create a descriptor to sleep on", error));
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key_of(Watched::doorbell, 0);
    epoll_ctl(epoll_, EPOLL_CTL_ADD, doorbell_, &event);
    Control::Events events;
    events.notice = [this](const Notice& notice) { leave_notice(notice); };
    events.farewell = [this](int rank, int from) {
        if (rank >= 0 && rank < options_.world_size) leave_notice({from, ErrorKind::error, rank, "", 0, true});
    };
    events.lost = [this](int rank, const std::string& reason) {
        this->fail({ErrorKind::peer_lost, rank, host(rank), "", -1, rank_name(rank) + " " + reason});
    };
    events.beat = [this](int edge, std::span<const std::byte> statuses) {
        liveness_.heard(edge);
        liveness_.take(edge, statuses);
    };
    control_ = std::make_unique<Control>(epoll_, o.generation, std::move(events));
    letterbox_ = std::make_shared<InprocMailbox>();
    letterbox_->engine = this;
    divide_cores();
    thread_ = std::thread([this] { progress(); });
    register_for_fork(*this);
}

Engine::~Engine() {
    shutdown(0);
}

std::string Engine::rank_name(int rank) const {
    const std::string& name = host(rank);
    return "rank " + std::to_string(rank) + (name.empty() ? "" : " (host " + name + ")");
}

const std::string& Engine::host(int rank) const {
    return options_.hosts.empty() || rank < 0 || rank >= options_.world_size
               ? no_host_
               : options_.hosts[static_cast<std::size_t>(rank)];
}

namespace {

// Programs that a rank starts must not keep its connections open.
void close_on_exec(std::initializer_list<int> fds) {
    for (const int fd : fds) fcntl(fd, F_SETFD, FD_CLOEXEC);
}

}  // namespace

// ---- attaching ----------------------------------------------------------------------------------------------------

namespace {

// What follows it explains labels.
void add_to_first_line(std::string& message, const std::string& text) {
    message.insert(std::min(message.find('\n'), message.size()), text);
}

[[noreturn]] void throw_shut_down() {
    throw EngineError({ErrorKind::error, -1, "", "", -1,
                       "this communicator was shut down: call multiring.init() again and use the one it returns"});
}

}  // namespace

void Engine::check_owned() const {
    if (is_disowned())
        throw EngineError({ErrorKind::error, options_.rank, host(options_.rank), "", -1,
                           "this process was forked from rank " + std::to_string(options_.rank) +
                               ", to which the communicator belongs: call it there"});
}

void Engine::check_can_start(const Call& call) const {
    if (failed_.load(std::memory_order_acquire) && !closed_.load(std::memory_order_acquire) && !is_disowned()) {
        Failure failure = raised();
        if (failure.collective.empty()) {
            failure.collective = call.called();
            add_to_first_line(failure.message, "; this " + failure.collective + " was not started");
        }
        raise(std::move(failure));
    }
    check_usable();
}

void Engine::check_usable() const {
    check_owned();
    if (closed_.load(std::memory_order_acquire)) throw_shut_down();
    if (failed_.load(std::memory_order_acquire)) raise(raised());
}

void Engine::check_peer(int peer) const {
    if (peer < 0 || peer >= options_.world_size || peer == options_.rank)
        throw std::invalid_argument("peer " + std::to_string(peer) + " of rank " + std::to_string(options_.rank) +
                                    " in a world of " + std::to_string(options_.world_size));
}

void Engine::add_link(std::unique_ptr<LocalLink> link) {
    const LocalLink* added = link.get();
    executor_->attach(std::move(link));
    {
        const std::lock_guard lock(mutex_);
        local_links_.push_back(added);
    }
    divide_cores();
}

void Engine::attach_local(int peer, int memory_fd, int doorbell_fd, int socket_fd) {
    const Descriptor memory(memory_fd);  // the mapping outlives it
    Descriptor doorbell(doorbell_fd), socket(socket_fd);
    check_usable();
    check_peer(peer);
    if (options_.in_process) throw std::invalid_argument("an in-process engine has no shared memory to attach to");
    auto theirs = std::make_unique<PeerArena>(memory.get(), peer, options_.world_size, options_.generation);
    close_on_exec({doorbell.get(), socket.get()});
    add_link(
        std::make_unique<LocalLink>(peer, options_.rank, *executor_, arena_, std::move(theirs), std::move(doorbell)));
    control_->attach(peer, std::move(socket), false);
}

void Engine::attach_in_process(int peer, Engine& other) {
    check_usable();
    check_peer(peer);
    if (!options_.in_process || !other.options_.in_process)
        throw std::invalid_argument("both engines must have been made with inproc=True");
    if (other.options_.rank != peer)
        throw std::invalid_argument("the engine given for rank " + std::to_string(peer) + " is rank " +
                                    std::to_string(other.options_.rank));
    Descriptor doorbell(dup(other.doorbell_));
    if (!doorbell.is_open()) throw_resource_error(system_message("cannot duplicate a descriptor", errno));
    add_link(std::make_unique<LocalLink>(peer, options_.rank, *executor_, arena_,
                                         std::make_unique<PeerArena>(other.arena_), std::move(doorbell)));
    const std::lock_guard lock(mutex_);
    in_process_peers_.push_back(other.letterbox_);
}

void Engine::attach_tcp(int peer, const std::vector<int>& sockets) {
    std::vector<Descriptor> owned(sockets.begin(), sockets.end());
    check_usable();
    check_peer(peer);
    if (owned.empty()) throw std::invalid_argument("no sockets given for rank " + std::to_string(peer));
    for (const int socket : sockets) close_on_exec({socket});
    {
        const std::lock_guard lock(mutex_);
        linked_[static_cast<std::size_t>(peer)] = true;
        departed_[static_cast<std::size_t>(peer)] = false;
    }
    TcpLink::Events events;
    events.farewell = [this](int rank) { leave_notice({-1, ErrorKind::error, rank, "", 0, true}); };
    events.lost = [this](int rank, const std::string& reason) { suspect(rank, rank_name(rank) + " " + reason); };
    events.notice = [this](const Notice& notice) { leave_notice(notice); };
    events.unreachable = [this](int rank) {
        leave_notice({-1,
                      ErrorKind::peer_lost,
                      rank,
                      "",
                      liveness_.timeout(),
                      false,
                      options_.rank,
                      {},
                      -1,
                      Complaint::unacknowledged});
    };
    auto link = std::make_unique<TcpLink>(peer, std::move(owned), options_.generation, *executor_, pool_, data_epoll_,
                                          epoll_, key_of(Watched::hangup, peer), std::move(events));
    TcpLink* added = link.get();
    executor_->attach(std::move(link));
    const std::lock_guard lock(mutex_);
    tcp_links_.push_back(added);
    has_sockets_.store(true, std::memory_order_release);
}

bool Engine::departed(int peer) const {
    check_peer(peer);
    const std::lock_guard lock(mutex_);
    return departed_[static_cast<std::size_t>(peer)];
}

void Engine::attach_control(int peer, int socket_fd) {
    Descriptor socket(socket_fd);
    check_usable();
    check_peer(peer);
    close_on_exec({socket_fd});
    arena_->make_heard();
    control_->attach(peer, std::move(socket), true);
}

bool Engine::attached(int peer) const {
    check_owned();
    if (closed_.load(std::memory_order_acquire)) throw_shut_down();
    check_peer(peer);
    return executor_->link(peer) != nullptr;
}

// What follows from the cores that the ranks of this host have. Spinning pays while each has one to itself; where
// several share one, they share its nearest caches, which their staging should fill.
void Engine::divide_cores() {
    const std::lock_guard lock(mutex_);
    cpu_set_t cores = arena_->header().cores;
    for (const LocalLink* link : local_links_) CPU_OR(&cores, &cores, &link->arena().header().cores);
    const double local_ranks = static_cast<double>(local_links_.size() + 1);
    const double available = std::min<double>(CPU_COUNT(&cores), cpu_quota().value_or(1e9));
    cores_of_a_rank_.store(available / local_ranks, std::memory_order_relaxed);
    const double wanted = options_.spin_seconds.value_or(local_ranks <= available ? default_spin : 0);
    patience_.set_spin(seconds(std::min(wanted, longest_spin)));
    const double spare = spare_staging * std::min(1.0, available / local_ranks);
    executor_->spare_staging.set_most(std::min(static_cast<std::size_t>(spare), arena_->size() / most_of_arena));
}

// ---- communicators and schedules ----------------------------------------------------------------------------------

void Engine::add_communicator(std::uint32_t id, std::vector<int> members, std::uint16_t incarnation) {
    check_owned();  // an engine that has failed already says so in the calls, as on communicators that it had
    if (closed_.load(std::memory_order_acquire)) throw_shut_down();
    executor_->add_communicator(id, std::move(members), incarnation);
}

void Engine::forget(std::uint32_t id) {
    check_owned();
    executor_->forget(id);
    close_cards_of(id);
}

std::uint32_t Engine::install(std::uint32_t communicator, std::span<const std::int64_t> table,
                              std::span<const std::int32_t> peers, int blocks, std::size_t segment_bytes,
                              std::uint32_t window, std::uint64_t plan) {
    check_owned();  // a failed engine refuses the call that this schedule is for, and says which
    if (closed_.load(std::memory_order_acquire)) throw_shut_down();
    return executor_->install(communicator, table, peers, blocks, segment_bytes, window, plan);
}

std::uint64_t Engine::completed(std::uint32_t communicator) const {
    check_owned();
    return executor_->completed(communicator);
}

Installed& Engine::installed(std::uint32_t handle) {
    return executor_->installed(handle);
}

// ---- operations ---------------------------------------------------------------------------------------------------

// A caller inside the engine whose time is counted too.
class Engine::TimedCall {
  public:
    TimedCall(Engine& engine, const Call* call) : inside_(engine), engine_(engine), start_(Clock::now()) {
        if (!engine_.executor_->trace || call == nullptr) return;
        event_.kind = TraceEvent::Kind::caller;
        event_.begin = nanoseconds_of(start_);
        event_.communicator = call->installed->communicator->id;
        event_.collective = call->collective;
        event_.dtype = call->dtype;
        event_.number = call->number;
        event_.peer = -1;
    }
    Clock::time_point start() const { return start_; }
    void has_number(std::uint64_t number) { event_.number = number; }
    ~TimedCall() {
        const auto end = Clock::now();
        engine_.in_calls_.fetch_add(nanoseconds(end - start_), std::memory_order_relaxed);
        if (!engine_.executor_->trace || event_.begin == 0) return;
        event_.end = nanoseconds_of(end);
        event_.finished = std::uncaught_exceptions() == 0;
        engine_.executor_->trace->record(event_);
    }
    void waited(Clock::duration time) { engine_.waiting_.fetch_add(nanoseconds(time), std::memory_order_relaxed); }
    void waited_since(Clock::time_point start) { waited(Clock::now() - start); }

  private:
    static std::int64_t nanoseconds(Clock::duration time) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    }
    CallGuard inside_;
    Engine& engine_;
    Clock::time_point start_;
    TraceEvent event_{};
};

// A thread had nothing to do until `holder` did its part.
void Engine::count_wait(Link* holder, Clock::time_point begin, Clock::time_point end) {
    if (holder != nullptr) holder->count_waited(end - begin);
    if (!executor_->trace) return;
    TraceEvent event{};
    event.kind = TraceEvent::Kind::idle;
    event.begin = nanoseconds_of(begin);
    event.end = nanoseconds_of(end);
    event.peer = holder != nullptr ? holder->peer : -1;
    event.finished = true;
    executor_->trace->record(event);
}

void Engine::run(Call call, const CheckSignals& check_signals) {
    TimedCall timed(*this, &call);
    check_can_start(call);
    executor_->enter(call, timed.start());
    timed.has_number(call.number);
    Lane* lane = executor_->try_begin(call);
    Spinner spinner(patience_);
    const Outcome outcome = lane != nullptr ? drive(*lane, spinner) : Outcome::out_of_patience;
    timed.waited(spinner.waited());
    if (outcome == Outcome::finished) return;
    if (outcome == Outcome::failed) {
        executor_->abandon();
        executor_->end(*lane, false);
        raise(failure_of(call));
    }
    auto work = std::make_shared<Work>();
    work->call = call;
    work->lane = lane;
    work->waiters = 1;
    work->waited_since = Clock::now().time_since_epoch().count();
    if (lane != nullptr) lane->driven_by_progress.store(true, std::memory_order_release);
    hand_over(work);
    const auto start = Clock::now();
    wait_until_done(*work, check_signals);
    timed.waited_since(start);
    if (work->failure) raise(*work->failure);
}

// Drive an operation in the calling thread for as long as its patience lasts.
Engine::Outcome Engine::drive(Lane& lane, Spinner& spinner) try {
    Link* holder = nullptr;
    const auto go_on = [&] {
        if (!spinner.is_waiting()) return;
        const auto begin = spinner.start();
        count_wait(holder, begin, spinner.restart());
    };
    constexpr int rounds_between_looks = 16;  // at the clock
    std::optional<Clock::time_point> until;
    for (int round = 1;; ++round) {
        bool active = lane.advance();
        if (lane.finished()) {
            go_on();
            const bool clear = lane.flush();
            executor_->end(lane, true);
            if (!clear) wake_progress();  // a peer does not read: the progress thread sends the rest
            return Outcome::finished;
        }
        for (Link* link : lane.installed().shared_links) active |= link->drain();
        if (lane.installed().any_direct) active |= drain_sockets();
        if (failed_.load(std::memory_order_acquire)) {
            go_on();
            return Outcome::failed;
        }
        if (active) {
            go_on();
            if (round % rounds_between_looks != 0) continue;
            const auto now = Clock::now();
            if (!until) until = std::min(now + longest_drive, lane.call().deadline);
            if (now >= *until) return Outcome::out_of_patience;  // who waits sees signals, and the time limit
        } else {
            lane.flush();
            if (!spinner.is_waiting()) holder = lane.held_up_by();
            if (spinner.wait()) continue;
            go_on();
            return Outcome::out_of_patience;
        }
    }
} catch (const EngineError& error) {
    fail(error.failure);
    return Outcome::failed;
}

// Take in what has come on the data connections; true if there was anything.
bool Engine::drain_sockets() {
    if (!has_sockets_.load(std::memory_order_acquire)) return false;
    epoll_event events[64];
    const int count = epoll_wait(data_epoll_, events, 64, 0);
    for (int i = 0; i < count; ++i)
        if (Link* link = executor_->link(static_cast<int>(events[i].data.u64)))
            link->drain();  // it may be being attached
    return count > 0;
}

std::shared_ptr<Work> Engine::start(Call call, void* owner,
                                    std::function<void(const std::optional<Failure>&)> on_done) {
    const CallGuard inside(*this);
    check_can_start(call);
    executor_->enter(call, Clock::now());
    auto work = std::make_shared<Work>();
    work->call = call;
    work->owner = owner;
    work->on_done = std::move(on_done);
    hand_over(work);
    return work;
}

std::shared_ptr<Work> Engine::start_point(std::uint32_t communicator, int other, Call call, void* owner) {
    const CallGuard inside(*this);
    check_can_start(call);
    Lane* lane = executor_->begin_point(communicator, other, call);
    auto work = std::make_shared<Work>();
    work->call = lane != nullptr ? lane->call() : call;
    work->lane = lane;
    work->owner = owner;
    if (lane != nullptr) lane->driven_by_progress.store(true, std::memory_order_release);
    hand_over(work);
    return work;
}

void Engine::hand_over(std::shared_ptr<Work> work) {
    {
        const std::lock_guard lock(mutex_);
        if (closed_.load(std::memory_order_relaxed)) throw_shut_down();
        new_works_.push_back(std::move(work));
        inbox_.store(true, std::memory_order_release);
    }
    wake_progress();
}

void Engine::wait_until_done(Work& work, const CheckSignals& check_signals) {
    while (!work.done.wait_for(signal_interval)) {
        try {
            check_signals();
        } catch (...) {
            fail({ErrorKind::peer_lost, options_.rank, host(options_.rank), "", -1,
                  rank_name(options_.rank) + " was interrupted by a signal in a collective"});
            while (!work.done.wait_for(signal_interval)) {
            }
            throw;
        }
    }
}

namespace {

class Waiter {  // a caller, for a work
  public:
    explicit Waiter(Work& work) : work_(work) {
        if (work_.waiters.load(std::memory_order_relaxed) == 0)
            work_.waited_since.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
        work_.waiters.fetch_add(1, std::memory_order_release);
    }
    ~Waiter() { work_.waiters.fetch_sub(1, std::memory_order_relaxed); }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

  private:
    Work& work_;
};

}  // namespace

void Engine::wait(const std::shared_ptr<Work>& work, std::optional<double> timeout, const CheckSignals& check_signals) {
    check_owned();
    TimedCall timed(*this, work->done.is_set() ? nullptr : &work->call);
    const auto start = Clock::now();
    const auto deadline = Clock::now() + seconds(timeout.value_or(forever));
    const Waiter waits(*work);
    while (!work->done.wait_for(std::min<Clock::duration>(signal_interval, deadline - Clock::now()))) {
        check_signals();
        if (Clock::now() < deadline) continue;
        std::optional<Failure> late = ask(work);
        if (work->done.is_set()) break;
        if (!late)
            late = {ErrorKind::timeout,
                    -1,
                    "",
                    std::string(work->call.called()),
                    static_cast<std::int64_t>(work->call.number),
                    multiring::describe(work->call),
                    std::chrono::duration<double>(Clock::now() - start).count()};
        late->kind = ErrorKind::timeout;
        late->message += ", after " + readable(*timeout) + " s of wait(); the work goes on";
        throw EngineError(std::move(*late));
    }
    timed.waited_since(start);
    if (work->failure) raise(*work->failure);
}

// What a work waits for, now; nothing if the progress thread does not answer.
std::optional<Failure> Engine::ask(const std::shared_ptr<Work>& work) {
    const auto question = std::make_shared<WaitQuery>();
    question->work = work;
    {
        const std::lock_guard lock(mutex_);
        questions_.push_back(question);
        inbox_.store(true, std::memory_order_release);
    }
    wake_progress();
    if (!question->answered.wait_for(signal_interval)) return {};
    return question->answer;
}

// ---- failure ------------------------------------------------------------------------------------------------------

void Engine::fail(Failure failure) {
    const bool is_mismatch = failure.kind == ErrorKind::mismatch;
    if (is_mismatch) explain_labels(failure.message);
    if (failure.kind == ErrorKind::resource && failure.rank < 0) {  // it is this rank that lacks it
        failure.rank = options_.rank;
        failure.host = host(options_.rank);
        failure.message = rank_name(options_.rank) + ": " + failure.message;
    }
    Notice notice;
    std::vector<std::shared_ptr<InprocMailbox>> in_process;
    {
        const std::lock_guard lock(mutex_);
        // Who leaves still learns, and tells, that what it did was not what others did.
        if (failure_) {  // another rank's words may explain the labels of ours, which others wait for as well
            if (!is_mismatch || failure_->kind != ErrorKind::mismatch ||
                !take_over_labels(failure_->message, failure.message))
                return;
        } else {
            if (closed_.load(std::memory_order_relaxed) && !is_mismatch) return;
            failure_ = std::move(failure);
            failed_since_ = Clock::now();
        }
        notice = {-1,
                  failure_->kind,
                  failure_->rank,
                  failure_->message.substr(0, Notice::longest_text),
                  failure_->seconds,
                  false,
                  failure_->witness,
                  failure_->disagreement,
                  failure_->apart};
        untold_ = notice;
        in_process = in_process_peers_;
        failed_.store(true, std::memory_order_release);
    }
    control_->send(notice);
    for (const auto& letterbox : in_process) {
        const std::lock_guard lock(letterbox->mutex);
        if (letterbox->engine != nullptr) letterbox->engine->leave_notice(notice);
    }
    wake_progress();
}

void Engine::fail_from_python(Failure failure) {
    check_owned();
    failure.host = host(failure.rank);
    if (failure.kind == ErrorKind::mismatch) failure.witness = options_.rank;
    raised_.store(true, std::memory_order_relaxed);  // the caller raises it itself
    fail(std::move(failure));
}

void Engine::leave_notice(Notice notice) {
    {
        const std::lock_guard lock(mutex_);
        notices_.push_back(std::move(notice));
        inbox_.store(true, std::memory_order_release);
    }
    wake_progress();
}

// A data connection closed. Its rank may have closed it because of another's failure: that notice is on its way over
// the control connections, and is the better reason.
void Engine::suspect(int rank, const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        suspicions_.emplace_back(Clock::now() + notice_grace, Notice{-1, ErrorKind::peer_lost, rank, reason});
        inbox_.store(true, std::memory_order_release);
    }
    wake_progress();
}

std::optional<Failure> Engine::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

Failure Engine::raised() const {
    raised_.store(true, std::memory_order_relaxed);
    return *failure();
}

// With what other ranks have yet to say of it, if they say it soon.
void Engine::raise(Failure failure) const {
    while (failure.kind == ErrorKind::mismatch && lacks_labels(failure.message)) {
        Clock::time_point since;
        std::string known;
        {
            const std::lock_guard lock(mutex_);
            since = failed_since_;
            known = failure_->message;
        }
        if (take_over_labels(failure.message, known)) continue;
        if (Clock::now() > since + patience_for_labels) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    contrast_labels(failure.message);
    throw EngineError(std::move(failure));
}

// The engine's failure as this call sees it.
Failure Engine::failure_of(const Call& call) const {
    Failure failure = raised();
    if (failure.seconds == 0) failure.seconds = age_of(call);
    if (failure.collective.empty()) {
        failure.collective = call.called();
        failure.number = static_cast<std::int64_t>(call.number);
        add_to_first_line(failure.message, "; in flight here: " + multiring::describe(call));
    }
    return failure;
}

// A rank that has left on purpose is lost for those that still need it; any of several senders is needed only when
// the others have left too.
void Engine::fail_if_departed(const Work& work) {
    if (!someone_departed_.load(std::memory_order_acquire)) return;
    const auto has_departed = [this](int rank) {
        const std::lock_guard lock(mutex_);
        return rank != options_.rank && departed_[static_cast<std::size_t>(rank)];
    };
    std::vector<int> departed;
    if (work.lane != nullptr) {
        departed = work.lane->waited_for();
        std::erase_if(departed, [&](int rank) { return !has_departed(rank); });
    } else if (work.call.is_point()) {
        const Communicator& of = *work.call.installed->communicator;
        departed = of.members;
        std::erase_if(departed, [&](int rank) { return !has_departed(rank); });
        if (departed.size() + 1 < of.members.size()) return;
    }
    if (departed.empty()) return;
    const int rank = departed.front();
    const Call& call = work.lane != nullptr ? work.lane->call() : work.call;
    fail({ErrorKind::peer_lost, rank, host(rank), std::string(call.called()), static_cast<std::int64_t>(call.number),
          rank_name(rank) + " has shut down, and " + multiring::describe(call) + " waits for it"});
}

// Whether what we sent may lie unread with a rank that has not left.
bool Engine::is_unread() const {
    bool local_peers = false;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& link : executor_->attached()) {
            if (link->may_be_unread()) return true;
            local_peers |= link->shares_memory() && !departed_[static_cast<std::size_t>(link->peer)];
        }
    }
    return local_peers && executor_->is_read_from();
}

// What peers sent for a call that has completed here is of another call of theirs. Both sides hear of it if they leave
// within a moment of each other, else the one that leaves last.
void Engine::linger(Clock::time_point until) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // of two that leave at once, one sees what the other posted
    while (!failed_.load()) {
        const bool last = !is_unread() || Clock::now() >= until;
        for (const auto& link : executor_->attached()) link->drain();
        if (last) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// What is shared with others goes now, though somebody may keep the engine.
void Engine::release_descriptors() {
    unregister_for_fork(*this);
    control_->close_all();
    {
        const std::lock_guard lock(mutex_);  // another thread may look at the links
        executor_->disown();
    }
    for (int* fd : {&doorbell_, &epoll_, &data_epoll_}) close(std::exchange(*fd, -1));
    arena_->retire();
}

std::optional<Failure> Engine::shutdown(double timeout) {
    if (is_disowned()) return {};
    {
        const std::lock_guard lock(mutex_);
        if (closed_.exchange(true)) return {};
    }
    // What is still held back may be what a peer waits for, unless it has left.
    const auto deadline = Clock::now() + seconds(timeout);
    for (const auto& link : executor_->attached())
        while (!link->flush() && !failed_.load() && !departed(link->peer) && Clock::now() < deadline) {
            link->drain();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    control_->send_farewell(options_.rank);
    if (!failed_.load()) {
        const std::lock_guard lock(mutex_);
        for (TcpLink* link : tcp_links_) link->send_farewell();
    }
    std::vector<std::shared_ptr<InprocMailbox>> in_process;
    {
        const std::lock_guard lock(mutex_);
        in_process = in_process_peers_;
    }
    for (const auto& letterbox : in_process) {
        const std::lock_guard lock(letterbox->mutex);
        if (letterbox->engine != nullptr)
            letterbox->engine->leave_notice({options_.rank, ErrorKind::error, options_.rank, "", 0, true});
    }
    linger(Clock::now() + std::min<Clock::duration>(unread_grace, seconds(timeout)));
    std::optional<Failure> unheard = failure();
    if (unheard && (raised_.load() || unheard->kind != ErrorKind::mismatch)) unheard.reset();
    {
        const std::lock_guard lock(letterbox_->mutex);
        letterbox_->engine = nullptr;
    }
    {
        const std::lock_guard lock(mutex_);
        if (!failure_) {
            failure_ = {ErrorKind::error, options_.rank, "", "", -1, "the engine was shut down"};
            failed_since_ = Clock::now();
        }
        failed_.store(true, std::memory_order_release);
    }
    stopping_.store(true, std::memory_order_release);
    wake_progress();
    thread_.join();
    while (callers_.load() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    close_cards();
    executor_->team.store(nullptr, std::memory_order_relaxed);
    team_.reset();
    release_descriptors();
    return unheard;
}

void Engine::lock_for_fork() {
    executor_->lock_for_fork();
    mutex_.lock();
    control_->lock_for_fork();
}

void Engine::unlock_after_fork() {
    control_->unlock_after_fork();
    mutex_.unlock();
    executor_->unlock_after_fork();
}

void Engine::disown() noexcept {
    disowned_.store(true, std::memory_order_relaxed);
    has_owners_.store(false, std::memory_order_relaxed);
    executor_->disown();
    control_->disown();
    for (const int fd : {doorbell_, epoll_, data_epoll_}) close(fd);
    arena_->make_private_after_fork();
}

std::vector<void*> Engine::take_owners() {
    const std::lock_guard lock(mutex_);
    has_owners_.store(false, std::memory_order_relaxed);
    return std::exchange(owners_, {});
}

std::vector<Trace::Thread> Engine::traced() const {
    check_owned();
    if (!stopping_.load(std::memory_order_acquire)) throw std::logic_error("the engine still records");
    return executor_->trace ? executor_->trace->threads() : std::vector<Trace::Thread>();
}

Engine::Statistics Engine::statistics() const {
    check_owned();
    Statistics result{};
    result.operations = executor_->operations.load();
    result.segments = executor_->segments.load();
    result.arena_allocated = arena_->allocated_bytes();
    result.arena_committed = arena_->committed_bytes();
    result.seconds_in_calls = 1e-9 * static_cast<double>(in_calls_.load());
    result.seconds_waiting = 1e-9 * static_cast<double>(waiting_.load());
    const std::lock_guard lock(mutex_);  // another thread may let go of the links
    for (const auto& link : executor_->attached()) result.peers.emplace_back(link->peer, link->traffic());
    return result;
}

}  // namespace multiring
