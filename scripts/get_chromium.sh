#!/usr/bin/env bash
# Puts a Chromium to look at pages with into a directory: `DIRECTORY/chromium` runs it. It is the one that is installed,
# otherwise that of the npm package @sparticuz/chromium, which holds the program for Linux on x86-64 with its libraries.
# Where neither can be had it says so and ends with status 0; the tests of the page are then skipped.
set -euo pipefail
directory=${1:?usage: get_chromium.sh DIRECTORY}
version=${DET_LIGHTNING_CHROMIUM_VERSION:-147.0.0}
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
[ -x "$directory/chromium" ] && exit 0

for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
    if installed=$(command -v "$name"); then
        ln -s "$installed" "$directory/chromium"
        exit 0
    fi
done

if ! command -v npm >/dev/null || ! command -v node >/dev/null || [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "################ No Chromium is installed, nor npm to get one with: the page is NOT tested. ################" >&2
    exit 0
fi
cd "$directory"
if ! npm pack --silent "@sparticuz/chromium@$version" >/dev/null; then
    echo "################ npm has no @sparticuz/chromium@$version here: the page is NOT tested. ################" >&2
    exit 0
fi
tar -xzf sparticuz-chromium-*.tgz package/bin
rm sparticuz-chromium-*.tgz
for file in chromium al2023.tar; do
    node -e 'process.stdout.write(require("zlib").brotliDecompressSync(require("fs").readFileSync(process.argv[1])))' \
        "package/bin/$file.br" > "$file"
done
rm -r package
mv chromium chromium.bin
chmod +x chromium.bin
tar -xf al2023.tar
rm al2023.tar
cat > chromium <<RUN
#!/bin/sh
LD_LIBRARY_PATH="$directory/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" exec "$directory/chromium.bin" "\$@"
RUN
chmod +x chromium
