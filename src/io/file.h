// Files as the readers and writers here need them: positioned reads whose errors name the file, and
// an output that appears under its name complete or not at all.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gdn/status.h"

namespace gdn {

// `text` in single quotes for messages: control characters escaped, long texts cut.
std::string in_quotes(const std::string& text);

// A regular file, open for reading.
class InputFile {
 public:
  static Result<InputFile> open(const std::string& path);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened

  // Fills `out` from `offset`; a file that became shorter since is an error.
  Status read(int64_t offset, std::span<std::byte> out) const;

 private:
  InputFile(std::string path, int descriptor, int64_t size)
      : path_(std::move(path)), descriptor_(descriptor), size_(size) {}

  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

// Written under a temporary name beside `path`; commit() flushes it to the disk and renames it.
// Without a successful commit() nothing remains and a file that was at `path` is untouched.
class AtomicFile {
 public:
  // Refuses a `path` that exists and is not a regular file; follows symbolic links, but not to
  // nothing.
  static Result<AtomicFile> create(const std::string& path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  Status write(std::span<const std::byte> bytes);
  Status commit();

 private:
  AtomicFile(std::string path, std::string temporary, int descriptor)
      : path_(std::move(path)), temporary_(std::move(temporary)), descriptor_(descriptor) {}

  std::string path_;       // where it will be, links resolved
  std::string temporary_;  // where it is; empty once committed
  int descriptor_ = -1;
};

// Whether AtomicFile could write `path` now, found out by creating and removing its temporary file,
// and that it is none of the files that are still to be read (links of both kinds are followed).
// For asking before a long computation.
Status check_output(const std::string& path, std::span<const std::string> inputs = {});

}  // namespace gdn
