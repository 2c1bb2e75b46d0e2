#include "peers.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <thread>

namespace multiring {
namespace {

constexpr auto mismatch_grace = std::chrono::milliseconds(500);  // ranks in an earlier call come to the disputed one
constexpr auto notice_grace = std::chrono::milliseconds(100);
// Bytes that are mapped for staging before any call: a lane stages with a megabyte, and some with little. Where more
// than two ranks share a core it is less, as all map theirs at the same time, 8 MB in 5 ms.
constexpr std::size_t mapped_ahead = lanes_of_communicator * ((std::size_t{1} << 20) + (std::size_t{8} << 10));
constexpr double mapping_ranks_per_core = 2;
constexpr std::size_t most_mapped_on_host = std::size_t{128} << 20;  // all of its ranks together
constexpr std::size_t most_mapped_of_peers = std::size_t{64} << 20;  // all together: some 5 ms

// Kinds of event, besides its bell, that wake the progress thread's epoll; a key holds the kind and the peer.
enum class EventSource : std::uint64_t { control, data, hangup };
std::uint64_t key_of(EventSource what, int peer) {
    return static_cast<std::uint64_t>(what) << 32 | static_cast<std::uint32_t>(peer);
}

// Programs that a rank starts must not keep its connections open.
void close_on_exec(std::initializer_list<int> fds) {
    for (const int fd : fds) fcntl(fd, F_SETFD, FD_CLOEXEC);
}

}  // namespace

Peers::Peers(const EngineOptions& options, EngineState& state, std::shared_ptr<Arena> arena, Executor& executor,
             Cores& cores, Doorbell& doorbell, Pool& pool, TakeBeat take_beat)
    : options_(options),
      state_(state),
      arena_(std::move(arena)),
      executor_(executor),
      cores_(cores),
      doorbell_(doorbell),
      pool_(pool),
      data_epoll_(epoll_create1(EPOLL_CLOEXEC)),
      control_(doorbell.epoll(), options.generation, control_events(std::move(take_beat))),
      socket_threads_(options, cores),
      mailbox_(std::make_shared<InprocMailbox>()),
      departed_(static_cast<std::size_t>(options.world_size)),
      connected_(departed_.size()) {
    if (!data_epoll_.is_open()) throw_resource_error(system_message("cannot create a descriptor to sleep on", errno));
    mailbox_->owner = this;
}

Control::Events Peers::control_events(TakeBeat take_beat) {
    Control::Events events;
    events.notice = [this](const Notice& notice) { leave_notice(notice); };
    events.farewell = [this](int rank, int from) {
        if (rank >= 0 && rank < options_.world_size) leave_notice({from, ErrorKind::error, rank, "", 0, true});
    };
    events.lost = [this](int rank, const std::string& reason) {
        fail({ErrorKind::peer_lost, rank, options_.host(rank), "", -1, options_.rank_name(rank) + " " + reason});
    };
    events.beat = std::move(take_beat);
    events.altered = [this](int rank, std::uint64_t record) {
        fail_for_record(rank, "the control connection", record);
    };
    return events;
}

// ---- attaching ----------------------------------------------------------------------------------------------------

void Peers::check_peer(int peer) const {
    if (peer < 0 || peer >= options_.world_size || peer == options_.rank)
        throw std::invalid_argument("peer " + std::to_string(peer) + " of rank " + std::to_string(options_.rank) +
                                    " in a world of " + std::to_string(options_.world_size));
}

void Peers::add_transport(std::unique_ptr<LocalTransport> transport) {
    if (local_transports().empty()) {
        const auto named = std::count(options_.hosts.begin(), options_.hosts.end(), options_.host(options_.rank));
        const auto here = static_cast<std::size_t>(std::max<std::ptrdiff_t>(named, 1));
        const double wanted = mapping_ranks_per_core * cores_.of_a_rank() / std::max(2.0, static_cast<double>(here));
        const auto bytes = static_cast<std::size_t>(std::min(1.0, wanted) * mapped_ahead);
        arena_->map_ahead(std::min(bytes, most_mapped_on_host / here));
    }
    const LocalTransport* added = transport.get();
    executor_.attach(std::move(transport));
    {
        const std::lock_guard lock(mutex_);
        local_transports_.push_back(added);
    }
    cores_.share(added->arena().header().cores);
}

void Peers::attach_local(int peer, int memory_fd, int doorbell_fd, int socket_fd) {
    const Descriptor memory(memory_fd);  // the mapping outlives it
    Descriptor doorbell(doorbell_fd), socket(socket_fd);
    state_.check_usable();
    check_peer(peer);
    if (options_.in_process) throw std::invalid_argument("an in-process engine has no shared memory to attach to");
    auto theirs = std::make_unique<PeerArena>(memory.get(), peer, options_.world_size, options_.generation);
    close_on_exec({doorbell.get(), socket.get()});
    add_transport(std::make_unique<LocalTransport>(peer, options_.rank, executor_, arena_, std::move(theirs),
                                                   std::move(doorbell)));
    control_.attach(peer, std::move(socket), false);
}

void Peers::attach_in_process(int peer, const Peers& other) {
    state_.check_usable();
    check_peer(peer);
    if (!options_.in_process || !other.options_.in_process)
        throw std::invalid_argument("both engines must have been made with inproc=True");
    if (other.options_.rank != peer)
        throw std::invalid_argument("the engine given for rank " + std::to_string(peer) + " is rank " +
                                    std::to_string(other.options_.rank));
    Descriptor doorbell(dup(other.doorbell_.descriptor()));
    if (!doorbell.is_open()) throw_resource_error(system_message("cannot duplicate a descriptor", errno));
    add_transport(std::make_unique<LocalTransport>(peer, options_.rank, executor_, arena_,
                                                   std::make_unique<PeerArena>(other.arena_), std::move(doorbell)));
    const std::lock_guard lock(mutex_);
    in_process_peers_.push_back(other.mailbox_);
}

void Peers::attach_tcp(int peer, const std::vector<int>& sockets, std::vector<Records> records) {
    std::vector<Descriptor> owned(sockets.begin(), sockets.end());
    state_.check_usable();
    check_peer(peer);
    if (owned.empty()) throw std::invalid_argument("no sockets given for rank " + std::to_string(peer));
    if (!records.empty() && records.size() != owned.size())
        throw std::invalid_argument(std::to_string(records.size()) + " records given for " +
                                    std::to_string(owned.size()) + " sockets of rank " + std::to_string(peer));
    for (const int socket : sockets) close_on_exec({socket});
    {
        const std::lock_guard lock(mutex_);
        connected_[static_cast<std::size_t>(peer)] = true;
        departed_[static_cast<std::size_t>(peer)] = false;
    }
    TcpTransport::StreamEvents events;
    events.farewell = [this](int rank) { leave_notice({-1, ErrorKind::error, rank, "", 0, true}); };
    events.lost = [this](int rank, const std::string& reason) {
        suspect(rank, options_.rank_name(rank) + " " + reason);
    };
    events.notice = [this](const Notice& notice) { leave_notice(notice); };
    events.unreachable = [this](int rank) {
        leave_notice({-1,
                      ErrorKind::peer_lost,
                      rank,
                      "",
                      options_.heartbeat_timeout,
                      false,
                      options_.rank,
                      {},
                      -1,
                      Complaint::unacknowledged});
    };
    events.altered = [this](int rank, std::size_t stream, std::uint64_t record) {
        fail_for_record(rank, "connection " + std::to_string(stream), record);
    };
    auto transport = std::make_unique<TcpTransport>(
        peer, std::move(owned), std::move(records), options_.generation, executor_, pool_, socket_threads_,
        data_epoll_.get(), doorbell_.epoll(), key_of(EventSource::hangup, peer), std::move(events));
    TcpTransport* added = transport.get();
    executor_.attach(std::move(transport));
    const std::lock_guard lock(mutex_);
    tcp_transports_.push_back(added);
    has_sockets_.store(true, std::memory_order_release);
}

void Peers::attach_control(int peer, int socket_fd, std::optional<Records> records) {
    Descriptor socket(socket_fd);
    state_.check_usable();
    check_peer(peer);
    close_on_exec({socket_fd});
    arena_->make_heard();
    control_.attach(peer, std::move(socket), true, std::move(records));
}

bool Peers::attached(int peer) const {
    state_.check_open();
    check_peer(peer);
    return executor_.transport(peer) != nullptr;
}

bool Peers::departed(int peer) const {
    check_peer(peer);
    const std::lock_guard lock(mutex_);
    return departed_[static_cast<std::size_t>(peer)];
}

// ---- failure ------------------------------------------------------------------------------------------------------

// Ranks that are still in an earlier call come to the one on which others disagree, and have a voice in who is wrong.
void Peers::fail(Failure failure) {
    const bool is_in_flight = failure.kind == ErrorKind::mismatch && failure.seconds > 0;
    if (!is_in_flight || state_.is_closed() || state_.has_failed()) return fail_now(std::move(failure));
    {
        const std::lock_guard lock(mutex_);
        suspicions_.emplace_back(Clock::now() + mismatch_grace, std::move(failure));
        doorbell_.announce();
    }
    doorbell_.ring();
}

void Peers::fail_now(Failure failure) {
    const std::optional<Notice> notice = state_.fail(std::move(failure));
    if (!notice) return;
    control_.send(*notice);
    leave_in_process(*notice);
    doorbell_.ring();
}

// Nobody is lost, but the two cannot go on over this link.
void Peers::fail_for_record(int peer, const std::string& connection, std::uint64_t number) {
    fail({ErrorKind::peer_lost,
          peer,
          options_.host(peer),
          "",
          -1,
          "the link from " + options_.rank_name(peer) + " to " + options_.rank_name(options_.rank) +
              " cannot be trusted: record " + std::to_string(number) + " of " + connection +
              " is not what was sent; something on the way has altered, dropped or repeated it",
          0,
          -1,
          {},
          options_.rank});
}

void Peers::leave_in_process(const Notice& notice) {
    std::vector<std::shared_ptr<InprocMailbox>> in_process;
    {
        const std::lock_guard lock(mutex_);
        in_process = in_process_peers_;
    }
    for (const auto& mailbox : in_process) {
        const std::lock_guard lock(mailbox->mutex);
        if (mailbox->owner != nullptr) mailbox->owner->leave_notice(notice);
    }
}

// A data connection closed. Its rank may have closed it because of another's failure: that notice is on its way over
// the control connections, and is the better reason.
void Peers::suspect(int rank, const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        suspicions_.emplace_back(Clock::now() + notice_grace,
                                 Failure{ErrorKind::peer_lost, rank, options_.host(rank), "", -1, reason});
        doorbell_.announce();
    }
    doorbell_.ring();
}

