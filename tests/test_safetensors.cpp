// model/safetensors: what is read, what is refused (nothing hostile may allocate, hang or pass), what is written.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/half.h"
#include "base/json_file.h"
#include "model/hf/safetensors.h"

namespace pare {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(testing::TempDir()) / cat("pare_safetensors", getpid());
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string path(const std::string& name = "a.safetensors") const { return directory_ / name; }
  std::string write_bytes(const std::string& bytes) const {
    std::ofstream(path(), std::ios::binary) << bytes;
    return path();
  }
  std::string write(const std::string& header, const std::string& data) const {
    const uint64_t n = header.size();
    return write_bytes(std::string(reinterpret_cast<const char*>(&n), 8) + header + data);
  }
  std::string refusal(const std::string& header, const std::string& data = "") const {
    try {
      SafetensorsFile file(write(header, data));
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
      EXPECT_LT(std::string(e.what()).size(), 1000u);
      return e.what();
    }
    return "";
  }

  fs::path directory_;
};

std::string bytes_of(const std::vector<uint16_t>& v) { return {reinterpret_cast<const char*>(v.data()), 2 * v.size()}; }

TEST_F(Safetensors, UnalignedStartsAndEveryFloatType) {
  const float wide[3] = {1.5f, -0.0f, 1e-40f};
  // the header's length makes no start a multiple of the element's size
  const std::string data = std::string("\x07") + std::string(reinterpret_cast<const char*>(wide), 12) +
                           bytes_of({0x3fc0, 0x8000, 0x7f7f, 0x0001}) +
                           bytes_of({0x3e00, 0x8000, 0x7bff, 0x0001, 0x83ff, 0x7c00});
  const std::string header =
      R"({"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[13,21]},"u":{"dtype":"U8","shape":[],"data_offsets":[0,1]},)"
      R"("w":{"dtype":"F32","shape":[3,1],"data_offsets":[1,13]},"h":{"dtype":"F16","shape":[6],"data_offsets":[21,33]}})";
  SafetensorsFile file(write(header, data));
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "u");
  EXPECT_EQ(file.tensors()[0].size(), 1);
  EXPECT_EQ(file.find("x"), nullptr);
  float w[3], b[4], h[6];
  file.read_f32(*file.find("w"), w);
  EXPECT_EQ(std::memcmp(w, wide, sizeof w), 0);
  file.read_f32(*file.find("h"), h);
  EXPECT_EQ(h[0], 1.5f);
  EXPECT_TRUE(h[1] == 0 && std::signbit(h[1]));
  EXPECT_EQ(h[2], 65504.0f);
  EXPECT_EQ(h[3], 0x1p-24f);
  EXPECT_EQ(h[4], -1023 * 0x1p-24f);
  EXPECT_EQ(h[5], std::numeric_limits<float>::infinity());
  file.read_f32(*file.find("b"), b);
  EXPECT_EQ(b[0], 1.5f);
  EXPECT_TRUE(b[1] == 0 && std::signbit(b[1]));
  EXPECT_EQ(b[2], 0x1.fep127f);
  EXPECT_EQ(b[3], 0x1p-133f);
  EXPECT_THROW(file.read_f32(*file.find("u"), w), Error);
}

TEST_F(Safetensors, WrittenFileReadsBack) {
  const std::vector<float> a = {1, 2.5f, -3, 4, 0x1.01p0f, 0x1.03p0f}, b = {7};
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    write_safetensors(
        path(), {{"z", {3, 2}, values_at(a.data())}, {"b\"", {1}, values_at(b.data())}, {"empty", {0, 5}, {}}}, dtype);
    SafetensorsFile file(path());
    EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
    ASSERT_EQ(file.tensors().size(), 3u);
    EXPECT_EQ(file.tensors()[0].name, "b\"");
    EXPECT_EQ(file.find("z")->shape, (std::vector<int64_t>{3, 2}));
    EXPECT_EQ(file.find("z")->dtype, dtype == DType::f32 ? "F32" : dtype == DType::bf16 ? "BF16" : "F16");
    EXPECT_EQ(file.find("empty")->size(), 0);
    std::vector<float> back(6);
    file.read_f32(*file.find("z"), back.data());
    std::vector<float> expected = a;
    if (dtype == DType::bf16) {  // ties go to the even neighbour
      expected[4] = 1;
      expected[5] = 0x1.04p0f;
    }
    EXPECT_EQ(back, expected);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1) << "something left beside";
}

