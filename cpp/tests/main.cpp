// Runs the tests and counts them by file. A whole run in which fewer ran than recorded.txt says fails, whatever became of them;
// KVQUANT_TEST_TARGET=scalar KVQUANT_TEST_RECORD=1 prints this program's lines for that file.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "compared.hpp"

namespace {

// Counts that no machine may fall short of: assertions grow with its targets, so that those of one target are recorded.
struct Count {
  long cases = 0, assertions = 0, compared = 0;  // compared: calls on the target that compared fewest
};
std::map<std::string, Count> ran;

std::string file_name(std::string path) { return path.substr(path.find_last_of('/') + 1); }

long fewest_compared(const std::uint64_t (&before)[kvtest::kMostTargets]) {
  long fewest = 0;
  for (int i = 0; i < kvtest::kMostTargets; ++i) {
    const long now = static_cast<long>(kvtest::compared[i] - before[i]);
    if (now > 0) fewest = fewest > 0 ? std::min(fewest, now) : now;
  }
  return fewest;
}

struct Counter : doctest::IReporter {
  explicit Counter(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& test) override {
    file_ = file_name(test.m_file.c_str());
    std::copy(std::begin(kvtest::compared), std::end(kvtest::compared), before_);
  }
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    Count& count = ran[file_];
    ++count.cases;
    count.assertions += stats.numAssertsCurrentTest;
    count.compared += fewest_compared(before_);
  }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}

 private:
  std::string file_;
  std::uint64_t before_[kvtest::kMostTargets] = {};
};
REGISTER_LISTENER("counter", 1, Counter);

// How many files of this program lost tests.
int lost(const std::string& program) {
  std::ifstream recorded(KVQUANT_RECORDED_FILE);
  std::string of, file;
  int lines = 0, lost = 0;
  for (Count least; recorded >> of >> file >> least.cases >> least.assertions >> least.compared;) {
    if (of != program) continue;
    ++lines;
    const Count& count = ran[file];
    if (count.cases >= least.cases && count.assertions >= least.assertions && count.compared >= least.compared) continue;
    ++lost;
    std::printf("ERROR %s: %ld cases, %ld assertions and %ld compared calls on a target ran; cpp/tests/recorded.txt has %ld, %ld and %ld\n",
                file.c_str(), count.cases, count.assertions, count.compared, least.cases, least.assertions, least.compared);
  }
  if (lines == 0) std::printf("ERROR cpp/tests/recorded.txt has no lines of %s\n", program.c_str());
  return lines == 0 ? 1 : lost;
}

}  // namespace

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const int failed = context.run();
  const std::string program = file_name(argv[0]);
  if (std::getenv("KVQUANT_TEST_RECORD"))
    for (const auto& [file, count] : ran)
      std::printf("%s %s %ld %ld %ld\n", program.c_str(), file.c_str(), count.cases, count.assertions, count.compared);
  else if (failed == 0 && !context.shouldExit() && argc == 1 && !std::getenv("KVQUANT_TEST_EVERY"))  // not chosen by hand
    return lost(program);
  return failed;
}
