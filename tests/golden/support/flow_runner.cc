#include "tests/golden/support/flow_runner.h"

#include <algorithm>
#include <cstring>

#include "base/strings.h"

namespace saccade {

absl::StatusOr<std::unique_ptr<FlowRunner>> FlowRunner::Create(Backend& backend, const Model& model,
                                                               const FlowLimits& limits) {
  auto runner = std::unique_ptr<FlowRunner>(new FlowRunner(backend, model, limits));
  RETURN_IF_ERROR(runner->Allocate());
  return runner;
}

absl::Status FlowRunner::Allocate() {
  const ModelSpec& spec = model_.spec();
  const auto cameras = static_cast<uint32_t>(spec.cameras.size());
  sequences_.resize(limits_.sequences);
  // Segments and the suffix start blocks of their own.
  blocks_per_sequence_ = spec.max_positions / spec.kv.block_tokens + 3 * cameras + 8;
  ASSIGN_OR_RETURN(stream_, backend_.NewStream());
  ASSIGN_OR_RETURN(kv_, backend_.NewKvStorage(spec.kv, limits_.sequences * blocks_per_sequence_));
  const size_t rows = size_t{limits_.sequences} * cameras * spec.vision_tokens;
  ASSIGN_OR_RETURN(embeddings_,
                   backend_.Allocate(rows * spec.hidden * sizeof(float), MemKind::kDevice));
  const uint32_t frames = limits_.sequences * cameras;
  const uint32_t prompt_rows = limits_.sequences * spec.max_positions;
  const auto allocate = [&](size_t bytes) {
    return backend_.Allocate(std::max<size_t>(bytes, 1), MemKind::kDevice);
  };
  ASSIGN_OR_RETURN(arena_, allocate(model_.WorkspaceBytes(frames, prompt_rows, limits_.sequences)));
  ASSIGN_OR_RETURN(denoise_arena_, allocate(model_.DenoiseBytes(limits_.sequences)));
  if (limits_.layers > 0) {
    ASSIGN_OR_RETURN(parked_,
                     allocate(model_.ParkingBytes(frames, prompt_rows, limits_.sequences)));
    ASSIGN_OR_RETURN(denoise_parked_, allocate(model_.DenoiseParkingBytes(limits_.sequences)));
  }
  return absl::OkStatus();
}

absl::Status FlowRunner::Slices(
    size_t layers, Buffer& memory, Buffer* parked, TapSink* tap,
    const std::function<absl::Status(ExecContext&, const LayerRange&)>& run) {
  const auto all = static_cast<uint32_t>(layers);
  const uint32_t step = limits_.layers == 0 ? all : limits_.layers;
  absl::Status result;
  for (uint32_t begin = 0; begin < all && result.ok(); begin += step) {
    Arena arena(memory);
    ExecContext ctx{backend_.ops(), *stream_, arena, tap};
    LayerRange range;
    if (limits_.layers > 0) range = {begin, std::min(begin + step, all), parked};
    result = run(ctx, range);
    const absl::Status done = stream_->Synchronize();
    if (result.ok()) result = done;
    if (result.ok() && arena.used() != 0) {
      result = absl::InternalError("a slice keeps scratch");
    }
  }
  step_.clear();
  return result;
}

template <class T>
absl::StatusOr<TensorView> FlowRunner::Put(const std::vector<T>& values, DType dtype) {
  const auto count = static_cast<int64_t>(values.size());
  std::vector<T> host = values;
  if (host.empty()) host.emplace_back();  // a view needs an address
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer,
                   saccade::Upload(backend_, *stream_,
                                   TensorView::Dense(host.data(), dtype, MemKind::kHost,
                                                     {static_cast<int64_t>(host.size())}),
                                   dtype));
  step_.push_back(std::move(buffer));
  return step_.back()->View(dtype, {count});
}