void Peers::leave_notice(Notice notice) {
    {
        const std::lock_guard lock(mutex_);
        notices_.push_back(std::move(notice));
        doorbell_.announce();
    }
    doorbell_.ring();
}

std::vector<Notice> Peers::take_notices() {
    const std::lock_guard lock(mutex_);
    for (const Notice& notice : notices_) {
        const auto rank = static_cast<std::size_t>(notice.rank);
        // A notice may overtake data of the same peer; a data connection brings a farewell of its own, behind its data.
        if (!notice.farewell || (notice.from >= 0 && connected_[rank])) continue;
        departed_[rank] = true;
        someone_departed_.store(true, std::memory_order_release);
    }
    return std::exchange(notices_, {});
}

bool Peers::has_suspicions() const {
    const std::lock_guard lock(mutex_);
    return !suspicions_.empty();
}

bool Peers::has_due_suspicions() const {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    return std::any_of(suspicions_.begin(), suspicions_.end(), [&](const auto& each) { return each.first <= now; });
}

void Peers::fail_for_suspicions(Clock::time_point until) {
    std::vector<Failure> due;
    {
        const std::lock_guard lock(mutex_);
        std::erase_if(suspicions_, [&](const auto& suspicion) {
            if (suspicion.first > until) return false;
            due.push_back(suspicion.second);
            return true;
        });
    }
    for (const Failure& failure : due) fail_now(failure);
}

