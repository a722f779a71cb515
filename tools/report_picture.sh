#!/usr/bin/env bash
# Makes tools/report.png, the picture in the README: the report of the quickstart's runs with two seeds each (under two
# minutes on two quiet cores), photographed by headless Chromium and packed by pngquant.  Run it from the repository's
# root after `make`.
set -euo pipefail
build/pare sft quickstart-sft --force
for seed in 1 2; do
  for preset in quickstart quickstart-rpc; do
    build/pare train $preset --force trainer.seed=$seed trainer.default_local_dir=runs/$preset-seed$seed
  done
done
page=$PWD/runs/report.html
build/pare report runs/quickstart-seed1 runs/quickstart-seed2 runs/quickstart-rpc-seed1 runs/quickstart-rpc-seed2 --out "$page"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,1195 \
  --screenshot=tools/report.png "file://$page"
pngquant --force --ext .png 96 tools/report.png