void FlowRunner::Start(uint32_t s, const Prompt& prompt, std::vector<float> state) {
  const ModelSpec& spec = model_.spec();
  const auto cameras = static_cast<uint32_t>(spec.cameras.size());
  Sequence& sequence = sequences_[s];
  sequence = {};
  sequence.state = std::move(state);
  for (size_t i = 0; i < prompt.segments.size(); ++i) {
    const PromptSegment& segment = prompt.segments[i];
    uint32_t count = segment.rows;
    if (segment.modality == Modality::kVision) count = spec.vision_tokens;
    if (segment.modality == Modality::kText) count = static_cast<uint32_t>(segment.tokens.size());
    for (uint32_t t = 0; t < count; ++t) {
      Token token;
      if (segment.modality == Modality::kVision) {
        token.embedding =
            static_cast<int32_t>((s * cameras + segment.camera) * spec.vision_tokens + t);
      } else if (segment.modality == Modality::kText) {
        token.id = segment.tokens[t];
      } else {
        token.state = true;
      }
      token.block = sequence.blocks + t / spec.kv.block_tokens;
      token.offset = t % spec.kv.block_tokens;
      sequence.prompt.push_back(token);
    }
    sequence.blocks += (count + spec.kv.block_tokens - 1) / spec.kv.block_tokens;
    if (i < prompt.bidirectional) sequence.group = static_cast<uint32_t>(sequence.prompt.size());
  }
}

void FlowRunner::AddToken(Pages& p, uint32_t s, uint32_t block, uint32_t offset,
                          int32_t position) const {
  if (offset == 0) {
    p.pages.push_back(static_cast<int32_t>(s * blocks_per_sequence_ + block));
    p.page_len.push_back(0);
    p.page_pos.push_back(position);
  }
  ++p.page_len.back();
}

void FlowRunner::EndSequence(Pages& p) {
  p.max_pages = std::max(p.max_pages, static_cast<int32_t>(p.pages.size()) - p.page_begin.back());
  p.row_begin.push_back(static_cast<int32_t>(p.row_pos.size()));
  p.page_begin.push_back(static_cast<int32_t>(p.pages.size()));
}

absl::Status FlowRunner::Upload(const Pages& p, PagedBatch& batch) {
  batch.num_seqs = static_cast<int32_t>(p.row_begin.size()) - 1;
  batch.num_rows = static_cast<int32_t>(p.row_pos.size());
  batch.num_pages = static_cast<int32_t>(p.pages.size());
  batch.max_pages = p.max_pages;
  ASSIGN_OR_RETURN(batch.row_begin, Put(p.row_begin));
  ASSIGN_OR_RETURN(batch.page_begin, Put(p.page_begin));
  ASSIGN_OR_RETURN(batch.pages, Put(p.pages));
  ASSIGN_OR_RETURN(batch.page_len, Put(p.page_len));
  ASSIGN_OR_RETURN(batch.page_pos, Put(p.page_pos));
  ASSIGN_OR_RETURN(batch.row_pos, Put(p.row_pos));
  ASSIGN_OR_RETURN(batch.row_limit, Put(p.row_limit));
  ASSIGN_OR_RETURN(batch.row_slot, Put(p.row_slot));
  return absl::OkStatus();
}

absl::Status FlowRunner::Encode(std::span<const Frame> frames, TapSink* tap) {
  const ModelSpec& spec = model_.spec();
  const auto cameras = static_cast<uint32_t>(spec.cameras.size());
  const CameraSpec& camera = spec.cameras.front();
  const size_t bytes = camera.FrameBytes();
  const auto count = static_cast<int64_t>(frames.size());
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host,
                   backend_.Allocate(bytes * frames.size(), MemKind::kPinned));
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> rgb,
                   backend_.Allocate(bytes * frames.size(), MemKind::kDevice));
  std::vector<TensorView> out;
  for (size_t i = 0; i < frames.size(); ++i) {
    const Frame& frame = frames[i];
    if (frame.image->rgb.size() != bytes) return absl::InternalError("a frame has another size");
    std::memcpy(host->data() + i * bytes, frame.image->rgb.data(), bytes);
    out.push_back(embeddings_->View(DType::kF32, {spec.vision_tokens, spec.hidden},
                                    size_t{frame.sequence * cameras + frame.camera} *
                                        spec.vision_tokens * spec.hidden * sizeof(float)));
  }
  const std::initializer_list<int64_t> dims = {count, camera.height, camera.width, 3};
  const TensorView view = rgb->View(camera.dtype, dims);
  RETURN_IF_ERROR(stream_->Copy(view, host->View(camera.dtype, dims)));
  return Slices(spec.vision_layers.size(), *arena_, parked_.get(), tap,
                [&](ExecContext& ctx, const LayerRange& layers) {
                  return model_.Encode(ctx, {view, out, layers});
                });
}

