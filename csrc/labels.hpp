// Labels: what a call says of its buffer beside type and count, such as the names of the tensors that lie in it. A call
// carries a number of 24 bits, which all ranks compare; the text is kept here, for the message of a mismatch:
//
//   ranks disagree on ...: rank 0 called all_reduce(..., label=3fa2c1), rank 1 called all_reduce(..., label=9ab3f2)
//   label 3fa2c1: gradients kernel (64, 10), bias (10)
//   label 9ab3f2: gradients bias (10), kernel (64, 10)
//
// Each rank adds the lines that it knows to the messages that pass through it.
#pragma once

#include <cstdint>
#include <string>

namespace multiring {

inline constexpr std::uint32_t most_labels = 1 << 24;  // 0: a call without one

std::string describe_label(std::uint32_t label);  // "3fa2c1"

// Keeps a label's text known here for as long as it lives: names may change with each step.
class LabelName {
  public:
    LabelName(std::uint32_t label, std::string text);
    ~LabelName();
    LabelName(const LabelName&) = delete;
    LabelName& operator=(const LabelName&) = delete;

  private:
    const std::uint32_t label_;
    const std::string text_;
};

// Add the lines of the labels that are named in a message and known here.
void explain_labels(std::string& message);
// Add those that another message has; whether there were any.
bool take_over_labels(std::string& message, const std::string& other);
bool lacks_labels(const std::string& message);
// Leave out of two long lines what both have before and after their difference.
void contrast_labels(std::string& message);

}  // namespace multiring