// Whoever waits for us has a data connection to us; over the control connections the notice may have no way, where
// the ranks between have left.
void Peers::tell_waiters() {
    const std::optional<Notice> notice = state_.take_untold();
    if (!notice) return;
    for (TcpTransport* transport : tcp_transports()) transport->send_notice(*notice);
}

void Peers::send_complaint(const Notice& complaint) {
    control_.send(complaint);
    for (TcpTransport* transport : tcp_transports())
        if (transport->peer != complaint.from) transport->send_complaint(complaint);
}

// ---- who is there -------------------------------------------------------------------------------------------------

std::vector<int> Peers::departed_of(std::vector<int> ranks) const {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranks, [&](int rank) { return rank == options_.rank || !departed_[static_cast<std::size_t>(rank)]; });
    return ranks;
}

std::vector<bool> Peers::departures() const {
    const std::lock_guard lock(mutex_);
    return departed_;
}

std::vector<const LocalTransport*> Peers::local_transports() const {
    const std::lock_guard lock(mutex_);
    return local_transports_;
}

void Peers::map_staging() const {
    const auto here = local_transports();
    for (const LocalTransport* transport : here) transport->arena().map_ahead(most_mapped_of_peers / here.size());
}

std::vector<TcpTransport*> Peers::tcp_transports() const {
    const std::lock_guard lock(mutex_);
    return tcp_transports_;
}