absl::Status FlowRunner::Prefill(std::span<const uint32_t> sequences, TapSink* tap) {
  return Forward(sequences, {}, nullptr, tap);
}

absl::StatusOr<std::vector<int32_t>> FlowRunner::Generate(uint32_t s, uint32_t count,
                                                          TapSink* tap) {
  std::vector<int32_t> out;
  while (out.size() < count) {
    int32_t next = -1;
    RETURN_IF_ERROR(Forward(std::span(&s, 1), out, &next, tap));
    out.push_back(next);
  }
  return out;
}

absl::Status FlowRunner::Forward(std::span<const uint32_t> sequences, std::span<const int32_t> said,
                                 int32_t* next, TapSink* tap) {
  const ModelSpec& spec = model_.spec();
  const auto block_tokens = static_cast<int32_t>(spec.kv.block_tokens);
  TrunkBatch batch;
  Pages p;
  std::vector<int32_t> text, token_index, embedding_index, state_index;
  std::vector<float> states;
  for (const uint32_t s : sequences) {
    const Sequence& sequence = sequences_[s];
    for (uint32_t t = 0; t < sequence.prompt.size(); ++t) {
      const Token& token = sequence.prompt[t];
      AddToken(p, s, token.block, token.offset, static_cast<int32_t>(t));
      if (!said.empty()) continue;
      p.row_pos.push_back(static_cast<int32_t>(t));
      p.row_limit.push_back(static_cast<int32_t>(t < sequence.group ? sequence.group - 1 : t));
      p.row_slot.push_back(p.pages.back() * block_tokens + static_cast<int32_t>(token.offset));
      token_index.push_back(token.id < 0 ? -1 : static_cast<int32_t>(text.size()));
      if (token.id >= 0) text.push_back(token.id);
      embedding_index.push_back(token.embedding);
      state_index.push_back(token.state ? static_cast<int32_t>(states.size() / spec.state_width)
                                        : -1);
    }
    const auto prefix = static_cast<int32_t>(sequence.prompt.size());
    for (size_t i = 0; i < said.size(); ++i) {
      const auto position = prefix + static_cast<int32_t>(i);
      const auto offset = static_cast<uint32_t>(i) % spec.kv.block_tokens;
      AddToken(p, s, sequence.blocks + static_cast<uint32_t>(i) / spec.kv.block_tokens, offset,
               position);
      if (i + 1 < said.size()) continue;
      p.row_pos.push_back(position);
      p.row_limit.push_back(position);
      p.row_slot.push_back(p.pages.back() * block_tokens + static_cast<int32_t>(offset));
      token_index.push_back(static_cast<int32_t>(text.size()));
      text.push_back(said[i]);
      embedding_index.push_back(-1);
      state_index.push_back(-1);
    }
    states.insert(states.end(), sequence.state.begin(), sequence.state.end());
    EndSequence(p);
  }
  RETURN_IF_ERROR(Upload(p, batch.paged));
  batch.kv = kv_.get();
  const auto sampled = static_cast<int32_t>(text.size());  // where the next token goes
  text.push_back(-1);
  ASSIGN_OR_RETURN(batch.tokens, Put(text));
  ASSIGN_OR_RETURN(batch.token_index, Put(token_index));
  ASSIGN_OR_RETURN(batch.embedding_index, Put(embedding_index));
  ASSIGN_OR_RETURN(batch.state_index, Put(state_index));
  ASSIGN_OR_RETURN(const TensorView state_values, Put(states, DType::kF32));
  batch.states =
      state_values.Reshape({static_cast<int64_t>(sequences.size()), int64_t{spec.state_width}});
  const auto cameras = static_cast<int64_t>(spec.cameras.size());
  batch.embeddings = embeddings_->View(
      DType::kF32, {limits_.sequences * cameras * spec.vision_tokens, spec.hidden});
  batch.sample.dest = batch.tokens.Rows(0, 0);
  batch.top.ids = batch.tokens.Rows(0, 0);
  if (next != nullptr) {
    const auto ints = [&](int32_t value) { return Put(std::vector<int32_t>{value}); };
    batch.num_logit_rows = 1;
    ASSIGN_OR_RETURN(batch.logit_rows, ints(batch.paged.num_rows - 1));
    ASSIGN_OR_RETURN(batch.sample.source_row, ints(0));
    ASSIGN_OR_RETURN(batch.sample.draw, ints(0));
    ASSIGN_OR_RETURN(batch.sample.dest, ints(sampled));
    ASSIGN_OR_RETURN(batch.sample.temperature, Put(std::vector<float>{0}, DType::kF32));
    ASSIGN_OR_RETURN(batch.sample.top_p, Put(std::vector<float>{1}, DType::kF32));
    ASSIGN_OR_RETURN(batch.sample.seed, Put(std::vector<int64_t>{0}, DType::kI64));
    batch.sample.tokens = batch.tokens;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host,
                   backend_.Allocate(sizeof(int32_t), MemKind::kPinned));
  RETURN_IF_ERROR(Slices(
      spec.trunk_layers.size() - (next == nullptr ? 1 : 0), *arena_, parked_.get(), tap,
      [&](ExecContext& ctx, const LayerRange& range) -> absl::Status {
        batch.layers = range;
        RETURN_IF_ERROR(model_.Forward(ctx, batch));
        return stream_->Copy(host->View(DType::kI32, {1}), batch.tokens.Rows(sampled, sampled + 1));
      }));
  if (next != nullptr) *next = *reinterpret_cast<const int32_t*>(host->data());
  return absl::OkStatus();
}

