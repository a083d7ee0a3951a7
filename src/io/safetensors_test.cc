// The safetensors reader and writer: round trips, what is refused and how it is said, and that a
// failed write leaves nothing.
#include "io/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "io/safetensors_property.h"
#include "io/temporary_folder.h"

namespace gdn {
namespace {

namespace fs = std::filesystem;

class SafetensorsFileTest : public TemporaryFolder {
 protected:
  int64_t files() const {
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }
};

std::string file_bytes(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + std::string(data_bytes, '\0');
}

// Why a file with this JSON and so many bytes of data is refused; empty if it is accepted.
std::string refusal(const std::string& header, size_t data_bytes) {
  const auto parsed = parse_safetensors_header(std::as_bytes(std::span(header)),
                                               static_cast<int64_t>(data_bytes), "f");
  const std::string whole = file_bytes(header, data_bytes);
  EXPECT_EQ(parsed.is_ok(), check_safetensors(std::as_bytes(std::span(whole))).has_value());
  return parsed.is_ok() ? "" : parsed.status().message();
}

std::string tensor(const std::string& fields) { return "{\"a\":{" + fields + "}}"; }

HostTensor counted(DType dtype, int64_t rows, int64_t cols) {
  HostTensor out(dtype, {rows, cols});
  for (int64_t i = 0; i < out.buffer.bytes(); ++i) {
    out.as<uint8_t>()[i] = static_cast<uint8_t>(i * 7 + 3);
  }
  return out;
}

TEST_F(SafetensorsFileTest, RoundTripOfEveryDtype) {
  std::vector<HostTensor> tensors;
  std::vector<NamedTensor> named;
  for (DType dtype :
       {DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kInt32, DType::kInt64}) {
    tensors.push_back(counted(dtype, 3, 5));
    named.push_back({std::string("t_") + to_string(dtype), tensors.back().view});
  }
  tensors.push_back(counted(DType::kFloat32, 0, 5));
  named.push_back({"empty \"quoted\" \\ \n \xc3\xa9", tensors.back().view});
  ASSERT_TRUE(write_safetensors(path("x"), named, {{"made_by", "test"}}));

  const auto file = SafetensorsFile::open(path("x"));
  ASSERT_TRUE(file) << file.status().message();
  EXPECT_EQ(file->header().metadata.at("made_by"), "test");
  ASSERT_EQ(file->header().entries.size(), named.size());
  for (const SafetensorsEntry& entry : file->header().entries) {
    if (entry.begin == entry.end) continue;
    EXPECT_EQ(entry.begin % ((entry.end - entry.begin) / 15), 0) << entry.name << " is aligned";
  }
  for (size_t i = 0; i < named.size(); ++i) {
    const auto loaded = file->load(named[i].name);
    ASSERT_TRUE(loaded) << loaded.status().message();
    EXPECT_EQ(loaded->view.dtype, named[i].view.dtype);
    EXPECT_EQ(loaded->view.shape, named[i].view.shape);
    EXPECT_EQ(loaded->view.stride, named[i].view.stride);
    ASSERT_EQ(loaded->buffer.bytes(), tensors[i].buffer.bytes());
    if (loaded->buffer.bytes() > 0) {
      EXPECT_EQ(0, std::memcmp(loaded->view.data, tensors[i].view.data, loaded->buffer.bytes()));
    }
  }
}

TEST_F(SafetensorsFileTest, TruncatedAtEveryByte) {
  const HostTensor a = counted(DType::kFloat32, 2, 3), b = counted(DType::kInt64, 1, 2);
  ASSERT_TRUE(write_safetensors(path("x"), std::vector<NamedTensor>{{"a", a.view}, {"b", b.view}}));
  std::ifstream in(path("x"), std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  ASSERT_TRUE(check_safetensors(std::as_bytes(std::span(whole))));
  for (size_t n = 0; n < whole.size(); ++n) {
    std::ofstream(path("cut"), std::ios::binary).write(whole.data(), static_cast<int64_t>(n));
    const auto file = SafetensorsFile::open(path("cut"));
    ASSERT_FALSE(file) << "accepted with " << n << " of " << whole.size() << " bytes";
    EXPECT_EQ(file.status().code(), ErrorCode::kIo);
    EXPECT_NE(file.status().message().find(path("cut")), std::string::npos);
  }
  std::ofstream(path("long"), std::ios::binary) << whole << '\0';
  EXPECT_FALSE(SafetensorsFile::open(path("long"))) << "a trailing byte";
}

TEST_F(SafetensorsFileTest, ShorterSinceItWasOpened) {
  const HostTensor a = counted(DType::kFloat32, 100, 100);
  ASSERT_TRUE(write_safetensors(path("x"), std::vector<NamedTensor>{{"a", a.view}}));
  const auto file = SafetensorsFile::open(path("x"));
  ASSERT_TRUE(file);
  fs::resize_file(path("x"), 5000);
  const auto loaded = file->load("a");
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.status().message().find("became shorter"), std::string::npos);
}

TEST_F(SafetensorsFileTest, TensorsItCannotGive) {
  const std::string header =
      R"({"half":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},)"
      R"("scalar":{"dtype":"F64","shape":[],"data_offsets":[8,16]},)"
      R"("deep":{"dtype":"F32","shape":[1,1,1,1,2],"data_offsets":[16,24]}})";
  std::ofstream(path("x"), std::ios::binary) << file_bytes(header, 24);
  const auto file = SafetensorsFile::open(path("x"));
  ASSERT_TRUE(file) << file.status().message();
  const auto why = [&](const std::string& name) { return file->load(name).status().message(); };
  EXPECT_NE(why("half").find("tensor 'half': dtype F16, expected one of BF16"), std::string::npos);
  EXPECT_NE(why("scalar").find("tensor 'scalar': rank 0"), std::string::npos);
  EXPECT_NE(why("deep").find("tensor 'deep': rank 5, expected 1 to 4"), std::string::npos);
  EXPECT_NE(why("q").find("tensor 'q': not in the file"), std::string::npos);
}

TEST_F(SafetensorsFileTest, NotAFile) {
  EXPECT_FALSE(SafetensorsFile::open(path("missing")));
  EXPECT_FALSE(SafetensorsFile::open(folder_.string()));
  EXPECT_FALSE(SafetensorsFile::open("/dev/zero"));
}

TEST(SafetensorsHeaderTest, LyingLengths) {
  for (uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{100}, uint64_t{100'000'001},
                     uint64_t{1} << 62, ~uint64_t{0}, ~uint64_t{7}}) {
    std::string bytes = file_bytes("{}", 0);
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(n >> (8 * i) & 0xff);
    EXPECT_FALSE(check_safetensors(std::as_bytes(std::span(bytes)))) << n;
  }
}

TEST(SafetensorsHeaderTest, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(refusal("{}", 0), "");
  EXPECT_EQ(refusal("{}   \n\t", 0), "");
  EXPECT_EQ(refusal(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8), "");
  EXPECT_EQ(refusal(tensor(R"("data_offsets":[0,8],"shape":[],"dtype":"F64")"), 8), "");
  EXPECT_EQ(refusal(tensor(R"("dtype":"F4","shape":[2,8],"data_offsets":[0,8])"), 8), "");
  EXPECT_EQ(refusal(R"({"__metadata__":null})", 0), "");
  EXPECT_EQ(refusal(R"({"__metadata__":{"x":"1"}})", 0), "");
  EXPECT_EQ(refusal(tensor(R"("x":{"y":[[1,{"z":-2.5}],null,true,"s"]},"dtype":"F32","shape":[2],)"
                           R"("w":1,"data_offsets":[0,8])"),
                    8),
            "")
      << "keys of later versions";
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},)"
                    R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                    8),
            "");
}