// More than one piece of what is written at a time, more than one window of what is read; parts of it.
TEST_F(Safetensors, LongBf16) {
  constexpr int64_t n = 2'200'001;
  std::vector<float> a(n), back(a.size());
  for (size_t i = 0; i < a.size(); i++) a[i] = bf16_to_f32(static_cast<uint16_t>(i % 0x7f80));
  write_safetensors(path(), {{"a", {n}, values_at(a.data())}}, DType::bf16);
  SafetensorsFile file(path());
  file.read_f32(file.tensors()[0], back.data());
  EXPECT_EQ(back, a);
  back.assign(11, -1);
  file.read_f32(file.tensors()[0], back.data(), 1'200'003, 10);
  EXPECT_TRUE(std::equal(back.begin(), back.end() - 1, a.begin() + 1'200'003));
  EXPECT_EQ(back[10], -1);
  EXPECT_THROW(file.read_f32(file.tensors()[0], back.data(), n - 5, 6), std::logic_error);
}

// While it is open: an error with file and place, not a signal.
TEST_F(Safetensors, AFileThatIsCutShortIsAnError) {
  const std::vector<float> a(100'003, 1);
  std::vector<float> back(a.size());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    write_safetensors(path(), {{"a", {100'003}, values_at(a.data())}}, dtype);
    const SafetensorsFile file(path());
    const uint64_t kept = fs::file_size(path()) / 2;
    fs::resize_file(path(), kept);
    file.read_f32(file.tensors()[0], back.data(), 0, 1000);
    EXPECT_EQ(back[999], 1);
    try {
      file.read_f32(file.tensors()[0], back.data());
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(cat(path(), ": ends at byte ", kept)), std::string::npos) << e.what();
    }
    fs::resize_file(path(), 0);
    EXPECT_THROW(file.read_f32(file.tensors()[0], back.data(), 0, 1), Error);
  }
}

TEST_F(Safetensors, FailedWriteLeavesTheOldFile) {
  const float one = 1;
  fs::create_directories(path("dir/x"));
  EXPECT_THROW(write_safetensors(path("dir"), {{"a", {1}, values_at(&one)}}, DType::f32), Error);
  EXPECT_THROW(write_safetensors(path("none/a"), {{"a", {1}, values_at(&one)}}, DType::f32), Error);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);
  EXPECT_THROW(write_safetensors(path(), {{"a", {1}, values_at(&one)}, {"a", {1}, values_at(&one)}}, DType::f32),
               std::logic_error);
}

// What was finite in the run would be infinite in the file.
TEST_F(Safetensors, WhatTheTypeCannotHoldIsNamed) {
  std::vector<float> a(300'000, 1);
  a[270'001] = -65520;
  const auto refusal = [&](DType dtype) {
    try {
      write_safetensors(path(), {{"w", {300'000}, values_at(a.data())}}, dtype);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::failed);
      EXPECT_FALSE(fs::exists(path()));
      return std::string(e.what());
    }
    fs::remove(path());
    return std::string();
  };
  EXPECT_NE(refusal(DType::f16).find("tensor w holds -65520 at element 270001, too large for F16"), std::string::npos);
  EXPECT_EQ(refusal(DType::bf16), "");
  a[270'001] = std::nextafter(65520.0f, 0.0f);
  EXPECT_EQ(refusal(DType::f16), "");
  a[270'001] = std::numeric_limits<float>::infinity();  // it was not the type
  EXPECT_EQ(refusal(DType::f16), "");
  a[270'001] = std::numeric_limits<float>::max();
  EXPECT_NE(refusal(DType::bf16).find("too large for BF16"), std::string::npos);
  EXPECT_EQ(refusal(DType::f32), "");
}

TEST_F(Safetensors, F16RoundingOfEveryKind) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t sign : {0u, 0x8000u})
    for (uint32_t h = 0; h <= 0x7bff; h++) {
      const float low = f16_to_f32(static_cast<uint16_t>(h));
      const float high = h == 0x7bff ? 65536.0f : f16_to_f32(static_cast<uint16_t>(h + 1));
      const float middle = (low + high) / 2;  // exact
      const auto rounded = [&](float x) { return static_cast<uint32_t>(f32_to_f16(sign ? -x : x)); };
      ASSERT_EQ(rounded(low), sign | h);
      ASSERT_EQ(rounded(std::nextafter(middle, 0.0f)), sign | h);
      ASSERT_EQ(rounded(middle), sign | (h % 2 ? h + 1 : h)) << h;  // ties go to the even neighbour
      ASSERT_EQ(rounded(std::nextafter(middle, infinity)), sign | (h + 1));
    }
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(f32_to_f16(-infinity), 0xfc00);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::denorm_min()), 0);
  for (const uint32_t nan : {0x7f800001u, 0xffffffffu, 0x7fc00000u})
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(std::bit_cast<float>(nan)))));
}

TEST_F(Safetensors, Bf16RoundingOfEveryKind) {
  EXPECT_EQ(f32_to_bf16(0x1.017fp0f), 0x3f81);  // above the tie
  EXPECT_EQ(f32_to_bf16(0x1.00ffp0f), 0x3f80);  // below it
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-std::numeric_limits<float>::infinity()), 0xff80);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
  for (uint32_t h = 0; h < 0x10000; h++)
    ASSERT_EQ(f32_to_bf16(bf16_to_f32(static_cast<uint16_t>(h))), (h & 0x7fff) > 0x7f80 ? h | 0x40 : h);
}

TEST_F(Safetensors, AcceptedHeaders) {
  const std::string one(4, '\0');
  for (const std::string& header : {
           std::string(R"(  {"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})") + " \n\t",
           std::string(R"({"__metadata__":null,"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})"),
           std::string(R"({"__metadata__":{},"a":{"data_offsets":[0,4],"shape":[1,1],"dtype":"F32"}})"),
           std::string(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":[{"x":[1.5,null]},true]}})"),
           std::string(R"({"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}})"),
           std::string(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                       R"("c":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]}})"),
       })
    EXPECT_EQ(refusal(header, one), "") << header;
}

