#pragma once
// Spares: objects that are done with, kept for the memory they hold. What is given back is already
// as its next user wants it.
#include <cstddef>
#include <utility>
#include <vector>

namespace saccade {

template <class T>
class Spares {
 public:
  explicit Spares(size_t most) : most_(most) { spares_.reserve(most); }

  // The one given last; a new T when there is none.
  T Take() {
    if (spares_.empty()) return T();
    T spare = std::move(spares_.back());
    spares_.pop_back();
    return spare;
  }
  // Dropped when there are enough.
  void Give(T spare) {
    if (!full()) spares_.push_back(std::move(spare));
  }
  bool full() const { return spares_.size() >= most_; }

 private:
  size_t most_;
  std::vector<T> spares_;
};

}  // namespace saccade
