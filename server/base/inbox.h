#pragma once
// Inbox: many threads put, one takes all. Lock-free; order of arrival is kept. It has no bound of
// its own: whoever offers work counts it, so that what must never be lost (a cancellation, a
// finished step) always has a place.
#include <atomic>
#include <utility>
#include <vector>

namespace saccade {

template <class T>
class Inbox {
 public:
  Inbox() = default;
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;
  ~Inbox() { TakeAll(); }

  // Any thread.
  void Put(T value) {
    auto* node = new Node{nullptr, std::move(value)};
    node->next = head_.load(std::memory_order_relaxed);
    while (!head_.compare_exchange_weak(node->next, node, std::memory_order_release,
                                        std::memory_order_relaxed)) {
    }
  }

  // The one taker. Everything put so far, oldest first.
  std::vector<T> TakeAll() {
    Node* node = head_.exchange(nullptr, std::memory_order_acquire);
    Node* oldest = nullptr;
    size_t count = 0;
    while (node != nullptr) {  // the list is newest first
      Node* next = node->next;
      node->next = oldest;
      oldest = node;
      node = next;
      ++count;
    }
    std::vector<T> values;
    values.reserve(count);
    while (oldest != nullptr) {
      values.push_back(std::move(oldest->value));
      Node* next = oldest->next;
      delete oldest;
      oldest = next;
    }
    return values;
  }

 private:
  struct Node {
    Node* next;
    T value;
  };
  std::atomic<Node*> head_{nullptr};
};

}  // namespace saccade
