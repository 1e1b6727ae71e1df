#include "sched/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace saccade {

BeamSearch::BeamSearch(uint32_t beams, const BeamOptions& options,
                       std::span<const int32_t> stop_tokens, uint32_t max_tokens)
    : beams_(beams),
      options_(options),
      stop_tokens_(stop_tokens.begin(), stop_tokens.end()),
      max_tokens_(max_tokens),
      live_(1) {}

uint32_t BeamSearch::Candidates(uint32_t beams, size_t stop_tokens) {
  return beams * (1 + static_cast<uint32_t>(std::max<size_t>(1, stop_tokens)));
}

uint32_t BeamSearch::candidates() const { return Candidates(beams_, stop_tokens_.size()); }

double BeamSearch::Score(double log_prob, size_t tokens) const {
  return log_prob /
         std::pow(static_cast<double>(tokens), static_cast<double>(options_.length_penalty));
}

bool BeamSearch::IsStop(int32_t token) const {
  return std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end();
}

void BeamSearch::Complete(const Beam& beam, bool stopped) {
  const double score = Score(beam.log_prob, beam.tokens.size());
  const auto place = std::find_if(complete_.begin(), complete_.end(),
                                  [score](const Hypothesis& other) { return other.score < score; });
  complete_.insert(place, {beam.tokens, beam.log_prob, score, stopped});
  if (complete_.size() > beams_) complete_.pop_back();
}

std::vector<BeamSearch::Next> BeamSearch::Advance(std::span<const std::vector<ScoredToken>> tops) {
  struct Candidate {
    double log_prob;  // of the beam and the token
    uint32_t beam;
    int32_t token;
  };
  std::vector<Candidate> candidates;
  for (uint32_t b = 0; b < live() && b < tops.size(); ++b) {
    for (const ScoredToken& top : tops[b]) {
      candidates.push_back({live_[b].log_prob + static_cast<double>(top.log_prob), b, top.token});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.log_prob > b.log_prob; });
  std::vector<Next> next;
  std::vector<Beam> going_on;
  for (size_t rank = 0; rank < candidates.size() && going_on.size() < beams_; ++rank) {
    const Candidate& c = candidates[rank];
    const bool stops = IsStop(c.token);
    if (stops && rank >= beams_) continue;
    Beam beam = live_[c.beam];
    beam.tokens.push_back(c.token);
    beam.log_prob = c.log_prob;
    if (stops) {
      Complete(beam, true);
    } else {
      next.push_back({c.beam, c.token});
      going_on.push_back(std::move(beam));
    }
  }
  const size_t length = live_.front().tokens.size() + 1;
  live_ = std::move(going_on);
  over_ = live_.empty() || (complete_.size() == beams_ &&
                            (options_.early_stopping ||
                             complete_.back().score >= Score(candidates.front().log_prob, length)));
  if (!over_ && length >= max_tokens_) {
    for (const Beam& beam : live_) Complete(beam, false);
    over_ = true;
  }
  if (over_) next.clear();
  return next;
}

std::vector<BeamSearch::Hypothesis> BeamSearch::Results() const {
  const size_t count = std::min<size_t>(options_.results, complete_.size());
  return {complete_.begin(), complete_.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace saccade