absl::Status FlowRunner::Denoise(std::span<const Item> items, TapSink* tap) {
  const ModelSpec& spec = model_.spec();
  const ActionHeadSpec& head = spec.head;
  const auto block_tokens = static_cast<int32_t>(spec.kv.block_tokens);
  DenoiseBatch batch;
  Pages p;
  std::vector<int32_t> prefix_limit, suffix_pos, action_time, row_action, row_state, row_time,
      action_row;
  std::vector<float> x, states, time, dt, times;
  for (size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    const Sequence& sequence = sequences_[item.sequence];
    const auto prefix = static_cast<int32_t>(sequence.prompt.size());
    const auto rows = static_cast<int32_t>(head.suffix_rows());
    const auto time_row_of = [&](float t, float step) {
      auto at = std::find(times.begin(), times.end(), t);
      const auto row = static_cast<int32_t>(at - times.begin());
      if (at == times.end()) {
        times.push_back(t);
        dt.push_back(step);
        time.resize(times.size() * head.time_width);
        model_.EmbedTime(t, std::span(time).last(head.time_width));
      }
      return row;
    };
    const int32_t own_row = time_row_of(item.t, item.dt);
    const int32_t frozen_row = item.frozen > 0 ? time_row_of(0, 0) : own_row;
    const int32_t states_before = head.state_row ? 1 : 0;
    for (int32_t t = 0; t < prefix; ++t) {
      const Token& token = sequence.prompt[static_cast<size_t>(t)];
      AddToken(p, item.sequence, token.block, token.offset, t);
    }
    for (int32_t row = 0; row < rows; ++row) {
      const auto offset = static_cast<uint32_t>(row % block_tokens);
      AddToken(p, item.sequence, sequence.blocks + static_cast<uint32_t>(row / block_tokens),
               offset, prefix + row);
      const bool own =
          head.mask == SuffixMask::kCausal || (head.mask == SuffixMask::kStateFirst && row == 0);
      p.row_pos.push_back(prefix + row);
      p.row_limit.push_back(prefix + (own ? row : rows - 1));
      p.row_slot.push_back(p.pages.back() * block_tokens + static_cast<int32_t>(offset));
      prefix_limit.push_back(prefix - 1);
      suffix_pos.push_back(row);
      const bool state = head.state_row && row == 0;
      row_state.push_back(state ? static_cast<int32_t>(i) : -1);
      row_action.push_back(state ? -1 : static_cast<int32_t>(action_row.size()));
      const bool frozen = !state && row - states_before < static_cast<int32_t>(item.frozen);
      const int32_t time_row = frozen ? frozen_row : own_row;
      row_time.push_back(time_row);
      if (state) continue;
      action_row.push_back(static_cast<int32_t>(suffix_pos.size()) - 1);
      action_time.push_back(time_row);
    }
    x.insert(x.end(), item.x->begin(), item.x->end());
    states.insert(states.end(), sequence.state.begin(), sequence.state.end());
    EndSequence(p);
  }
  const auto count = static_cast<int64_t>(items.size());
  const auto actions = static_cast<int64_t>(action_row.size());
  batch.num_items = static_cast<int32_t>(count);
  RETURN_IF_ERROR(Upload(p, batch.paged));
  batch.kv = kv_.get();
  ASSIGN_OR_RETURN(batch.prefix_limit, Put(prefix_limit));
  ASSIGN_OR_RETURN(batch.suffix_pos, Put(suffix_pos));
  ASSIGN_OR_RETURN(batch.action_time, Put(action_time));
  ASSIGN_OR_RETURN(batch.row_action, Put(row_action));
  ASSIGN_OR_RETURN(batch.row_state, Put(row_state));
  ASSIGN_OR_RETURN(batch.row_time, Put(row_time));
  ASSIGN_OR_RETURN(batch.action_row, Put(action_row));
  const auto floats = [&](const std::vector<float>& values, int64_t rows,
                          int64_t columns) -> absl::StatusOr<TensorView> {
    ASSIGN_OR_RETURN(const TensorView view, Put(values, DType::kF32));
    return view.Reshape({rows, columns});
  };
  const auto distinct = static_cast<int64_t>(times.size());
  ASSIGN_OR_RETURN(batch.x, floats(x, actions, head.width));
  ASSIGN_OR_RETURN(batch.states, floats(states, count, spec.state_width));
  ASSIGN_OR_RETURN(batch.time, floats(time, distinct, head.time_width));
  ASSIGN_OR_RETURN(batch.dt, floats(dt, distinct, 1));
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host,
                   backend_.Allocate(x.size() * sizeof(float), MemKind::kPinned));
  const size_t last = head.layers.size();
  RETURN_IF_ERROR(
      Slices(last, *denoise_arena_, denoise_parked_.get(), tap,
             [&](ExecContext& ctx, const LayerRange& range) -> absl::Status {
               batch.layers = range;
               RETURN_IF_ERROR(model_.Denoise(ctx, batch));
               return stream_->Copy(host->View(DType::kF32, {actions, head.width}), batch.x);
             }));
  const auto* from = reinterpret_cast<const float*>(host->data());
  for (const Item& item : items) {
    std::copy_n(from, item.x->size(), item.x->begin());
    from += item.x->size();
  }
  return absl::OkStatus();
}

