// SignalCounter: how often this process got a signal, whatever its threads are doing.
//
// A handler of Python's runs once its main thread is back in the interpreter. One that waits in XLA or TensorFlow for a
// rank that does not come is not, and it is then that somebody asks.
#pragma once

#include <csignal>
#include <cstdint>

namespace multiring {

class SignalCounter {
  public:
    explicit SignalCounter(int number);  // takes the signal
    ~SignalCounter() { give_back(); }
    SignalCounter(const SignalCounter&) = delete;
    SignalCounter& operator=(const SignalCounter&) = delete;

    std::uint64_t count() const;  // since the process began, with what earlier counters of this signal saw
    void give_back();             // leaves a signal alone that somebody else has taken since; may be called twice

  private:
    int number_;
    bool is_taken_ = true;
    struct sigaction former_{};
};

}  // namespace multiring