struct Refused {
  const char* fields;  // of the only tensor; or a whole header where it begins with '{' or not '"'
  const char* why;
};

TEST(SafetensorsHeaderTest, RefusesAndSaysWhy) {
  const std::string deep = R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":)" +
                           std::string(100'000, '[') + std::string(100'000, ']');
  const Refused cases[] = {
      // What is not JSON, or not the format's.
      {"", "must begin with '{'"},
      {" {}", "must begin with '{'"},
      {"[]", "must begin with '{'"},
      {"{", "not valid JSON"},
      {"{}x", "not valid JSON"},
      {"{/**/}", "not valid JSON"},
      {"{\"a\":NaN}", "not valid JSON"},
      {"{\"a\":5}", "tensor 'a': expected an object, found a number"},
      {"{\"\xff\":{}}", "not valid JSON"},
      {"{\"\\ud800\":{}}", "not valid JSON"},
      {"{\"__metadata__\":{\"x\":1}}", "__metadata__: expected a string, found a number"},
      {"{\"__metadata__\":[]}", "__metadata__: expected an object, found an array"},
      {"{\"__metadata__\":{\"x\":{}}}", "__metadata__: expected a string, found an object"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "'__metadata__' is given twice"},
      // Fields.
      {R"("shape":[2],"data_offsets":[0,8])", "tensor 'a': dtype is missing"},
      {R"("dtype":"F32","data_offsets":[0,8])", "tensor 'a': shape is missing"},
      {R"("dtype":"F32","shape":[2])", "tensor 'a': data_offsets is missing"},
      {R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])", "dtype is given twice"},
      {R"("dtype":null,"shape":[2],"data_offsets":[0,8])", "dtype: expected a string, found null"},
      {R"("dtype":32,"shape":[2],"data_offsets":[0,8])",
       "dtype: expected a string, found a number"},
      {R"("dtype":"F33","shape":[2],"data_offsets":[0,8])", "unknown dtype 'F33'"},
      {R"("dtype":"F32","shape":2,"data_offsets":[0,8])",
       "shape: expected an array, found a number"},
      {R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])", "found the number '2.0'"},
      {R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])", "found a negative number"},
      {R"("dtype":"F32","shape":[-0],"data_offsets":[0,8])", "found a negative number"},
      {R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])", "shape: expected integers >= 0"},
      {R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])", "shape: expected integers >= 0"},
      {R"("dtype":"F32","shape":[1e999],"data_offsets":[0,8])", "not valid JSON"},
      {R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])", "shape too large"},
      {R"("dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8])", "found the number"},
      {R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])", "more than 2^63"},
      {R"("dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0])", "more than 2^63"},
      {R"("dtype":"F4","shape":[15],"data_offsets":[0,8])", "not a whole number of bytes"},
      {R"("dtype":"F32","shape":[3],"data_offsets":[0,8])",
       "needs 12 bytes, data_offsets [0, 8] hold 8"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[8,0])", "data_offsets [8, 0]"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0])", "expected 2 numbers, found 1"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])", "expected 2 numbers, found more"},
      {R"("dtype":"F32","shape":[2],"data_offsets":{"0":0})", "expected an array of 2 numbers"},
      {deep.c_str(), "nested too deeply"},
      // Extents against the file (8 bytes of data).
      {R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", "a hole before it"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0,4])",
       "describes 4 bytes of data, the file has 8"},
      {R"("dtype":"F32","shape":[4],"data_offsets":[0,16])", "describes 16 bytes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "'b': begins at byte 4 of the data, expected 8 (overlaps"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "'a' is given twice"},
  };
  for (const Refused& c : cases) {
    const std::string header = c.fields[0] == '"' ? tensor(c.fields) : c.fields;
    const std::string why = refusal(header, 8);
    EXPECT_NE(why, "") << header.substr(0, 200);
    EXPECT_NE(why.find(c.why), std::string::npos)
        << header.substr(0, 200) << "\n  expected: " << c.why << "\n  got: " << why;
    EXPECT_LT(why.size(), 400u);
  }
}

