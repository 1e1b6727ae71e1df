// DeviceModel: denoise steps. The latents of a sample live in its row of `latents_` between steps;
// K and V of a step's suffix rows go to blocks behind those of the cache, which no later step
// reads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/device_model.h"
#include "engine/meta_writer.h"
#include "kernels/common/noise.h"

namespace saccade {
namespace {

// Source of both: lerobot's sample_actions: time = 1 + i * dt, dt = -1 / steps, the inside in F64.
float FlowTime(const FlowItem& item) {
  return static_cast<float>(1.0 + item.index * (-1.0 / item.steps));
}
float FlowStep(const FlowItem& item) { return static_cast<float>(-1.0 / item.steps); }

uint32_t Delay(const ActionHeadSpec& head, const FlowItem& item) {
  return item.input == nullptr || head.width == 0
             ? 0
             : static_cast<uint32_t>(item.input->committed.size() / head.width);
}

bool HasOwnTime(const ActionHeadSpec& head, const FlowItem& item) {
  return Delay(head, item) > 0 && item.input->commit_mode == CommitMode::kPerActionTime;
}

// Value `k` of the noise that the sample of `item` begins with.
float NoiseOf(const FlowItem& item, size_t floats, size_t k) {
  const bool given = item.input != nullptr && !item.input->noise.empty();
  return given ? item.input->noise[item.sample * floats + k] : NormalDraw(item.seed, k);
}

// The index arrays of the step's rows; those of PagedBatch, then those of DenoiseBatch.
struct Rows {
  std::vector<int32_t> row_begin{0}, page_begin{0}, pages, page_len, page_pos, row_pos, row_limit,
      row_slot, prefix_limit, suffix_pos, action_time, row_action, row_state, row_time, action_row;
};

// The last position that suffix row `i`, behind a prefix of `prefix` tokens, sees.
int32_t LimitOf(const ActionHeadSpec& head, uint32_t prefix, uint32_t i) {
  const bool own =
      head.mask == SuffixMask::kCausal || (head.mask == SuffixMask::kStateFirst && i == 0);
  return static_cast<int32_t>(prefix + (own ? i : head.suffix_rows() - 1));
}

// `time`: row of the item's flow time; `committed_time`: of its committed actions.
void AddItem(const ActionHeadSpec& head, const FlowItem& item, int32_t number, int32_t time,
             int32_t committed_time, int32_t first_block, int32_t block_tokens, Rows& rows) {
  const uint32_t prefix = item.timeline->num_tokens();
  for (const PageRef& page : item.pages) {
    rows.pages.push_back(page.block.value());
    rows.page_len.push_back(page.len);
    rows.page_pos.push_back(static_cast<int32_t>(page.position));
  }
  const auto count = static_cast<int32_t>(head.suffix_rows());
  for (int32_t i = 0; i < count; i += block_tokens) {
    rows.pages.push_back(first_block + i / block_tokens);
    rows.page_len.push_back(std::min(block_tokens, count - i));
    rows.page_pos.push_back(static_cast<int32_t>(prefix) + i);
  }
  rows.page_begin.push_back(static_cast<int32_t>(rows.pages.size()));
  const int32_t states = head.state_row ? 1 : 0;
  const auto delay = static_cast<int32_t>(Delay(head, item));
  const auto time_of = [&](int32_t a) { return a < delay ? committed_time : time; };
  for (int32_t i = 0; i < count; ++i) {
    const bool action = i >= states;
    if (action) {
      rows.action_row.push_back(static_cast<int32_t>(rows.row_pos.size()));
      rows.action_time.push_back(time_of(i - states));
    }
    rows.row_action.push_back(action ? number * static_cast<int32_t>(head.horizon) + i - states
                                     : -1);
    rows.row_state.push_back(action ? -1 : number);
    rows.row_time.push_back(action ? time_of(i - states) : time);
    rows.row_pos.push_back(static_cast<int32_t>(prefix) + i);
    rows.row_limit.push_back(LimitOf(head, prefix, static_cast<uint32_t>(i)));
    rows.row_slot.push_back((first_block + i / block_tokens) * block_tokens + i % block_tokens);
    rows.prefix_limit.push_back(static_cast<int32_t>(prefix) - 1);
    rows.suffix_pos.push_back(i);
  }
  rows.row_begin.push_back(static_cast<int32_t>(rows.row_pos.size()));
}

}  // namespace

TensorView DeviceModel::Latent(SequenceSlot slot) const {
  const ActionHeadSpec& head = model_.spec().head;
  return latents_->View(
      DType::kF32, {head.horizon, head.width},
      static_cast<size_t>(slot.value()) * head.horizon * head.width * sizeof(float));
}

absl::Status DeviceModel::StageFlows(const StepPlan& plan, DenoiseBatch& batch) {
  const ModelSpec& spec = model_.spec();
  const ActionHeadSpec& head = spec.head;
  const auto block_tokens = static_cast<int32_t>(spec.kv.block_tokens);
  const auto blocks =
      static_cast<int32_t>((head.suffix_rows() + spec.kv.block_tokens - 1) / spec.kv.block_tokens);
  Rows rows;
  std::vector<float> states;
  std::vector<float> steps;
  std::vector<float> times;
  const auto add_time = [&](float t, float dt) {
    times.resize(times.size() + head.time_width);
    model_.EmbedTime(t, std::span(times).last(head.time_width));
    steps.push_back(dt);
    return static_cast<int32_t>(steps.size()) - 1;
  };
  for (size_t i = 0; i < plan.flows.size(); ++i) {
    const FlowItem& item = plan.flows[i];
    const auto number = static_cast<int32_t>(i);
    const int32_t time = add_time(FlowTime(item), FlowStep(item));
    const int32_t committed_time = HasOwnTime(head, item) ? add_time(0, 0) : time;
    AddItem(head, item, number, time, committed_time,
            static_cast<int32_t>(options_.num_blocks) + number * blocks, block_tokens, rows);
    batch.paged.max_pages =
        std::max(batch.paged.max_pages, static_cast<int32_t>(item.pages.size()) + blocks);
    if (!head.state_row) continue;
    if (item.input == nullptr || item.input->state.size() != spec.state_width) {
      return absl::InternalError("a denoise step has no state");
    }
    states.insert(states.end(), item.input->state.begin(), item.input->state.end());
  }
  MetaWriter writer(*meta_host_, *meta_, meta_words_, meta_used_);
  PagedBatch& paged = batch.paged;
  const bool fits =
      writer.Add(rows.row_begin, paged.row_begin) &&
      writer.Add(rows.page_begin, paged.page_begin) && writer.Add(rows.pages, paged.pages) &&
      writer.Add(rows.page_len, paged.page_len) && writer.Add(rows.page_pos, paged.page_pos) &&
      writer.Add(rows.row_pos, paged.row_pos) && writer.Add(rows.row_limit, paged.row_limit) &&
      writer.Add(rows.row_slot, paged.row_slot) &&
      writer.Add(rows.prefix_limit, batch.prefix_limit) &&
      writer.Add(rows.suffix_pos, batch.suffix_pos) &&
      writer.Add(rows.action_time, batch.action_time) &&
      writer.Add(rows.row_action, batch.row_action) &&
      writer.Add(rows.row_state, batch.row_state) && writer.Add(rows.row_time, batch.row_time) &&
      writer.Add(rows.action_row, batch.action_row) &&
      writer.Add(states, std::max<int64_t>(spec.state_width, 1), batch.states) &&
      writer.Add(times, std::max<int64_t>(head.time_width, 1), batch.time) &&
      writer.Add(steps, 1, batch.dt);
  if (!fits) return PlanTooLarge("rows of denoise steps");
  RETURN_IF_ERROR(writer.Upload(stream_));
  batch.num_items = static_cast<int32_t>(plan.flows.size());
  paged.num_seqs = batch.num_items;
  paged.num_rows = static_cast<int32_t>(rows.row_pos.size());
  paged.num_pages = static_cast<int32_t>(rows.pages.size());
  batch.kv = kv_.get();
  batch.x = chunks_->View(DType::kF32, {int64_t{batch.num_items} * head.horizon, head.width});
  return absl::OkStatus();
}

// A sample's first step begins with its noise, a later one with what the step before it left;
// committed actions are what their mode says.
absl::Status DeviceModel::LoadLatents(const StepPlan& plan, const TensorView& x) {
  const ActionHeadSpec& head = model_.spec().head;
  const size_t floats = size_t{head.horizon} * head.width;
  auto* const staged = reinterpret_cast<float*>(noise_host_->data());
  for (size_t i = 0; i < plan.flows.size(); ++i) {
    const FlowItem& item = plan.flows[i];
    const auto begin = static_cast<int64_t>(i) * head.horizon;
    const uint32_t delay = Delay(head, item);
    if (delay > head.horizon || (item.input != nullptr && !item.input->noise.empty() &&
                                 item.input->noise.size() < (item.sample + 1) * floats)) {
      return absl::InternalError("a flow's noise or its committed actions do not fit its model");
    }
    if (item.index > 0) {
      RETURN_IF_ERROR(stream_.Copy(x.Rows(begin, begin + head.horizon), Latent(item.slot)));
    }
    // The rows that come from the host: all of the first step, else the committed ones.
    const uint32_t rows = item.index == 0 ? head.horizon : delay;
    if (rows == 0) continue;
    float* const out = staged + i * floats;
    const float t = HasOwnTime(head, item) ? 0 : FlowTime(item);
    for (size_t k = 0; k < size_t{rows} * head.width; ++k) {
      const bool committed = k < size_t{delay} * head.width;
      const float noise = committed && t == 0 ? 0 : NoiseOf(item, floats, k);
      out[k] = committed ? t * noise + (1 - t) * item.input->committed[k] : noise;
    }
    RETURN_IF_ERROR(stream_.Copy(
        x.Rows(begin, begin + rows),
        noise_host_->View(DType::kF32, {rows, head.width}, i * floats * sizeof(float))));
  }
  return absl::OkStatus();
}

absl::Status DeviceModel::StoreLatents(const StepPlan& plan, const TensorView& x) {
  const ActionHeadSpec& head = model_.spec().head;
  const size_t bytes = size_t{head.horizon} * head.width * sizeof(float);
  uint32_t ended = 0;
  for (size_t i = 0; i < plan.flows.size(); ++i) {
    const FlowItem& item = plan.flows[i];
    const auto begin = static_cast<int64_t>(i) * head.horizon;
    const TensorView from = x.Rows(begin, begin + head.horizon);
    if (item.index + 1 < item.steps) {
      RETURN_IF_ERROR(stream_.Copy(Latent(item.slot), from));
    } else {
      RETURN_IF_ERROR(stream_.Copy(
          chunks_host_->View(DType::kF32, {head.horizon, head.width}, ended++ * bytes), from));
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceModel::RunFlows(ExecContext& ctx, const StepPlan& plan) {
  if (plan.flows.empty()) return absl::OkStatus();
  if (plan.flows.size() > options_.max_logit_rows || latents_ == nullptr) {
    return PlanTooLarge("denoise steps");
  }
  for (const FlowItem& item : plan.flows) {
    if (static_cast<uint32_t>(item.slot.value()) >= options_.sequence_slots || item.steps == 0 ||
        item.index >= item.steps) {
      return absl::InternalError("a denoise step does not fit its model");
    }
  }
  DenoiseBatch batch;
  RETURN_IF_ERROR(StageFlows(plan, batch));
  RETURN_IF_ERROR(LoadLatents(plan, batch.x));
  RETURN_IF_ERROR(model_.Denoise(ctx, batch));
  return StoreLatents(plan, batch.x);
}

}  // namespace saccade