// The types of the format and the bits of an element: eight elements fill as many bytes.
TEST_F(Safetensors, EveryTypeHasItsSize) {
  const std::pair<std::vector<const char*>, size_t> types[] = {
      {{"F4"}, 4},
      {{"F6_E2M3", "F6_E3M2"}, 6},
      {{"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}, 8},
      {{"I16", "U16", "F16", "BF16"}, 16},
      {{"I32", "U32", "F32"}, 32},
      {{"I64", "U64", "F64", "C64"}, 64}};
  for (const auto& [names, bits] : types)
    for (const char* name : names) {
      const std::string header = cat(R"({"a":{"dtype":")", name, R"(","shape":[8],"data_offsets":[0,)", bits, "]}}");
      EXPECT_EQ(refusal(header, std::string(bits, '\0')), "") << name;
    }
}

TEST_F(Safetensors, RefusedHeaders) {
  const std::string one(4, '\0');
  auto tensor = [](const std::string& body) { return R"({"a":{)" + body + "}}"; };
  for (const std::string& header : {
           std::string(""),
           std::string("   "),
           std::string("null"),
           std::string("[]"),
           std::string("{\"a\":3}"),
           std::string("{\"a\":null}"),
           std::string("{\"__metadata__\":[]}"),
           std::string("{\"__metadata__\":{\"a\":null}}"),
           std::string("{\"__metadata__\":{\"a\":\"x\",\"a\":\"x\"}}"),
           std::string("{\"__metadata__\":{},\"__metadata__\":{}}"),
           "\xef\xbb\xbf" + tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])") + std::string("\0\0", 2),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])") + "{}",
           tensor(R"("dtype":"F32","shape":[1])"),
           tensor(R"("dtype":"F32","data_offsets":[0,4])"),
           tensor(R"("shape":[1],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,4])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[-0,4])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4.0])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551620])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":{"0":4})"),
           tensor(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[true],"data_offsets":[0,4])"),
           tensor(R"("dtype":["F32"],"shape":[1],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[2305843009213693953],"data_offsets":[0,4])"),  // wraps to the right size
           tensor(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"),
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":)" + std::string(10000, '[') +
                  std::string(10000, ']')),
           R"({"a":)" + std::string(100000, '['),
           tensor(R"("dtype":"F32","shape":[)" + std::string(R"(1,)") + R"(1],"data_offsets":[4,8])"),
           std::string("{\"a\\ud800\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}"),
           std::string(200000, 'x'),
           "{\"" + std::string(100000, 'n') + "\":{\"dtype\":\"F32\"}}",
       })
    EXPECT_NE(refusal(header, one), "") << header.substr(0, 100);
  EXPECT_NE(refusal("{\"a\":3}").find("tensor \"a\": expected an object, found a number"), std::string::npos);
  EXPECT_NE(refusal("{\"__metadata__\":[]}").find("\"__metadata__\": expected an object"), std::string::npos);
  EXPECT_NE(refusal("{}", "x"), "");
  EXPECT_NE(refusal(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), "xxxxx"), "");
  EXPECT_NE(refusal(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), "xxx"), "");
  EXPECT_THROW(SafetensorsFile(path("absent")), Error);
  EXPECT_THROW(SafetensorsFile(directory_.string()), Error);
}