TEST_F(SafetensorsFileTest, WriterRefusesAndLeavesNothing) {
  const HostTensor a = counted(DType::kFloat32, 2, 3);
  TensorView transposed = a.view;
  std::swap(transposed.shape[0], transposed.shape[1]);
  std::swap(transposed.stride[0], transposed.stride[1]);
  const auto code = [&](std::vector<NamedTensor> tensors) {
    return write_safetensors(path("x"), tensors).code();
  };
  EXPECT_EQ(code({{"a", a.view}, {"a", a.view}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({{"__metadata__", a.view}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({{"a", transposed}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({{"a", TensorView{}}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(files(), 0);
  EXPECT_EQ(write_safetensors(path("no/such/folder"), {}).code(), ErrorCode::kIo);
  EXPECT_EQ(write_safetensors(folder_.string(), {}).code(), ErrorCode::kIo);
  EXPECT_EQ(write_safetensors("/dev/null", {}).code(), ErrorCode::kIo);
  EXPECT_EQ(files(), 0);
}

TEST_F(SafetensorsFileTest, FailedWriteKeepsTheOldFile) {
  std::ofstream(path("x")) << "old";
  const HostTensor big = counted(DType::kFloat32, 1000, 1000);
  // The "disk" is full after 64 KiB: the kernel refuses longer files with EFBIG.
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{65536, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = write_safetensors(path("x"), std::vector<NamedTensor>{{"a", big.view}});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(status.code(), ErrorCode::kIo);
  EXPECT_NE(status.message().find("cannot write"), std::string::npos) << status.message();
  EXPECT_EQ(files(), 1) << "only the old file";
  std::string text;
  std::ifstream(path("x")) >> text;
  EXPECT_EQ(text, "old");
}

TEST_F(SafetensorsFileTest, ReplacesThroughALinkAndKeepsPermissions) {
  std::ofstream(path("real")) << "old";
  fs::permissions(path("real"), fs::perms{0640});
  fs::create_symlink("real", path("link"));
  const HostTensor a = counted(DType::kFloat32, 2, 3);
  ASSERT_TRUE(write_safetensors(path("link"), std::vector<NamedTensor>{{"a", a.view}}));
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(fs::status(path("real")).permissions(), fs::perms{0640});
  EXPECT_TRUE(SafetensorsFile::open(path("real")));
  EXPECT_EQ(files(), 2);
}

}  // namespace
}  // namespace gdn
