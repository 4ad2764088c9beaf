#!/bin/sh
# The Mooncake wheel needs three Debian libraries: install them where we are root, else print the command.
set -eu
missing=""
for pair in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
  PATH="$PATH:/sbin:/usr/sbin" ldconfig -p | grep -q "${pair%%:*}" || missing="$missing ${pair##*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing system libraries for Mooncake:$missing"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
else
  echo "Mooncake needs system libraries that are missing here. Please run, then start again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y$missing" >&2
  exit 1
fi