// Every header with one byte changed or cut is read or refused, never worse (run under ASan).
TEST_F(Safetensors, MutatedHeaders) {
  const std::string good =
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}})";
  const std::string data(9, '\1');
  ASSERT_EQ(refusal(good, data), "");
  const std::string replacements("\0\"{}[],9-\x80", 10);
  size_t refused = 0;
  for (size_t i = 0; i < good.size(); i++) {
    std::string bad = good;
    bad[i] = replacements[i % replacements.size()];
    refused += !refusal(bad, data).empty();
    EXPECT_NE(refusal(good.substr(0, i), data), "") << i;
  }
  EXPECT_GT(refused, good.size() * 3 / 4);
}

TEST_F(Safetensors, Corpus) {
  const fs::path corpus = "../shared/data/safetensors_corpus";
  if (!fs::exists(corpus)) GTEST_SKIP() << corpus << " is absent";
  size_t files = 0;
  for (const json& entry : read_json_file(corpus / "manifest.json")) {
    const std::string file = corpus / entry["file"].get<std::string>();
    const bool expected = entry["expect"] == "ok" || entry["expect"] == "ok_lenient";
    if (!expected) {
      EXPECT_THROW(SafetensorsFile{file}, Error) << file << ": " << entry["reason"];
    } else {
      SafetensorsFile opened(file);
      const json tensors = entry.value("tensors", json::object());
      for (const auto& [name, tensor] : tensors.items()) {
        ASSERT_NE(opened.find(name), nullptr) << file;
        EXPECT_EQ(opened.find(name)->dtype, tensor[0]);
        EXPECT_EQ(json(opened.find(name)->shape), tensor[1]);
      }
    }
    files++;
  }
  EXPECT_GT(files, 0u);
}

}  // namespace
}  // namespace pare
