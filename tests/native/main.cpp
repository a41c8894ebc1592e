#include <cstdio>
#include <cstring>
#include <exception>

#include "check.hpp"

// Runs all tests, or those whose name contains the first argument.
int main(int argc, char** argv) {
  int num_failed = 0;
  int num_run = 0;
  for (const check::Test& test : check::tests()) {
    if (argc > 1 && std::strstr(test.name.c_str(), argv[1]) == nullptr) continue;
    ++num_run;
    try {
      test.body();
      std::printf("ok      %s\n", test.name.c_str());
    } catch (const std::exception& error) {
      ++num_failed;
      std::printf("FAILED  %s: %s\n", test.name.c_str(), error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