std::vector<TcpTransport*> Peers::tcp_transports_of_those_here() const {
    const std::lock_guard lock(mutex_);
    std::vector<TcpTransport*> transports = tcp_transports_;
    std::erase_if(transports,
                  [&](const TcpTransport* transport) { return departed_[static_cast<std::size_t>(transport->peer)]; });
    return transports;
}

std::vector<ConnectionCounts> Peers::connection_counts() const {
    std::vector<ConnectionCounts> counts;
    for (TcpTransport* transport : tcp_transports_of_those_here()) counts.push_back(transport->connection_counts());
    return counts;
}

std::vector<std::pair<int, Traffic>> Peers::traffic() const {
    std::vector<std::pair<int, Traffic>> traffic;
    const std::lock_guard lock(mutex_);  // another thread may let go of the transports
    for (const auto& transport : executor_.attached()) traffic.emplace_back(transport->peer, transport->traffic());
    return traffic;
}

// ---- reading ------------------------------------------------------------------------------------------------------

bool Peers::flush() {
    bool held_back = false;
    for (const auto& transport : executor_.attached()) held_back |= !transport->flush();
    return !held_back;
}

bool Peers::drain_sockets() {
    if (!has_sockets_.load(std::memory_order_acquire)) return false;
    epoll_event events[64];
    const int count = epoll_wait(data_epoll_.get(), events, 64, 0);
    for (int i = 0; i < count; ++i)
        if (Transport* transport = executor_.transport(static_cast<int>(events[i].data.u64)))
            transport->drain();  // it may be being attached
    return count > 0;
}

bool Peers::drain() {
    bool active = false;
    for (const auto& transport : executor_.attached())
        if (transport->shares_memory()) active |= transport->drain();
    return drain_sockets() || active;
}