absl::Status FlowRunner::DenoiseAll(uint32_t s, std::vector<float>& x, TapSink* tap) {
  const uint32_t steps = model_.spec().head.steps;
  const double dt = -1.0 / steps;
  for (uint32_t i = 0; i < steps; ++i) {
    const Item item{s, &x, static_cast<float>(1.0 + i * dt), static_cast<float>(dt)};
    RETURN_IF_ERROR(Denoise(std::span(&item, 1), tap));
  }
  return absl::OkStatus();
}

absl::StatusOr<FlowRunner::LayerCache> FlowRunner::ReadCache(uint32_t s, uint32_t layer) {
  const KvGeometry& kv = model_.spec().kv;
  const int64_t width = int64_t{kv.kv_heads} * kv.head_dim;
  const auto tokens = static_cast<int64_t>(sequences_[s].prompt.size());
  const auto values = static_cast<size_t>(tokens * width);
  Pages p;
  for (int64_t t = 0; t < tokens; ++t) {
    const Token& token = sequences_[s].prompt[static_cast<size_t>(t)];
    AddToken(p, s, token.block, token.offset, static_cast<int32_t>(t));
  }
  EndSequence(p);
  PagedBatch batch;
  RETURN_IF_ERROR(Upload(p, batch));
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> device,
                   backend_.Allocate(2 * values * sizeof(float), MemKind::kDevice));
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host,
                   backend_.Allocate(2 * values * sizeof(float), MemKind::kPinned));
  const TensorView both = device->View(DType::kF32, {2 * tokens, width});
  RETURN_IF_ERROR(backend_.ops().ReadKv(*stream_, *kv_, layer, batch, both.Rows(0, tokens),
                                        both.Rows(tokens, 2 * tokens)));
  RETURN_IF_ERROR(stream_->Copy(host->View(DType::kF32, {2 * tokens, width}), both));
  RETURN_IF_ERROR(stream_->Synchronize());
  step_.clear();
  const auto* from = reinterpret_cast<const float*>(host->data());
  LayerCache out;
  out.k.assign(from, from + values);
  out.v.assign(from + values, from + 2 * values);
  return out;
}

}  // namespace saccade
