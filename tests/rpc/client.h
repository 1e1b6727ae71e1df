#pragma once
// A blocking client of the contract, for tests.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "saccade/v1/error.pb.h"
#include "saccade/v1/inference.grpc.pb.h"

namespace saccade::testing {

// The typed part of a call's final status.
inline v1::ErrorDetail DetailOf(const grpc::Status& status) {
  v1::RpcStatus rpc;
  v1::ErrorDetail detail;
  EXPECT_TRUE(rpc.ParseFromString(status.error_details()));
  EXPECT_EQ(rpc.code(), static_cast<int>(status.error_code()));
  EXPECT_EQ(rpc.message(), status.error_message());
  if (rpc.details_size() == 1) {
    EXPECT_TRUE(rpc.details(0).UnpackTo(&detail));
  } else {
    ADD_FAILURE() << "the status has no detail";
  }
  return detail;
}

inline std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// width x height pixels of one colour.
inline v1::VisionFrame RawFrame(const std::string& camera, uint8_t shade, int64_t capture_ns = 0,
                                uint32_t width = 8, uint32_t height = 6) {
  v1::VisionFrame frame;
  frame.set_camera(camera);
  frame.set_capture_time_ns(capture_ns);
  v1::RawImage& raw = *frame.mutable_raw();
  raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
  raw.set_width(width);
  raw.set_height(height);
  raw.set_data(std::string(size_t{width} * height * 3, static_cast<char>(shade)));
  return frame;
}

class SessionClient {
 public:
  explicit SessionClient(const std::shared_ptr<grpc::Channel>& channel,
                         std::optional<std::chrono::milliseconds> deadline = std::nullopt)
      : stub_(v1::Inference::NewStub(channel)) {
    if (deadline) context_.set_deadline(std::chrono::system_clock::now() + *deadline);
    stream_ = stub_->Session(&context_);
  }
  ~SessionClient() {
    if (finished_) return;
    context_.TryCancel();
    Finish();
  }

  bool Send(const v1::SessionRequest& request) { return stream_->Write(request); }
  bool SendFrame(const v1::VisionFrame& frame) {
    v1::SessionRequest request;
    *request.mutable_vision() = frame;
    return Send(request);
  }
  bool SendText(const std::string& text) {
    v1::SessionRequest request;
    request.mutable_text()->set_instruction(text);
    return Send(request);
  }
  bool SendAct(uint64_t id, const v1::ActRequest& act = {}) {
    v1::SessionRequest request;
    *request.mutable_act() = act;
    request.mutable_act()->set_id(id);
    return Send(request);
  }
  std::optional<v1::SessionResponse> Next() {
    v1::SessionResponse response;
    if (!stream_->Read(&response)) return std::nullopt;
    return response;
  }
  // Opens and returns the answer; records a failure when there is none.
  v1::Opened Open(const v1::Open& open = {}) {
    v1::SessionRequest request;
    *request.mutable_open() = open;
    Send(request);
    const std::optional<v1::SessionResponse> response = Next();
    if (!response || !response->has_opened()) {
      ADD_FAILURE() << "not opened: "
                    << (response ? response->ShortDebugString() : Finish().error_message());
      return {};
    }
    return response->opened();
  }
  v1::ActionChunk NextChunk() {
    const std::optional<v1::SessionResponse> response = Next();
    if (!response || !response->has_chunk()) {
      ADD_FAILURE() << "no chunk: "
                    << (response ? response->ShortDebugString() : Finish().error_message());
      return {};
    }
    return response->chunk();
  }
  v1::RequestError NextError() {
    const std::optional<v1::SessionResponse> response = Next();
    if (!response || !response->has_error()) {
      ADD_FAILURE() << "no error: "
                    << (response ? response->ShortDebugString() : Finish().error_message());
      return {};
    }
    return response->error();
  }
  v1::ActionChunk Act(uint64_t id, const v1::ActRequest& act = {}) {
    SendAct(id, act);
    return NextChunk();
  }
  void HalfClose() { stream_->WritesDone(); }
  void Cancel() { context_.TryCancel(); }
  grpc::Status Finish() {
    if (!finished_) {
      finished_ = true;
      // gRPC tells the status only when everything before it was read.
      v1::SessionResponse unread;
      while (stream_->Read(&unread)) {
      }
      status_ = stream_->Finish();
    }
    return status_;
  }

 private:
  std::unique_ptr<v1::Inference::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  bool finished_ = false;
  grpc::Status status_;
};

inline std::vector<int32_t> TokensOf(const v1::ActionChunk& chunk, int sample = 0) {
  if (sample >= chunk.samples_size()) return {};
  const auto& ids = chunk.samples(sample).token_ids();
  return {ids.begin(), ids.end()};
}

}  // namespace saccade::testing
