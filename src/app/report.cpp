// pare report: runs as one self-contained HTML file.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "app/commands.h"
#include "app/report/data.h"
#include "base/text.h"

namespace pare {

namespace {

// Each file is one raw string literal.
constexpr const char* style =
#include "app/report/page.css"
    ;
constexpr const char* charts =
#include "app/report/charts.js"
    ;
constexpr const char* page =
#include "app/report/page.js"
    ;

// The policy forbids the page, and so any text in it, to load or send anything.
constexpr const char* head = R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>pare report</title>
)";

struct Options {
  std::vector<std::string> runs;
  std::string out;
  bool force = false;
};

// A page of this program may be replaced: a run that goes on is looked at again and again.
bool is_report(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string begin(std::strlen(head), '\0');
  return file.read(begin.data(), static_cast<std::streamsize>(begin.size())) && begin == head;
}

void report(const Options& o) {
  const std::string out =
      o.out.empty() ? (std::filesystem::path(o.runs[0]) / "report.html").lexically_normal().string() : o.out;
  check_output_file(out, "--out", o.force || is_report(out));
  const std::string data = report_data(o.runs);
  std::ofstream file(out, std::ios::binary);
  file << head << "<style>" << style << "</style>\n</head>\n<body>\n<main></main>\n"
       << "<noscript><p>The curves of this report are drawn by the script in it, which this browser does not run.</p>"
       << "</noscript>\n<script type=\"application/json\" id=\"data\">" << data << "</script>\n<script>" << charts
       << page << "</script>\n</body>\n</html>\n";
  file.close();
  if (!file) throw Error(Exit::failed, cat(out, ": cannot be written"));
  std::printf("report   %s\n", printable(out).c_str());
}

}  // namespace

void add_report(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("report", "runs as one self-contained HTML page: curves, costs, samples");
  c.option("runs", o->runs, "output directories of `pare train` or `pare sft`; the first is the baseline").required();
  c.option("--out", o->out, "output file; default: report.html in the first run");
  c.flag("--force", o->force, "replaces an output file that is no report");
  c.action([o] { report(*o); });
}

}  // namespace pare
