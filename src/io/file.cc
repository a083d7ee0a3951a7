#include "io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace gdn {
namespace {

// One read or write call moves at most this much: Linux's own limit is just below 2 GiB.
constexpr size_t kMaxTransfer = size_t{1} << 30;

Status io_error(const std::string& path, const std::string& what, int error) {
  return {ErrorCode::kIo, fmt::format("{}: {}: {}", path, what, std::strerror(error))};
}

// The permissions open(2) would give a new file. umask can only be read by setting it.
mode_t default_mode() {
  const mode_t mask = ::umask(022);
  ::umask(mask);
  return 0666 & ~mask;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// PATH.partial-XXXXXX, the name cut where that would be longer than a name may be.
std::string temporary_name(const std::string& path) {
  const std::string suffix = ".partial-XXXXXX";
  const size_t slash = path.rfind('/');
  const size_t begin = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(0, begin + std::min(path.size() - begin, NAME_MAX - suffix.size())) + suffix;
}

}  // namespace

std::string in_quotes(const std::string& text) {
  constexpr size_t kLongest = 80;
  std::string out = "'";
  for (size_t i = 0; i < std::min(text.size(), kLongest); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c < 0x20 || c == 0x7f) {
      out += fmt::format("\\x{:02x}", c);
    } else {
      out += text[i];
    }
  }
  return out + (text.size() > kLongest ? "...'" : "'");
}

// ---- InputFile ----------------------------------------------------------------------------------
Result<InputFile> InputFile::open(const std::string& path) {
  const int descriptor =
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not block
  if (descriptor < 0) return io_error(path, "cannot open", errno);
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) {
    const int error = errno;
    ::close(descriptor);
    return io_error(path, "cannot stat", error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(descriptor);
    return Status{ErrorCode::kIo, fmt::format("{}: expected a regular file", path)};
  }
  return InputFile(path, descriptor, info.st_size);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status InputFile::read(int64_t offset, std::span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const size_t want = std::min(out.size() - done, kMaxTransfer);
    const ssize_t got = ::pread(descriptor_, out.data() + done, want,
                                static_cast<off_t>(offset) + static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(path_, fmt::format("cannot read at byte {}", offset), errno);
    if (got == 0) {
      return {ErrorCode::kIo,
              fmt::format("{}: expected {} bytes at byte {}, found {}: the file became shorter",
                          path_, out.size(), offset, done)};
    }
    done += static_cast<size_t>(got);
  }
  return Status::ok();
}

// ---- AtomicFile ---------------------------------------------------------------------------------
Result<AtomicFile> AtomicFile::create(const std::string& path) {
  if (path.empty()) return Status{ErrorCode::kIo, "expected the name of a file, got none"};
  std::string target = path;
  mode_t mode = default_mode();
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno != ENOENT) return io_error(path, "cannot write there", errno);
    if (::lstat(path.c_str(), &info) == 0) {
      return Status{ErrorCode::kIo,
                    fmt::format("{}: is a symbolic link to nothing; not written through", path)};
    }
  } else {
    if (!S_ISREG(info.st_mode)) {
      return Status{ErrorCode::kIo,
                    fmt::format("{}: exists and is not a regular file; not replaced", path)};
    }
    mode = info.st_mode & 07777;
    char resolved[PATH_MAX];
    if (::realpath(path.c_str(), resolved) == nullptr)
      return io_error(path, "cannot resolve", errno);
    target = resolved;
  }
  std::string temporary = temporary_name(target);
  const int descriptor = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (descriptor < 0) {
    return io_error(path, fmt::format("cannot create a file in {}", folder_of(target)), errno);
  }
  AtomicFile file(std::move(target), std::move(temporary), descriptor);
  if (::fchmod(descriptor, mode) != 0) return io_error(path, "cannot set permissions", errno);
  return file;
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Status AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxTransfer));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return io_error(path_, "cannot write", errno);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return Status::ok();
}

Status AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) return io_error(path_, "cannot flush to the disk", errno);
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) return io_error(path_, "cannot close", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return io_error(path_, "cannot rename into place", errno);
  }
  temporary_.clear();
  // The name itself: without this a crash may still forget the rename. Best effort, since some
  // file systems refuse to sync a folder.
  const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
  return Status::ok();
}

Status check_output(const std::string& path, std::span<const std::string> inputs) {
  struct stat output {};
  if (::stat(path.c_str(), &output) == 0) {
    for (const std::string& input : inputs) {
      struct stat info {};
      if (::stat(input.c_str(), &info) == 0 && info.st_dev == output.st_dev &&
          info.st_ino == output.st_ino) {
        return {ErrorCode::kInvalidArgument,
                fmt::format("{}: expected another file than the input {}, which it would replace",
                            path, input)};
      }
    }
  }
  return AtomicFile::create(path).status();
}

}  // namespace gdn
