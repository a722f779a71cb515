// pare help: pages that are part of the program.
#include "app/commands.h"
#include "app/console.h"
#include "data/presets.h"

namespace pare {

void add_help(const Command& program) {
  const Command c = program.command("help", "a page of the manual: `pare help data`, the rows of data files");
  auto topic = std::make_shared<std::string>();
  c.option("topic", *topic, "data").required();
  c.action([topic] {
    if (*topic != "data") fail("there is no page ", *topic, "; there is data (the rows of data files)");
    print(std::string(*preset_text("formats", "md")));
  });
}

}  // namespace pare