void Peers::poll(Clock::duration at_most) {
    if (at_most > Clock::duration{}) {  // epoll_wait counts in milliseconds
        pollfd any{doorbell_.epoll(), POLLIN, 0};
        const auto whole = std::chrono::duration_cast<std::chrono::seconds>(at_most);
        const timespec timeout{whole.count(), static_cast<long>(std::chrono::nanoseconds(at_most - whole).count())};
        ppoll(&any, 1, &timeout, nullptr);
    }
    epoll_event events[16];
    const int count = epoll_wait(doorbell_.epoll(), events, 16, 0);
    last_poll_ = Clock::now();
    for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == Doorbell::key) {
            doorbell_.take_rings();
            continue;
        }
        const auto watched = static_cast<EventSource>(events[i].data.u64 >> 32);
        const int peer = static_cast<int>(events[i].data.u64 & 0xffffffff);
        switch (watched) {
            case EventSource::control: control_.read(peer); break;
            case EventSource::data: drain_sockets(); break;
            case EventSource::hangup:
                if (Transport* transport = executor_.transport(peer)) transport->drain();  // it may be being attached
                break;
        }
    }
}

// Data connections wake the progress thread only while it has operations to drive: callers read them themselves.
void Peers::watch_data(bool wanted) {
    if (wanted == watches_data_ || (wanted && !has_sockets_.load(std::memory_order_acquire))) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = key_of(EventSource::data, 0);
    epoll_ctl(doorbell_.epoll(), wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, data_epoll_.get(), &event);
    watches_data_ = wanted;
}

// ---- leaving ------------------------------------------------------------------------------------------------------

void Peers::say_farewell(Clock::time_point deadline) {
    fail_for_suspicions(Clock::time_point::max());  // there is no time for better reasons
    // A peer that has not left may wait for frames that are still held back.
    for (const auto& transport : executor_.attached())
        while (!transport->flush() && !state_.has_failed() && !departed(transport->peer) && Clock::now() < deadline) {
            transport->drain_all();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    control_.send_farewell(options_.rank);
    if (!state_.has_failed()) {
        const std::lock_guard lock(mutex_);
        for (TcpTransport* transport : tcp_transports_) transport->send_farewell();
    }
    leave_in_process({options_.rank, ErrorKind::error, options_.rank, "", 0, true});
}

// True if a rank that is still here may not have read what we sent.
bool Peers::is_unread() const {
    bool local_peers = false;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& transport : executor_.attached()) {
            if (transport->may_be_unread()) return true;
            local_peers |= transport->shares_memory() && !departed_[static_cast<std::size_t>(transport->peer)];
        }
    }
    return local_peers && executor_.is_read_from();
}

// Read on until peers have read what we sent, or until `until`: bytes for a call that has completed here show that a
// peer is in a different one. Both sides hear of it if they leave within a moment of each other, else the one that
// leaves last.
void Peers::linger(Clock::time_point until) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // when two leave at once, one sees what the other posted
    while (!state_.has_failed()) {
        const bool last = !is_unread() || Clock::now() >= until;
        for (const auto& transport : executor_.attached()) transport->drain_all();
        if (last) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    fail_for_suspicions(Clock::time_point::max());
}

void Peers::close_mailbox() {
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->owner = nullptr;
}

void Peers::release() {
    socket_threads_.stop();
    control_.close_all();
    const std::lock_guard lock(mutex_);  // another thread may look at the transports
    executor_.disown();
    data_epoll_.reset();
}

void Peers::disown() noexcept {
    executor_.disown();
    control_.disown();
    socket_threads_.disown();
    data_epoll_.reset();
}

void Peers::lock_for_fork() {
    mutex_.lock();
    control_.lock_for_fork();
    socket_threads_.lock_for_fork();
}

void Peers::unlock_after_fork() {
    socket_threads_.unlock_after_fork();
    control_.unlock_after_fork();
    mutex_.unlock();
}

}  // namespace multiring
