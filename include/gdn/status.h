// Errors as values: the library never prints, exits or throws across its public surface.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace gdn {

// What kind of thing went wrong. The message names the argument, what was expected and what came.
enum class ErrorCode {
  kOk = 0,
  kInvalidArgument,     // wrong rank, shape, dtype, stride, alignment, value or combination
  kUnsupported,         // valid, but no backend (or not the forced one) takes it; says why
  kWorkspaceTooSmall,   // a caller's buffer is smaller than the byte query says
  kPeerFailed,          // another rank reported an error, left, or never came
  kDevice,              // a device call or a launch failed
  kIo,                  // a file could not be read or written
  kInternal,            // a broken invariant of this library; please report it
};

const char* to_string(ErrorCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok() { return {}; }
  bool is_ok() const { return code_ == ErrorCode::kOk; }
  explicit operator bool() const { return is_ok(); }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

// Either a value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}          // NOLINT: implicit on purpose
  Result(Status status) : state_(std::move(status)) {}   // NOLINT: implicit on purpose

  bool is_ok() const { return std::holds_alternative<T>(state_); }
  explicit operator bool() const { return is_ok(); }
  Status status() const { return is_ok() ? Status::ok() : std::get<Status>(state_); }

  // Precondition: is_ok().
  T& value() & { return std::get<T>(state_); }
  const T& value() const& { return std::get<T>(state_); }
  T&& value() && { return std::get<T>(std::move(state_)); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  T&& operator*() && { return std::get<T>(std::move(state_)); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace gdn

// Returns the Status of `expr` from the enclosing function unless it is ok.
#define GDN_RETURN_IF_ERROR(expr)                          \
  do {                                                     \
    if (::gdn::Status gdn_status_ = (expr); !gdn_status_)  \
      return gdn_status_;                                  \
  } while (0)
