#pragma once

// A test framework of a few lines: TEST(name) { CHECK(...); } in any file, RUN_TESTS from main.cpp.

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body) { tests().push_back({name, std::move(body)}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw Failed(text.str());
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream text;
  text << expression << ": " << a << " != " << b;
  fail(file, line, text.str());
}

// The message of the Error that `body` throws.
template <typename Error, typename Body>
std::string message_of(Body&& body, const char* expression, const char* file, int line) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  fail(file, line, std::string("nothing was thrown by ") + expression);
}

}  // namespace check

#define TEST(name)                                                  \
  static void test_##name();                                        \
  static const check::Register register_##name{#name, test_##name}; \
  static void test_##name()
#define CHECK(condition) \
  if (!(condition)) check::fail(__FILE__, __LINE__, #condition)
#define CHECK_EQUAL(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(Error, expression) \
  check::message_of<Error>([&] { expression; }, #expression, __FILE__, __LINE__)
